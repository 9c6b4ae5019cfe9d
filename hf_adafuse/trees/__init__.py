"""Token trees below committed prefixes, and everything that runs a model: backends, caches, masks, costs of passes.

`nodes` is a tree as data, `backend` what runs one, the `*_backend` modules the ways to do so, `backend_probe` chooses
among them. `kv_slots` says which column of the cache holds which token; `pass_policy` what else goes into a pass, from
what `pass_costs` has measured. This room must not know text, words or other members.
"""
