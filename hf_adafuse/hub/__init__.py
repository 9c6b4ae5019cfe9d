"""Publishing: an ensemble as a repository that works without this package.

`export` writes one, with the help of `flatten` (our code as flat files) and `model_card` (its README.md). `generate`
and `modeling_adafuse` are the two entries that transformers finds in it, `repository` and `exported` what their code
knows of the repository around it. This room must not know how decoding works.
"""
