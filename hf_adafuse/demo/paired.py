"""Two methods on the same questions: means and differences with their standard errors. Pure statistics.

A difference is taken question by question, so that what makes a question hard for both methods cancels. Standard errors
are of the mean over questions: the standard deviation with n - 1, over the root of n.
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
        value (`float`), error (`float`): both NaN where there is too little to tell: no value, or one.
        n (`int`): of how many.
    """

    value: float
    error: float
    n: int

    def show(self, scale: float = 1.0, signed: bool = False) -> str:
        """`21.0 ± 4.1`; `?` for what cannot be told."""
        return f"{_shown(self.value * scale, '+.1f' if signed else '.1f')} ± {_shown(self.error * scale, '.1f')}"


@dataclass(frozen=True)
class Paired:
    """
    How far a method is above another.

    Attributes:
        difference (`Mean`): of the scores, question by question.
        wins, losses, ties (`int`): questions on which it scores higher, lower, the same.
        p_value (`float`): of the exact two-sided sign test over wins and losses; where scores are 0 or 1 that is
            McNemar's exact test.
    """

    difference: Mean
    wins: int
    losses: int
    ties: int
    p_value: float


def mean(values: Sequence[float]) -> Mean:
    """The mean of the values."""
    n = len(values)
    value = sum(values) / n if n else math.nan
    variance = sum((each - value) ** 2 for each in values) / (n - 1) if n > 1 else math.nan
    return Mean(value, math.sqrt(variance / n) if n else math.nan, n)


def paired(scores: Sequence[float], others: Sequence[float]) -> Paired:
    """
    How far `scores` are above `others`, those of another method on the same questions in the same order.

    Raises:
        ValueError: not as many of one as of the other.
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
    """The standard error of `of_ratio(sum a / sum b)` of pairs (a, b), as a perplexity is, by the jackknife that
    leaves out one at a time; NaN for fewer than two."""
    n, tops, bottoms = len(pairs), math.fsum(top for top, _ in pairs), math.fsum(bottom for _, bottom in pairs)
    if n < 2:
        return math.nan
    without = [of_ratio((tops - top) / (bottoms - bottom)) for top, bottom in pairs]
    center = math.fsum(without) / n
    return math.sqrt((n - 1) / n * math.fsum((one - center) ** 2 for one in without))


def sign_test(wins: int, losses: int) -> float:
    """The probability that as many fair coins fall at least as unevenly, to either side."""
    n = wins + losses
    log_half = n * math.log(2)
    tail = math.fsum(
        math.exp(math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - log_half)
        for k in range(min(wins, losses) + 1)
    )
    return min(1.0, 2 * tail)


def _shown(number: float, form: str) -> str:
    return "?" if math.isnan(number) else format(number, form)
