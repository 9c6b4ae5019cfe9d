"""One call of `generate()`: what is asked for, then a plan, then the decoder, then the output. Data goes one way.

`arguments` finds out who takes part and with which settings, `inputs` reads what `generate()` hands over, `plan` makes
of both one frozen value with everything each member needs, `run` decodes it, `output` is what comes back, and
`continuation` is the cache that one call hands to the next. `running_batch` decodes calls that come and go together.
`answering` is for calls with many questions, some of them bad, `batch_columns` for the batches that these come in. This
room must not know how decoding works.
"""
