"""Clients of the servers that members may run behind: vLLM, SGLang, llama.cpp.

`served_model` stands in for a loaded model. `api` is what all servers can be asked, in the types of `queries`. `vllm`,
`sglang` and `llamacpp` put it into each server's requests, and `kinds`
names them. `transport` sends requests and retries them.
"""
