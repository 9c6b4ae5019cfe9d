"""Settings found on some questions and judged on others. Pure: whoever calls says what a candidate scores.

```python
>>> from hf_adafuse.evaluation.candidates import make_candidates
>>> from hf_adafuse.evaluation.tuning import tune

>>> candidates = make_candidates(2)
>>> def evaluate(candidate, questions):  # here a member alone knows half of the answers, an ensemble two thirds
...     return [float(question % (2 if candidate.is_alone else 3) > 0) for question in questions]
>>> tuned = tune(candidates, range(100), evaluate)
>>> candidates[tuned.winner].is_alone, len(tuned.held_out), len(tuned.held_out_scores[tuned.winner])
(False, 30, 30)

```
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .candidates import Candidate
from .halving import Evaluate, Look, Search, first_questions, most_answers, search
from .paired import Paired, mean, paired

T = TypeVar("T")

_LEAST_QUESTIONS = 10
_LEAST_FIRST = 16  # questions before the first halving: of fewer, most candidates answer alike


@dataclass(frozen=True)
class Plan:
    """
    Which questions are asked for what.

    Attributes:
        searched (`list[int]`), held_out (`list[int]`): the questions, in the order in which they are asked.
        first (`int`): how many of them all candidates are asked.
        most (`int`): answers, at most, in all.
    """

    searched: list[int]
    held_out: list[int]
    first: int
    most: int

    def most_to_come(self, look: Look, num_alone: int) -> int:
        """How many answers are to come at most after a look."""
        searching = most_answers(len(look.left), num_alone, len(self.searched), self.first, look.num_questions)
        return searching + (num_alone + 1) * len(self.held_out)


@dataclass(frozen=True)
class Tuning:
    """
    What was found.

    Attributes:
        plan (`Plan`), search (`Search`): how.
        member (`int`), ensemble (`int`): the best member alone and the best ensemble, by the questions searched.
        min_gain (`float`): as of [`tune`].
        held_out_scores (`dict[int, list[float]]`): of every member alone and the best ensemble.
    """

    plan: Plan
    search: Search
    member: int
    ensemble: int
    min_gain: float
    held_out_scores: dict[int, list[float]]

    @property
    def held_out(self) -> list[int]:
        """The questions that the search has not seen."""
        return self.plan.held_out

    @property
    def held_out_member(self) -> int:
        """The best member alone by the questions held out; of equals the one that was best on those searched."""
        return max(self._alone, key=lambda one: mean(self.held_out_scores[one]).value)

    @property
    def whole_member(self) -> int:
        """The best member alone by all questions: of so few, that the choice flatters it, is little."""
        return max(self._alone, key=lambda one: mean(self.search.scores[one] + self.held_out_scores[one]).value)

    @property
    def _alone(self) -> list[int]:
        return [self.member, *(one for one in self.held_out_scores if one not in (self.member, self.ensemble))]

    @property
    def gain(self) -> Paired:
        """How far the best ensemble is above the best member on the questions searched: too high, as it was chosen."""
        return self.search.gain(self.ensemble, self.member)

    @property
    def held_out_gain(self) -> Paired:
        """How far it is above the best member on the questions held out: the honest figure."""
        return paired(self.held_out_scores[self.ensemble], self.held_out_scores[self.held_out_member])

    @property
    def is_above(self) -> bool:
        """Whether the ensemble is above the member by more than `min_gain` standard errors, where it was searched."""
        gain = self.gain.difference
        # One question won and none lost is one standard error, whatever rounding makes of it.
        return gain.value > 0 and gain.value > self.min_gain * gain.error * (1 + 1e-9)

    @property
    def winner(self) -> int:
        """The ensemble, where it is above the member and not behind any member on the questions held out; else the best
        member by all questions. So none is above it on all that were asked."""
        is_chosen = self.is_above and self.held_out_gain.difference.value >= 0
        return self.ensemble if is_chosen else self.whole_member


def tune(
    candidates: Sequence[Candidate],
    questions: Sequence[int],
    evaluate: Callable[[Candidate, Sequence[int]], Sequence[float]],
    *,
    holdout: float = 0.3,
    seed: int = 0,
    budget: int | None = None,
    min_gain: float = 1.0,
    block: int = 8,
    on_look: Callable[[Look, int], None] = lambda look, most: None,
    tie_break: Callable[[Candidate, Sequence[int]], float] = lambda candidate, asked: 0.0,
    group: Callable[[int], Hashable] = lambda question: question,
) -> Tuning:
    """
    Search on one part of the questions, and judge what was found on the other.

    Args:
        candidates (`list[Candidate]`): the members alone among them.
        questions (`list[int]`): their numbers.
        evaluate (`Callable`): a candidate's scores on some of them, higher is better.
        holdout (`float`, *optional*, defaults to 0.3), seed (`int`, *optional*, defaults to 0): of the split: the share
            of the groups that is held out.
        budget (`int`, *optional*): most answers to ask for; for a small one fewer questions are searched.
        min_gain (`float`, *optional*, defaults to 1.0): by more than so many standard errors an ensemble must be above
            the best member to be chosen. The best of many is above by luck: 0 falls for it, but for what is held out.
        block (`int`, *optional*, defaults to 8): questions that a candidate is asked at a time.
        on_look (`Callable`): is told of each look, and how many answers are still to come at most.
        tie_break (`Callable`): a finer measure of some answers together, for candidates that score the same.
        group (`Callable`): what a question has in common with those that ask the same: they stay on one side of the
            split, else what is held out would have been seen. By default each is a group of its own.

    Raises:
        ValueError: too few groups, a budget that is too small, arguments out of range.
    """
    alone = [index for index, candidate in enumerate(candidates) if candidate.is_alone]
    plan = make_plan(len(candidates), len(alone), questions, holdout, seed, budget, group)

    score, finer = _by_index(candidates, evaluate), _by_index(candidates, tie_break)

    def report(look: Look) -> None:
        on_look(look, plan.most_to_come(look, len(alone)))

    found = search(len(candidates), alone, plan.searched, score, plan.first, block, report, seed, finer)
    return _judge(plan, found, alone, score, min_gain)


def _by_index(
    candidates: Sequence[Candidate], ask: Callable[[Candidate, Sequence[int]], T]
) -> Callable[[int, Sequence[int]], T]:
    return lambda index, asked: ask(candidates[index], asked)


def _judge(plan: Plan, found: Search, alone: Sequence[int], score: Evaluate, min_gain: float) -> Tuning:
    """Choose by what was searched; ask the members and the best ensemble what was held out, which may refuse it."""
    member = found.best(alone)
    ensemble = found.best([index for index in found.finalists if index not in alone])
    judged = {index: list(score(index, plan.held_out)) for index in [*alone, ensemble]}
    return Tuning(plan, found, member, ensemble, min_gain, judged)


def make_plan(
    num_candidates: int,
    num_alone: int,
    questions: Sequence[int],
    holdout: float,
    seed: int,
    budget: int | None = None,
    group: Callable[[int], Hashable] = lambda question: question,
) -> Plan:
    """Split the questions, and fit the search into the budget; as [`tune`], which see."""
    if not 0 < holdout < 1:
        raise ValueError(f"`holdout` must be above 0 and below 1, but is {holdout}. Use 0.3.")
    searched, held_out = _split(questions, holdout, seed, group)
    judging = (num_alone + 1) * len(held_out)
    for number in range(len(searched), 1, -1):
        first = first_questions(num_candidates, num_alone, number, _LEAST_FIRST)
        most = most_answers(num_candidates, num_alone, number, first) + judging
        if budget is None or most <= budget:
            return Plan(searched[:number], held_out, first, most)
    raise ValueError(
        f"`budget` must be at least {most}, but is {budget}. Of these the questions held out take {judging}."
    )


def _split(
    questions: Sequence[int], holdout: float, seed: int, group: Callable[[int], Hashable]
) -> tuple[list[int], list[int]]:
    """What is searched and what is held out, both shuffled; a group is on one side."""
    shuffled = list(questions)
    random.Random(seed).shuffle(shuffled)
    groups = list(dict.fromkeys(map(group, shuffled)))
    if len(groups) < _LEAST_QUESTIONS:
        unlike = "" if len(groups) == len(shuffled) else f" different ones, on {len(shuffled)} lines"
        raise ValueError(
            f"The questions must be {_LEAST_QUESTIONS} or more, but are {len(groups)}{unlike}. Hundreds tell more."
        )
    held = set(groups[: min(max(round(holdout * len(groups)), 1), len(groups) - 2)])
    return [one for one in shuffled if group(one) not in held], [one for one in shuffled if group(one) in held]
