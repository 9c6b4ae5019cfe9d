"""The lab: what measures the package. It may import all of the core; nothing of the core imports it.

`evaluation/` asks members and methods questions and scores the answers, `paper/` makes the paper's tables and figures
on other models, `benchmarks/` takes times and counts passes, `training/` made the small members that ship with the
package, and `cli/` has the commands that the shell finds here by name.
"""
