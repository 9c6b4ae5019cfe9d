"""The instrument: is an ensemble better than its best member? Tasks, metrics, paired statistics, search for settings.

`metrics` says how right an answer is, `paired` how far two methods are apart on the same questions; `language_model`
is an ensemble as lm-evaluation-harness sees it, `tasks/` are tasks of the harness. Around the house: knows what
`generate()` gives, and nothing of how it came to be.
"""
