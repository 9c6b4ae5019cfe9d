"""Measures how well a confidence tells right answers from wrong ones, and whether it is a probability.

```python
>>> from hf_adafuse.lab.evaluation.confidence_figures import auroc, risk

>>> confidences, is_right = [0.9, 0.8, 0.3, 0.2], [1, 0, 1, 0]
>>> auroc(confidences, is_right)  # three of the four pairs of a right and a wrong answer are in order
0.75
>>> risk(confidences, is_right, 0.25), risk(confidences, is_right, 1.0)
(0.0, 0.5)

```
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...demo.paired import Mean

# The number of resamples of a bootstrap, and the seed of its draws.
_RESAMPLES = 1000
_SEED = 0

# `measure(confidences, is_right)` returns one number; NaN where the answers do not determine it.
Measure = Callable[[Sequence[float], Sequence[float]], float]


@dataclass(frozen=True)
class Bin:
    """
    The answers whose confidences lie in an interval.

    Attributes:
        low (`float`), high (`float`): the ends of the interval.
        number (`int`): the number of answers.
        confidence (`float`): their mean confidence.
        right (`float`): the share of them that is right.
    """

    low: float
    high: float
    number: int
    confidence: float
    right: float


def auroc(confidences: Sequence[float], is_right: Sequence[float]) -> float:
    """The area under the ROC curve: the probability that a right answer has a higher confidence than a wrong one, where
    equal confidences count half. 0.5 tells nothing apart, and 1 everything. NaN where all answers are right, or all are
    wrong."""
    values = np.asarray(confidences, dtype=np.float64)
    labels = np.asarray(is_right) > 0
    num_right = int(labels.sum())
    num_wrong = len(labels) - num_right
    if not num_right or not num_wrong:
        return math.nan
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[labels].sum() - num_right * (num_right + 1) / 2) / (num_right * num_wrong))


def risk(confidences: Sequence[float], is_right: Sequence[float], coverage: float) -> float:
    """
    The share of wrong answers among those of the highest confidence.

    Args:
        confidences, is_right (`list[float]`): for each answer, its confidence, and 1 where it is right, else 0.
        coverage (`float`): the share of answers that are given, above 0. Where answers of equal confidence are given in
            part, each of them counts by this part.
    """
    values = np.asarray(confidences, dtype=np.float64)
    wrong = 1.0 - np.asarray(is_right, dtype=np.float64)
    number = max(1, round(coverage * len(values)))
    least = np.sort(values)[len(values) - number]
    above = values > least
    equal = values == least
    return float((wrong[above].sum() + (number - above.sum()) * wrong[equal].mean()) / number)


def bins(confidences: Sequence[float], is_right: Sequence[float], number: int = 10) -> list[Bin]:
    """The reliability diagram: the answers in `number` intervals of their confidence, equally wide from 0 to 1. Empty
    intervals are left out."""
    values = np.asarray(confidences, dtype=np.float64)
    labels = np.asarray(is_right, dtype=np.float64)
    at = np.minimum((values * number).astype(int), number - 1)
    return [
        Bin(one / number, (one + 1) / number, int(own.sum()), float(values[own].mean()), float(labels[own].mean()))
        for one in range(number)
        if (own := at == one).any()
    ]


def calibration_error(confidences: Sequence[float], is_right: Sequence[float]) -> float:
    """The expected calibration error (ECE, arXiv 1706.04599): the mean over answers of the distance between the mean
    confidence and the share of right answers of their bin."""
    found = bins(confidences, is_right)
    return math.fsum(one.number * abs(one.confidence - one.right) for one in found) / len(confidences)


def bootstrapped(
    measure: Measure,
    confidences: Sequence[float],
    is_right: Sequence[float],
    others: Sequence[float] | None = None,
) -> Mean:
    """
    A measure, and its standard error by the bootstrap over questions.

    Args:
        measure (`Callable`): the measure.
        confidences, is_right (`list[float]`): for each question, the confidence of its answer, and 1 where that is
            right, else 0.
        others (`list[float]`, *optional*): other confidences on the same questions, whose measure is subtracted.

    Returns:
        [`Mean`]: the measure with its standard error. Resamples in which the measure is NaN are left out.
    """
    own = np.asarray(confidences, dtype=np.float64)
    labels = np.asarray(is_right, dtype=np.float64)
    rest = None if others is None else np.asarray(others, dtype=np.float64)

    def value(at: np.ndarray) -> float:
        first = measure(own[at], labels[at])
        return first if rest is None else first - measure(rest[at], labels[at])

    rng = np.random.default_rng(_SEED)
    n = len(own)
    drawn = np.array([value(rng.integers(0, n, n)) for _ in range(_RESAMPLES)])
    known = drawn[np.isfinite(drawn)]
    return Mean(value(np.arange(n)), float(known.std(ddof=1)) if len(known) > 1 else math.nan, n)
