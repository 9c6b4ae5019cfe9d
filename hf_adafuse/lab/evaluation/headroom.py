"""Counts how often members differ, and so what choosing among their answers could gain at most.

This needs no right answers: where all members say the same, no choice among their answers changes anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

from .metrics import METRICS

# Whether two answers say the same.
Same = Callable[[str | None, str | None], bool]


def same_by(metric: str) -> Same:
    """A function that tells whether two answers say the same: they are the same text, or each is right where the other
    is the accepted answer, by a metric of 0 and 1. Then both are right or both are wrong. A missing answer (`None`)
    says the same as no other."""

    def same(one: str | None, other: str | None) -> bool:
        if one is None or other is None:
            return False
        score = METRICS[metric]
        return one.strip() == other.strip() or score(one, [other]) == score(other, [one]) == 1

    return same


def vote(texts: Sequence[str | None], shares: Sequence[float], nlls: Sequence[float], same: Same) -> int | None:
    """
    The index of the answer with most votes. A tie goes to the lower NLL, then to the first answer. `None` where there
    is no answer.

    Args:
        texts (`list[str]`): the answers; `None` for a missing one.
        shares (`list[float]`): for each answer, the weight of its vote.
        nlls (`list[float]`): for each answer, its NLL in nats per token.
        same (`Callable`): as of [`same_by`].
    """
    known = [at for at, text in enumerate(texts) if text is not None]
    votes = {at: math.fsum(shares[k] for k in known if same(texts[at], texts[k])) for at in known}
    return min(known, key=lambda at: (round(-votes[at], 9), nlls[at], at), default=None)


@dataclass(frozen=True)
class Headroom:
    """
    How often members differ, and what they think of each other's answers.

    Attributes:
        num_questions (`int`): the number of questions.
        differ (`int`): on how many of them the members do not all say the same.
        pairs (`dict[tuple[int, int], int]`): for each pair of members, on how many questions they differ.
        agreement (`list[float]`): for each member, the share of the other members' answers that say what it says.
        belief (`list[float]`): for each member, the mean log-probability that the others give its answers where members
            differ, in nats per byte. NaN where they never differ.
    """

    num_questions: int
    differ: int
    pairs: dict[tuple[int, int], int]
    agreement: list[float]
    belief: list[float]

    @classmethod
    def of(
        cls, texts: Sequence[Sequence[str | None]], beliefs: Sequence[Sequence[float | None]], sames: Sequence[Same]
    ) -> Headroom:
        """
        Count how often members differ.

        Args:
            texts (`list[list[str]]`): for each question and member, its answer; `None` where it has none.
            beliefs (`list[list[float]]`): for each question and member, the mean log-probability that the others give
                its answer, in nats per byte; `None` where it is not known.
            sames (`list[Callable]`): for each question, as of [`same_by`].
        """
        members = range(len(texts[0]))
        pairs = dict.fromkeys(combinations(members, 2), 0)
        unlike = []
        for of_question, same in zip(texts, sames, strict=True):
            parted = [pair for pair in pairs if not same(of_question[pair[0]], of_question[pair[1]])]
            for pair in parted:
                pairs[pair] += 1
            unlike.append(bool(parted))
        kept = [believed for believed, parts in zip(beliefs, unlike, strict=True) if parts]
        most = len(texts) * (len(members) - 1)
        agreement = [1 - sum(number for pair, number in pairs.items() if k in pair) / most for k in members]
        belief = [_mean([value for one in kept if (value := one[k]) is not None]) for k in members]
        return cls(len(texts), sum(unlike), pairs, agreement, belief)

    @property
    def suggested(self) -> int:
        """The index of the member to ask alone where nobody knows what is right. It is the member whose answers the
        others give most often. Of equals, as two members always are, it is the one whose answers the others find
        likelier. That is a guess."""
        order = range(len(self.agreement))
        return max(order, key=lambda k: (round(self.agreement[k], 9), _or_lowest(self.belief[k]), -k))


def clopper_pearson(number: int, of: int, level: float = 0.95) -> tuple[float, float]:
    """
    The exact two-sided confidence interval of a proportion (Clopper and Pearson, 1934).

    Args:
        number (`int`): the number of successes.
        of (`int`): the number of trials, at least 1.
        level (`float`, *optional*, defaults to 0.95): the confidence level.

    Returns:
        `tuple[float, float]`: the proportion at which `number` successes or more have the probability (1 - level) / 2,
        and the one at which `number` successes or fewer have it.
    """
    outer = (1 - level) / 2
    lowest = 0.0 if number == 0 else _root(lambda p: 1 - _at_most(number - 1, of, p) - outer)
    highest = 1.0 if number == of else _root(lambda p: outer - _at_most(number, of, p))
    return lowest, highest


def _at_most(number: int, of: int, p: float) -> float:
    """The probability of at most `number` successes in `of` trials, each with probability `p`."""
    terms = [
        math.lgamma(of + 1) - math.lgamma(k + 1) - math.lgamma(of - k + 1) + k * math.log(p) + (of - k) * math.log1p(-p)
        for k in range(number + 1)
    ]
    return math.fsum(map(math.exp, terms))


def _root(rising: Callable[[float], float]) -> float:
    """Where a rising function is 0 between 0 and 1, by bisection."""
    low = 0.0
    high = 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _or_lowest(value: float) -> float:
    return -math.inf if math.isnan(value) else value
