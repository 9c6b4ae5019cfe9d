"""Successive halving over questions: the best of many candidates, most of which are asked few questions. Pure.

After Karnin, Koren and Somekh (2013) and Jamieson and Talwalkar (2016): all candidates answer the same first questions,
the better half as many again, and so on. All that are left have answered the same questions, so the order of their
means is that of their paired differences to the best. Two things are added: a candidate that is significantly worse
than the best leaves at once, and some candidates never leave.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from .paired import Paired, mean, paired

# `evaluate(candidate, questions)`: the score of each. Both are numbers, those of the caller's lists.
Evaluate = Callable[[int, Sequence[int]], Sequence[float]]
# `tie_break(candidate, questions)`: one number for all of the questions, which the candidate has answered.
TieBreak = Callable[[int, Sequence[int]], float]

# Significantly worse: by more than so many standard errors, and by the sign test. Looks are many, so both are strict.
_ERRORS, _P_VALUE = 3.0, 0.01


@dataclass(frozen=True)
class Look:
    """
    What was seen after some questions.

    Attributes:
        num_questions (`int`): that all who were left had answered.
        left (`list[int]`): the candidates that go on.
        worse (`list[int]`): those that left as significantly worse than the best.
        halved (`list[int]`): those that left with the worse half.
    """

    num_questions: int
    left: list[int]
    worse: list[int] = field(default_factory=list)
    halved: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Search:
    """
    The outcome.

    Attributes:
        scores (`list[list[float]]`): per candidate, of the first questions, as many as it was asked.
        looks (`list[Look]`): in order.
        finer (`dict[int, float]`): per finalist, a finer measure, for those of the same mean.
    """

    scores: list[list[float]]
    looks: list[Look]
    finer: dict[int, float]

    @property
    def finalists(self) -> list[int]:
        """The candidates that have answered all questions."""
        return self.looks[-1].left

    @property
    def num_answers(self) -> int:
        """How many answers the search has asked for."""
        return sum(map(len, self.scores))

    def best(self, among: Collection[int]) -> int:
        """The finalist among these with the highest mean; of several the best by the finer measure, then the first."""
        found = [one for one in self.finalists if one in among]
        return max(found, key=lambda one: (mean(self.scores[one]).value, self.finer[one]))

    def gain(self, candidate: int, other: int) -> Paired:
        """How far a candidate is above another, on the questions that both have answered."""
        n = min(len(self.scores[candidate]), len(self.scores[other]))
        return paired(self.scores[candidate][:n], self.scores[other][:n])


def search(
    num_candidates: int,
    kept: Collection[int],
    questions: Sequence[int],
    evaluate: Evaluate,
    first: int,
    block: int = 8,
    on_look: Callable[[Look], None] = lambda look: None,
    seed: int = 0,
    tie_break: TieBreak = lambda candidate, asked: 0.0,
) -> Search:
    """
    Halve the candidates until the questions have been asked.

    Args:
        num_candidates (`int`), kept (`Collection[int]`): how many there are, and which never leave.
        questions (`Sequence[int]`): in the order in which they are asked.
        evaluate (`Callable`): the scores of a candidate on some questions.
        first (`int`): of so many questions all candidates are asked, before the first halving.
        block (`int`): questions between looks for candidates that are significantly worse.
        on_look (`Callable`): is told of each look.
        tie_break (`Callable`): decides among equals, of which there are many after few questions; higher stays.
        seed (`int`): of the lots that decide where that is equal too.
    """
    lots = random.Random(seed).sample(range(num_candidates), num_candidates)
    scores: list[list[float]] = [[] for _ in range(num_candidates)]
    looks: list[Look] = []
    left = list(range(num_candidates))
    start = 0
    halvings = _halvings(len(questions), first)

    def ties(candidate: int) -> tuple[float, int]:
        return -tie_break(candidate, questions[:start]), lots[candidate]

    for end in sorted({*range(block, len(questions), block), *halvings, len(questions)}):
        for candidate in left:
            scores[candidate] += evaluate(candidate, questions[start:end])
        start = end
        worse = _significantly_worse(scores, left, kept)
        left = [candidate for candidate in left if candidate not in worse]
        halved = _worse_half(scores, left, kept, ties) if end in halvings else []
        left = [candidate for candidate in left if candidate not in halved]
        looks.append(Look(end, left, worse, halved))
        on_look(looks[-1])
    return Search(scores, looks, {candidate: tie_break(candidate, questions) for candidate in left})


def most_answers(num_candidates: int, num_kept: int, num_questions: int, first: int, asked: int = 0) -> int:
    """How many answers a search takes at most: where no candidate leaves early. From `asked` questions on."""
    total = 0
    start = asked
    free = num_candidates - num_kept
    for end in [at for at in _halvings(num_questions, first) if at > asked] + [num_questions]:
        total += (num_kept + free) * (end - start)
        start = end
        free = (free + 1) // 2
    return total


def first_questions(num_candidates: int, num_kept: int, num_questions: int, least: int = 16) -> int:
    """
    How many questions all candidates are asked: at least so many, and twice as many as would leave one of them when the
    questions end. Two or three then answer everything, and the first halving, the hardest, sees more.
    """
    halvings = max((num_candidates - num_kept - 1).bit_length(), 2)
    return min(max(least, num_questions >> (halvings - 2)), num_questions)


def _halvings(num_questions: int, first: int) -> list[int]:
    """After how many questions: the first ones, twice as many, ... but not after all."""
    return [first << k for k in range(num_questions.bit_length()) if first << k < num_questions]


def _significantly_worse(scores: Sequence[Sequence[float]], left: Sequence[int], kept: Collection[int]) -> list[int]:
    def value(candidate: int) -> float:
        return mean(scores[candidate]).value

    best = max(left, key=value)
    free = [candidate for candidate in left if candidate not in kept]
    staying = max(free, key=value, default=None)  # one is always left to be reported
    worse = []
    for candidate in free:
        if candidate in (best, staying):
            continue
        lost = paired(scores[candidate], scores[best])
        far = lost.difference.value + _ERRORS * lost.difference.error
        if far < 0 and lost.p_value < _P_VALUE:
            worse.append(candidate)
    return worse


def _worse_half(
    scores: Sequence[Sequence[float]], left: Sequence[int], kept: Collection[int], ties: Callable[[int], Any]
) -> list[int]:
    free = [candidate for candidate in left if candidate not in kept]  # at least one of them stays
    ranked = sorted(free, key=lambda candidate: (-mean(scores[candidate]).value, ties(candidate)))
    return sorted(ranked[(len(free) + 1) // 2 :])
