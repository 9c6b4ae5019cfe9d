"""Compares two methods on the same questions: means and differences, each with its standard error.

A difference is taken question by question, so that what makes a question hard for both methods cancels. The standard
error of a mean over n questions is the standard deviation (with n - 1) over the square root of n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mean:
    """
    A mean with its standard error.

    Attributes:
        value (`float`): the mean; NaN where there is no value.
        error (`float`): its standard error; NaN where there are fewer than two values.
        n (`int`): the number of values.
    """

    value: float
    error: float
    n: int

    def show(self, scale: float = 1.0, signed: bool = False) -> str:
        """The mean with its error, like `21.0 ± 4.1`, both multiplied by `scale`. NaN is shown as `?`."""
        return f"{_shown(self.value * scale, '+.1f' if signed else '.1f')} ± {_shown(self.error * scale, '.1f')}"


@dataclass(frozen=True)
class Paired:
    """
    How far a method is above another.

    Attributes:
        difference (`Mean`): the mean difference of the scores, question by question.
        wins, losses, ties (`int`): the numbers of questions on which the method scores higher, lower, and the same.
        p_value (`float`): the p-value of the exact two-sided sign test over wins and losses. Where scores are 0 or 1
            this is McNemar's exact test.
    """

    difference: Mean
    wins: int
    losses: int
    ties: int
    p_value: float


def mean(values: Sequence[float]) -> Mean:
    """The mean of some values, with its standard error."""
    n = len(values)
    value = sum(values) / n if n else math.nan
    variance = sum((each - value) ** 2 for each in values) / (n - 1) if n > 1 else math.nan
    return Mean(value, math.sqrt(variance / n) if n else math.nan, n)


def paired(scores: Sequence[float], others: Sequence[float]) -> Paired:
    """
    How far the scores of a method are above those of another one.

    Args:
        scores (`list[float]`): the score of each question.
        others (`list[float]`): the other method's scores on the same questions in the same order.

    Raises:
        ValueError: the lists have different lengths.
    """
    if len(scores) != len(others):
        raise ValueError(
            f"`others` must be one score per question, as `scores`, but is {len(others)} for {len(scores)}. Pair them."
        )
    steps = [score - other for score, other in zip(scores, others, strict=True)]
    wins = sum(step > 0 for step in steps)
    losses = sum(step < 0 for step in steps)
    return Paired(mean(steps), wins, losses, len(steps) - wins - losses, sign_test(wins, losses))


def ratio_error(pairs: Sequence[tuple[float, float]], of_ratio: Callable[[float], float]) -> float:
    """
    The standard error of a function of a ratio of sums, by the jackknife that leaves out one pair at a time. A
    perplexity is such a number: `exp(-sum of log-likelihoods / number of words)`.

    Args:
        pairs (`list[tuple[float, float]]`): the summand above and the summand below, for each question.
        of_ratio (`Callable`): the function, which gets the sum above over the sum below.

    Returns:
        `float`: NaN for fewer than two pairs.
    """
    n = len(pairs)
    tops = math.fsum(top for top, _ in pairs)
    bottoms = math.fsum(bottom for _, bottom in pairs)
    if n < 2:
        return math.nan
    without = [of_ratio((tops - top) / (bottoms - bottom)) for top, bottom in pairs]
    center = math.fsum(without) / n
    return math.sqrt((n - 1) / n * math.fsum((one - center) ** 2 for one in without))


def sign_test(wins: int, losses: int) -> float:
    """The p-value of the exact two-sided sign test: the probability that `wins + losses` tosses of a fair coin fall at
    least as unevenly, to either side."""
    n = wins + losses
    log_half = n * math.log(2)
    tail = math.fsum(
        math.exp(math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - log_half)
        for k in range(min(wins, losses) + 1)
    )
    return min(1.0, 2 * tail)


def _shown(number: float, form: str) -> str:
    return "?" if math.isnan(number) else format(number, form)
