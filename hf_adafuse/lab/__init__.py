"""The lab: measures the package. It may import all of the core, and nothing of the core imports it.

`evaluation/` asks members and methods questions and scores the answers. `paper/` makes the paper's tables and figures
on other models. `benchmarks/` takes times and counts passes. `training/` trains the small members that ship with the
package. `cli/` has the commands of `hf-adafuse` that call these.
"""
