"""How sure an ensemble is of its answers: from what the members say of an answer to the probability that it is right.

`Calibration` is fitted on questions whose answers are known to be right or wrong, and is a few numbers afterwards.
It takes log-probabilities and ratings as numbers.
"""

from .calibration import Calibration

__all__ = ["Calibration"]
