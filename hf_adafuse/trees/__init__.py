"""Token trees below committed prefixes, and everything that runs a local model: backends, KV caches, masks, pass costs.

`nodes` is a tree as data. `backend` is the interface of what runs trees, and each `*_backend` module one way to do so.
`backend_probe` chooses among them. `kv_slots` says which column of the KV cache holds which token. `pass_policy`
decides what else goes into a pass, from the costs that `pass_costs` has measured.
"""
