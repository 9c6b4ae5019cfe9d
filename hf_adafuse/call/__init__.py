"""One call of `generate()`, from its arguments to its output. Data goes one way.

`arguments` resolves the ensemble: models, tokenizers, settings. `inputs` reads the prompts. `plan` makes one frozen
`CallPlan` of both. `run` makes the members and decodes. `output` makes what is returned, `continuation` the cache for a
later call. `running_batch` decodes calls that come and go, for a server. `answering` asks many questions of which some
may fail, and `batch_columns` reads them from tables.
"""
