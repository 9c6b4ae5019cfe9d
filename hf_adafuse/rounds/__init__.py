"""The rounds of a call, to be looked at: as text, as HTML, as lists that show themselves.

`trace_text` and `trace_html` lay rounds out, `round_lists` are the lists that a call returns, `plain_json` makes them
JSON. What a round is stands in `hf_adafuse.outputs`, pictures of it in `hf_adafuse.plots`.
"""
