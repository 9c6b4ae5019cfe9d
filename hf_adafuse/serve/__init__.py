"""Ensembles behind an address that speaks OpenAI's API: `hf-adafuse serve`. Needs the extra `serve` (FastAPI, uvicorn).

`ensembles` loads what is served, `requests` says what may be asked, `calls` makes calls of `generate()` of it, `engine`
decodes them in running batches, `answers` shows what came of them, `app` is the API, `page.html` the page at `/`.
"""
