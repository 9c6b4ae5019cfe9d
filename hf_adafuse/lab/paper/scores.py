"""`Scores`: what answers to a task score, how far they are above others, and how long their rounds are.

All scores are in points, from 0 to 100. A difference is taken on the same questions, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist
from typing import Any

from ...demo.paired import Mean, mean, paired
from ..evaluation.translation import corpus_score, difference, standard_error

SHARES = (1, 2, 3)  # the numbers of words of which the share of rounds is shown
# The metrics that score a whole set.
_OF_SETS = ("spbleu", "bleu", "chrf")
_METRICS = {"gsm8k": ("last_number",), "flores_en_de": _OF_SETS, "flores_de_en": _OF_SETS}  # the paper's
# The metrics that `--metric` may ask for instead.
OTHERS = ("f1", "marked_number", "chrf")


@dataclass(frozen=True)
class Gain:
    """
    How far some answers are above others.

    Attributes:
        difference (`Mean`): the difference in points.
        p_value (`float`): the two-sided p-value of the exact sign test (McNemar's). For a score of the whole set it is
            by the normal distribution. NaN where it is not determined.
    """

    difference: Mean
    p_value: float = math.nan


@dataclass(frozen=True)
class Scores:
    """
    The answers to one task.

    Attributes:
        metric (`str`): `"exact_match"`, `"last_number"`, `"spbleu"`, `"bleu"`, or one of `OTHERS`.
        values (`list`): the points of each question. For a score of the whole set, each question's accepted
            translations and the one that was given.
        sizes (`list[int]`): the number of words in each round. The end of the text counts as one.
    """

    metric: str
    values: Sequence[Any]
    sizes: Sequence[int] = field(default=())

    @cached_property
    def mean(self) -> Mean:
        """The mean over the questions; for a score of the whole set, that score."""
        if self.metric not in _OF_SETS:
            return mean(self.values)
        n = len(self.values)
        error = standard_error(self.metric, self.values) if n > 1 else math.nan
        return Mean(corpus_score(self.metric, self.values), error, n)

    def above(self, other: Scores) -> Gain:
        """How far these are above others of the same questions."""
        if self.metric not in _OF_SETS:
            found = paired(self.values, other.values)
            return Gain(found.difference, found.p_value)
        gained = difference(self.metric, self.values, other.values)
        if not gained.error > 0:
            return Gain(gained)
        return Gain(gained, 2 * NormalDist().cdf(-abs(gained.value) / gained.error))

    @property
    def question_metric(self) -> str | None:
        """The metric by which each question has points of its own; `None` for a score of the whole set."""
        return None if self.metric in _OF_SETS else self.metric

    @property
    def words_per_round(self) -> float:
        """The mean number of words in a round; NaN where there are no rounds."""
        return sum(self.sizes) / len(self.sizes) if self.sizes else math.nan

    @property
    def shares(self) -> dict[int, float]:
        """The share of rounds by their number of words: 1, 2, 3, and any other number that some have."""
        sizes = sorted({*SHARES, *self.sizes})
        return {size: self.sizes.count(size) / len(self.sizes) for size in sizes} if self.sizes else {}


def read_scores(task: str, samples: Sequence[dict[str, Any]], has_rounds: bool, metric: str | None = None) -> Scores:
    """
    The scores of a task's samples.

    Args:
        task (`str`): the name of the task, from `TASKS`.
        samples (`list[dict]`): the samples as the harness makes them, with `rounds`.
        has_rounds (`bool`): whether the rounds' lengths count. Those of a member alone say nothing: its rounds never
            end at an uncertain word.
        metric (`str`, *optional*): one of `OTHERS`, where the task has it. By default the paper's metric.
    """
    known = (metric, *_METRICS.get(task, ("exact_match",)))
    metric = next(name for name in known if name is not None and all(name in sample for sample in samples))
    values = [sample[metric] if metric in _OF_SETS else 100.0 * sample[metric] for sample in samples]
    rounds = [committed for sample in samples for committed in sample.get("rounds") or []] if has_rounds else []
    return Scores(metric, values, [len(committed["words"]) + bool(committed["ends"]) for committed in rounds])


def best(candidates: Sequence[Any], scores: dict[Any, Scores]) -> Any:
    """The candidate with the highest mean; of equals the first."""
    return max(candidates, key=lambda candidate: scores[candidate].mean.value)


def average(means: Sequence[Mean]) -> Mean:
    """The mean of the scores of several tasks, each of which counts alike, with its standard error."""
    count = len(means)
    error = math.sqrt(sum(one.error**2 for one in means)) / count
    return Mean(sum(one.value for one in means) / count, error, sum(one.n for one in means))
