"""Chooses what to ask: one member, the recommended fusion, or all members, taking the answer that is likeliest right.

`hf-adafuse fit` has all of them answer, and judges the answers here. What is fitted or chosen is judged by
cross-validation, on questions that played no part in it; where a choice is judged, the cross-validation is nested.
Every gain is taken question by question.

```python
>>> import random
>>> from hf_adafuse.lab.evaluation.fitting import Answered, judge

>>> random.seed(0)
>>> right = [[random.random() < 0.5, random.random() < 0.5] for _ in range(100)]  # two members; who is right shows:
>>> rows = [[[own + random.gauss(0, 0.3)] for own in one] for one in right]
>>> judged = judge(Answered(right, rows, fused=[one[0] for one in right], groups=range(100)))
>>> judged.choice, sum(judged.select) > sum(judged.members[judged.best])
('select', True)

```
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...confidence.calibration import Calibration
from ...confidence.features import Row, filled
from ...demo.paired import Paired, mean, paired

SELECT = "select"
FUSION = "fusion"
# Who answers: one of these, or the index of a member that answers alone.
AnswerSource = int | str

# The numbers of parts of a cross-validation and of the one within it that chooses, and how many partitions are
# averaged.
_OUTER_PARTS = 10
_INNER_PARTS = 5
_PARTITIONS = 3
# An ensemble is chosen where it is above the best member by more than this many standard errors. It costs more passes.
MIN_GAIN = 1.0


@dataclass(frozen=True)
class Answered:
    """
    The answers to some questions, a row for each question.

    Attributes:
        right (`list[list[float]]`): for each question and member, 1 where its answer is right, else 0.
        rows (`list[list[Row]]`): for each question and member, the features of its answer; `None` where it has none.
        fused (`list[float]`): for each question, 1 where the recommended fusion is right, else 0.
        groups (`list`): a value for each question. Questions with equal values ask the same, and stay in one part.
        penalties (`list[float]`, *optional*): the penalties of the features, as of [`Calibration.fit`].
    """

    right: Sequence[Sequence[float]]
    rows: Sequence[Sequence[Row | None]]
    fused: Sequence[float]
    groups: Sequence[Hashable]
    penalties: Sequence[float] | None = None

    @property
    def members(self) -> list[list[float]]:
        """For each member, its scores."""
        return [[float(score) for score in scores] for scores in zip(*self.right, strict=True)]


@dataclass(frozen=True)
class Judged:
    """
    The scores of every way to answer, question by question, and the choice between them.

    Attributes:
        members (`list[list[float]]`): the scores of each member alone.
        fused (`list[float]`): the scores of the recommended fusion.
        select (`list[float]`): the scores of selection, by calibrations that have not seen the question.
        nested (`list[float]`): the scores of what would have been chosen without the question. They say what the choice
            is worth.
        oracle (`list[float]`): 1 where any member is right, else 0.
        choice (`AnswerSource`): what to use, by all questions.
        calibration (`Calibration`): the calibration that was fitted on all questions.
    """

    members: list[list[float]]
    fused: list[float]
    select: list[float]
    nested: list[float]
    oracle: list[float]
    choice: AnswerSource
    calibration: Calibration

    @property
    def best(self) -> int:
        """The index of the member that is best alone; of equals the first."""
        return best_of(self.members)

    def of(self, choice: AnswerSource) -> list[float]:
        """The scores of this way to answer."""
        if isinstance(choice, int):
            return self.members[choice]
        return self.select if choice == SELECT else self.fused

    def gain(self, choice: AnswerSource) -> Paired:
        """How far a way to answer is above the best member. The same questions have found the best member, which
        flatters it."""
        return paired(self.of(choice), self.members[self.best])


def judge(answered: Answered, seed: int = 0) -> Judged:
    """
    Judge every way to answer, and choose one.

    Args:
        answered (`Answered`): the answers.
        seed (`int`, *optional*, defaults to 0): the seed of the partitions.

    Raises:
        ValueError: there are fewer than two different questions.
    """
    if (number := len(set(answered.groups))) < 2:
        raise ValueError(
            f"The questions must be 2 or more different ones, but are {number}: what is fitted on a question cannot be "
            "judged on it. Give a hundred."
        )
    everything = range(len(answered.fused))
    select = _averaged(answered, everything, _selected, _OUTER_PARTS, seed)
    nested = _averaged(answered, everything, _chosen, _OUTER_PARTS, seed)
    members = answered.members
    fused = [float(score) for score in answered.fused]
    return Judged(
        members=members,
        fused=fused,
        select=select,
        nested=nested,
        oracle=[float(max(scores)) for scores in answered.right],
        choice=choice_of(members, fused, select),
        calibration=_fit(answered, everything),
    )


def choice_of(members: Sequence[Sequence[float]], fused: Sequence[float], select: Sequence[float]) -> AnswerSource:
    """What to use by these scores: the better one of selection and the fusion, of those that are above the best member
    by more than [`MIN_GAIN`] standard errors of the paired difference. Where neither is, that member. Of equals
    selection goes before the fusion, and an earlier member before a later one."""
    best = best_of(members)
    scores = {SELECT: select, FUSION: fused}
    above = [name for name in scores if _is_above(paired(scores[name], members[best]))]
    return max(above, key=lambda name: mean(scores[name]).value, default=best)


def best_of(members: Sequence[Sequence[float]]) -> int:
    """The index of the member with the highest mean score; of equals the first."""
    return max(range(len(members)), key=lambda k: mean(members[k]).value)


def _is_above(gain: Paired) -> bool:
    difference = gain.difference
    # With one question won and none lost, the gain is one standard error, and must stay so after rounding.
    return difference.value > 0 and difference.value > MIN_GAIN * difference.error * (1 + 1e-9)


# `ask(answered, rest, part, seed)` returns the scores of the questions in `part`, by what those in `rest` say.
_Ask = Callable[[Answered, Sequence[int], Sequence[int], int], Sequence[float]]


def _averaged(answered: Answered, questions: Sequence[int], ask: _Ask, parts: int, seed: int) -> list[float]:
    """The mean of several cross-validations, question by question."""
    made = [_crossed(answered, questions, ask, parts, seed + partition) for partition in range(_PARTITIONS)]
    return [sum(scores) / len(made) for scores in zip(*made, strict=True)]


def _crossed(answered: Answered, questions: Sequence[int], ask: _Ask, parts: int, seed: int) -> list[float]:
    """The score of each question, by what the other parts say, in the order of the questions."""
    found: dict[int, float] = {}
    for part in parts_of(answered.groups, questions, parts, seed):
        held = set(part)
        rest = [question for question in questions if question not in held]
        found.update(zip(part, ask(answered, rest, part, seed), strict=True))
    return [found[question] for question in questions]


def parts_of(groups: Sequence[Hashable], questions: Sequence[int], number: int, seed: int) -> list[list[int]]:
    """The questions in `number` parts, or as many as there are groups. All questions of a group are in one part."""
    kinds = list(dict.fromkeys(groups[question] for question in questions))
    random.Random(seed).shuffle(kinds)
    number = min(number, len(kinds))
    place = {kind: at % number for at, kind in enumerate(kinds)}
    return [[one for one in questions if place[groups[one]] == part] for part in range(number)]


def _selected(answered: Answered, rest: Sequence[int], part: Sequence[int], seed: int) -> list[float]:
    """The scores of selection on a part, with a calibration fitted on the rest. As in the method `select`, the first
    member's answer is taken where several are equally likely."""
    calibration = _fit(answered, rest)
    likely = calibration.probabilities(filled([answered.rows[one] for one in part], calibration.centres))
    known = np.array([[row is not None for row in answered.rows[one]] for one in part])
    likely = np.where(known, likely, -1.0)
    winners = np.argmax(likely >= likely.max(1, keepdims=True) - 1e-12, axis=1)
    return [float(answered.right[one][winner]) for one, winner in zip(part, winners, strict=True)]


def _chosen(answered: Answered, rest: Sequence[int], part: Sequence[int], seed: int) -> list[float]:
    """The scores on a part of what the rest would choose."""
    members = [[scores[one] for one in rest] for scores in answered.members]
    if len({answered.groups[one] for one in rest}) > 1:
        select = _crossed(answered, rest, _selected, _INNER_PARTS, seed)
        choice = choice_of(members, [answered.fused[one] for one in rest], select)
    else:
        choice = best_of(members)
    if choice == SELECT:
        return _selected(answered, rest, part, seed)
    return [float(answered.fused[one] if choice == FUSION else answered.right[one][int(choice)]) for one in part]


def _fit(answered: Answered, questions: Sequence[int]) -> Calibration:
    """A calibration fitted on these questions. Its warning is dropped: one of many fits may fall back, and the note of
    the last fit says so for all."""
    features: Any = filled([answered.rows[one] for one in questions])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return Calibration.fit(features, [answered.right[one] for one in questions], answered.penalties)
