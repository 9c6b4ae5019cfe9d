"""What to ask: one member, the recommended fusion, or all members with the answer that is most likely right. Pure.

`hf-adafuse fit` asks each once and judges them here. Whatever is fitted or chosen is judged on questions that played no
part in it (cross-validation, nested where a choice is judged), and every gain is taken question by question.

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

SELECT, FUSION = "select", "fusion"
# One of these, or the number of a member that answers alone.
Choice = int | str

# Parts of a cross-validation; within it, of the one that chooses; and how many partitions are averaged.
_OUTER_PARTS = 10
_INNER_PARTS = 5
_PARTITIONS = 3
# By more than so many standard errors an ensemble must be above the best member to be chosen: it costs several passes.
MIN_GAIN = 1.0


@dataclass(frozen=True)
class Answered:
    """
    What was asked, a row per question.

    Attributes:
        right (`list[list[float]]`): per question and member, 1 where its answer is right, else 0.
        rows (`list[list[Row]]`): per question and member, the features of its answer; `None` where it has none.
        fused (`list[float]`): per question, 1 where the recommended fusion is right, else 0.
        groups (`list`): per question, what it has in common with those that ask the same: they stay together.
        penalties (`list[float]`, *optional*): of the features, as of [`Calibration.fit`].
    """

    right: Sequence[Sequence[float]]
    rows: Sequence[Sequence[Row | None]]
    fused: Sequence[float]
    groups: Sequence[Hashable]
    penalties: Sequence[float] | None = None

    @property
    def members(self) -> list[list[float]]:
        """Per member, its scores."""
        return [[float(score) for score in scores] for scores in zip(*self.right, strict=True)]


@dataclass(frozen=True)
class Judged:
    """
    What came of it; all scores are per question.

    Attributes:
        members (`list[list[float]]`): of each member alone.
        fused (`list[float]`): of the recommended fusion.
        select (`list[float]`): of selection, by calibrations that have not seen the question.
        nested (`list[float]`): of what would have been chosen without the question: what the choice is worth.
        oracle (`list[float]`): 1 where any member is right.
        choice (`Choice`): what to use, by all questions.
        calibration (`Calibration`): fitted on all questions.
    """

    members: list[list[float]]
    fused: list[float]
    select: list[float]
    nested: list[float]
    oracle: list[float]
    choice: Choice
    calibration: Calibration

    @property
    def best(self) -> int:
        """The member that is best alone; the first of equals."""
        return best_of(self.members)

    def of(self, choice: Choice) -> list[float]:
        """The scores of a choice."""
        if isinstance(choice, int):
            return self.members[choice]
        return self.select if choice == SELECT else self.fused

    def gain(self, choice: Choice) -> Paired:
        """How far a choice is above the best member, which was found by the same questions: that flatters it."""
        return paired(self.of(choice), self.members[self.best])


def judge(answered: Answered, seed: int = 0) -> Judged:
    """
    Judge and choose.

    Args:
        answered (`Answered`)
        seed (`int`, *optional*, defaults to 0): of the partitions.

    Raises:
        ValueError: fewer than two different questions.
    """
    if (number := len(set(answered.groups))) < 2:
        raise ValueError(
            f"The questions must be 2 or more different ones, but are {number}: what is fitted on a question cannot be "
            "judged on it. Give a hundred."
        )
    everything = range(len(answered.fused))
    select = _averaged(answered, everything, _selected, _OUTER_PARTS, seed)
    nested = _averaged(answered, everything, _chosen, _OUTER_PARTS, seed)
    members, fused = answered.members, [float(score) for score in answered.fused]
    return Judged(
        members=members,
        fused=fused,
        select=select,
        nested=nested,
        oracle=[float(max(scores)) for scores in answered.right],
        choice=choice_of(members, fused, select),
        calibration=_fit(answered, everything),
    )


def choice_of(members: Sequence[Sequence[float]], fused: Sequence[float], select: Sequence[float]) -> Choice:
    """What to use by these scores: selection or the fusion, the better of those that are above the best member by more
    than [`MIN_GAIN`] standard errors of the paired difference; else that member. Selection goes before the fusion, and
    an earlier member before a later one, where they are equal."""
    best = best_of(members)
    scores = {SELECT: select, FUSION: fused}
    above = [name for name in scores if _is_above(paired(scores[name], members[best]))]
    return max(above, key=lambda name: mean(scores[name]).value, default=best)


def best_of(members: Sequence[Sequence[float]]) -> int:
    """The number of the member with the highest mean; the first of equals."""
    return max(range(len(members)), key=lambda k: mean(members[k]).value)


def _is_above(gain: Paired) -> bool:
    difference = gain.difference
    # One question won and none lost is one standard error, whatever rounding makes of it.
    return difference.value > 0 and difference.value > MIN_GAIN * difference.error * (1 + 1e-9)


# `ask(answered, rest, part, seed)`: the scores of the questions in `part`, by what `rest` says.
_Ask = Callable[[Answered, Sequence[int], Sequence[int], int], Sequence[float]]


def _averaged(answered: Answered, questions: Sequence[int], ask: _Ask, parts: int, seed: int) -> list[float]:
    """The mean of several cross-validations, question by question."""
    made = [_crossed(answered, questions, ask, parts, seed + partition) for partition in range(_PARTITIONS)]
    return [sum(scores) / len(made) for scores in zip(*made, strict=True)]


def _crossed(answered: Answered, questions: Sequence[int], ask: _Ask, parts: int, seed: int) -> list[float]:
    """Per question its score by what the other parts say, in the order of the questions."""
    found: dict[int, float] = {}
    for part in parts_of(answered.groups, questions, parts, seed):
        held = set(part)
        rest = [question for question in questions if question not in held]
        found.update(zip(part, ask(answered, rest, part, seed), strict=True))
    return [found[question] for question in questions]


def parts_of(groups: Sequence[Hashable], questions: Sequence[int], number: int, seed: int) -> list[list[int]]:
    """The questions in so many parts (fewer where there are fewer groups), each group in one of them."""
    kinds = list(dict.fromkeys(groups[question] for question in questions))
    random.Random(seed).shuffle(kinds)
    number = min(number, len(kinds))
    place = {kind: at % number for at, kind in enumerate(kinds)}
    return [[one for one in questions if place[groups[one]] == part] for part in range(number)]


def _selected(answered: Answered, rest: Sequence[int], part: Sequence[int], seed: int) -> list[float]:
    """What selection scores on a part with a calibration fitted on the rest: as the method `select` decides, of equally
    likely answers the first member's."""
    calibration = _fit(answered, rest)
    likely = calibration.probabilities(filled([answered.rows[one] for one in part], calibration.centres))
    known = np.array([[row is not None for row in answered.rows[one]] for one in part])
    likely = np.where(known, likely, -1.0)
    winners = np.argmax(likely >= likely.max(1, keepdims=True) - 1e-12, axis=1)
    return [float(answered.right[one][winner]) for one, winner in zip(part, winners, strict=True)]


def _chosen(answered: Answered, rest: Sequence[int], part: Sequence[int], seed: int) -> list[float]:
    """What the choice that the rest speaks for scores on a part."""
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
    """A calibration; that some of the many fits fall back is no news: the note of the last one says it."""
    features: Any = filled([answered.rows[one] for one in questions])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return Calibration.fit(features, [answered.right[one] for one in questions], answered.penalties)
