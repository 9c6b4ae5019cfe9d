"""Publishing: an ensemble as a Hub repository that works without this package.

`export` writes one. `flatten` copies our code into it as flat files, and `model_card` writes its README.md.
transformers enters the repository's code by `generate` or by `modeling_adafuse`. `repository` and `exported` tell that
code its settings, its assistants and its files.
"""
