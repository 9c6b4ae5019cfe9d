"""Ensembles behind an address that speaks OpenAI's API: `hf-adafuse serve`. Needs the extra `serve` (FastAPI, uvicorn).

`app` is the API and `page.html` the page at `/`. `requests` says what a request may hold. `service` takes a request to
its reply: `calls` plans its calls of `generate()`, `engine` decodes them in running batches, `answers` and `replies`
put the texts into OpenAI's form. `ensembles` makes served ensembles of loaded members.
"""
