"""Models behind servers, as members: what is asked of one, in the shapes that each kind of server knows.

`queries` is what is asked and answered, `connection` the requests and what is done about answers that do not come or
cannot be right, `api` what all kinds of server have in common, `vllm`, `sglang` and `llamacpp` one kind each.
`served_model` is what stands in for a loaded model. This room must not know trees, words or other members.
"""
