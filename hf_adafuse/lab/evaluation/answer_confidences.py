"""Computes how sure one can be of the best member's answers, by its own probabilities and by those of all members."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...confidence.calibration import Calibration
from ...confidence.features import Row, feature_names, feature_penalties, filled
from .fitting import best_of, parts_of

_SEED = 0


@dataclass(frozen=True)
class Confidences:
    """
    How sure one can be of the best member's answer to each question, from 0 to 1.

    Attributes:
        best (`int`): the index of the member that is right most often.
        is_right (`list[float]`): 1 where its answer is right, else 0.
        per_token (`list[float]`): the geometric mean of the member's own probabilities of its answer's tokens.
        whole (`list[float]`): their product.
        own_calibrated (`list[float]`): the probability that the answer is right, by the features that the member has
            alone. The calibration was fitted on the other half of the questions.
        score (`list[float]`): the `confidence` of an output, by all members.
        calibrated (`list[float]`): the probability that the answer is right, by the features of all members. The
            calibration was fitted on the other half of the questions.
        chosen (`list[float]`): the highest such probability among the answers of all members.
        chosen_right (`list[float]`): 1 where the answer of that probability is right, else 0.
    """

    best: int
    is_right: list[float]
    per_token: list[float]
    whole: list[float]
    own_calibrated: list[float]
    score: list[float]
    calibrated: list[float]
    chosen: list[float]
    chosen_right: list[float]


def held_out_confidences(
    right: Sequence[Sequence[float]], rows: Sequence[Sequence[Row | None]], groups: Sequence[Hashable]
) -> Confidences:
    """
    The confidences of the best member's answers. What is fitted on one half of the questions judges the other half.

    Args:
        right (`list[list[float]]`): for each question and member, 1 where its answer is right, else 0.
        rows (`list[list[Row]]`): for each question and member, the features of its answer; `None` where it has none.
        groups (`list`): a value for each question. Questions with equal values ask the same, and stay in one half.

    Raises:
        ValueError: the best member answers fewer than two different questions.
    """
    best = best_of([list(scores) for scores in zip(*right, strict=True)])
    answered = [one for one, of_question in enumerate(rows) if of_question[best] is not None]
    if len({groups[one] for one in answered}) < 2:
        raise ValueError(
            "The questions must be 2 or more different ones that the best member answers, but are "
            f"{len({groups[one] for one in answered})}: a calibration must not judge what it was fitted on. Give a "
            "hundred."
        )
    num_members = len(right[0])
    names = feature_names(num_members)
    penalties = feature_penalties(num_members)
    values = filled([rows[one] for one in answered])[:, :, : len(names)]  # without ratings
    labels = np.array([right[one] for one in answered], dtype=np.float64)
    halves = parts_of(groups, answered, 2, _SEED)
    at = {question: index for index, question in enumerate(answered)}
    parts = [[at[question] for question in half] for half in halves]
    of_best = values[:, best]

    def column(name: str) -> Any:
        return of_best[:, names.index(name)]

    own = _own_names(best)
    likely = _crossed(values, labels, parts, penalties)
    # What a member gives the whole of its own answer is what the answer's author gives it: the same penalty.
    whole = penalties[names.index("log-probability, authors")]
    own_penalties = [whole if name == own[0] else penalties[names.index(name)] for name in own]
    of_own = values[:, best : best + 1, [names.index(name) for name in own]]
    alone = _crossed(of_own, labels[:, best : best + 1], parts, own_penalties)
    known = np.array([[row is not None for row in rows[one]] for one in answered])
    winners = np.where(known, likely, -1.0).argmax(1)
    every = np.arange(len(answered))
    return Confidences(
        best=best,
        is_right=labels[:, best].tolist(),
        per_token=np.exp(column(f"log-probability per token, member {best}")).tolist(),
        whole=np.exp(column(f"log-probability, member {best}")).tolist(),
        own_calibrated=alone[:, 0].tolist(),
        score=np.exp(column("word confidence, text")).tolist(),
        calibrated=likely[:, best].tolist(),
        chosen=likely[every, winners].tolist(),
        chosen_right=labels[every, winners].tolist(),
    )


def _own_names(member: int) -> list[str]:
    """The names of the features that a member has alone. The log-probability of its whole answer comes first."""
    first = f"log-probability, member {member}"
    others = [name for name in feature_names(member + 1) if name.endswith(f", member {member}") and name != first]
    return [first, *others, "length"]


def _crossed(values: Any, labels: Any, parts: Sequence[Sequence[int]], penalties: Sequence[float]) -> Any:
    """For each question and answer, the probability that the answer is right, by a calibration that was fitted on the
    other parts."""
    found = np.zeros(labels.shape)
    for part in parts:
        held = set(part)
        rest = [one for one in range(len(labels)) if one not in held]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the figures show where a half says nothing
            calibration = Calibration.fit(values[rest], labels[rest], penalties)
        found[list(part)] = calibration.probabilities(values[list(part)])
    return found
