"""Measures whether an ensemble is better than its best member: tasks, metrics and statistics.

`metrics` says how right an answer is. `language_model` is an ensemble as lm-evaluation-harness sees it, and `tasks/`
has tasks of the harness. `fitting` chooses between a member, fusion and selection. The standard errors and paired
differences are in `hf_adafuse/demo/paired.py`.
"""
