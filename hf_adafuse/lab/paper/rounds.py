"""Finds where two ways of decoding part, with all candidates of those rounds, for the paper's Figure 3."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from ...outputs import AdaFuseCandidate, AdaFuseRound
from ...rounds.trace_text import format_round
from ..evaluation.disagreements import Comparison, compare, num_alike, parted, show_disagreements
from ..evaluation.samples import Sample, read_results
from .report import METRIC_NAMES


@dataclass(frozen=True)
class Parting:
    """
    A question that two ways of decoding answer differently.

    Attributes:
        number (`int`): the question's number.
        question (`str`): what was asked.
        answers (`list[str]`): the accepted answers.
        texts (`tuple[str, str]`): both answers.
        metric (`str`): the name of the metric of the scores.
        scores (`tuple[float, float]`): their scores, in points from 0 to 100.
        rounds (`tuple[list[AdaFuseRound], list[AdaFuseRound]]`): both answers' rounds, up to the one in which they
            part.
    """

    number: int
    question: str
    answers: list[str]
    texts: tuple[str, str]
    metric: str
    scores: tuple[float, float]
    rounds: tuple[list[AdaFuseRound], list[AdaFuseRound]]

    def json(self) -> dict[str, Any]:
        """The parting as plain JSON values, except that scores may be infinite."""
        return {
            "number": self.number,
            "question": self.question,
            "answers": self.answers,
            "texts": list(self.texts),
            "metric": self.metric,
            "scores": list(self.scores),
            "rounds": [[committed.to_dict() for committed in rounds] for rounds in self.rounds],
        }


@dataclass(frozen=True)
class Disagreements:
    """
    Two ways of decoding on the same questions.

    Attributes:
        comparison (`Comparison`): all answers, side by side.
        shown (`list[Parting]`): the questions that are shown. Those with the largest differences of scores come first,
            then those where only the texts differ.
    """

    comparison: Comparison
    shown: list[Parting]

    def text(self, labels: tuple[str, str]) -> str:
        """Both answers side by side, then every candidate of the rounds in which they part. `labels`: what the two ways
        of decoding are called."""
        blocks = [f"A: {labels[0]}, B: {labels[1]}; scores are of {METRIC_NAMES[self.comparison.a.metric]}"]
        blocks.append(show_disagreements(self.comparison, len(self.shown)))
        for one in self.shown:
            blocks.append(f"question {one.number}, the rounds in which they part, with all candidates:")
            for label, rounds in zip(labels, one.rounds, strict=True):
                blocks += [f"{label}: {format_round(len(rounds), rounds[-1])}"] if rounds else []
        return "\n\n".join(blocks)


def find_disagreements(a: Path, b: Path, most: int, metric: str | None = None) -> Disagreements:
    """
    The questions on which two files of samples part.

    Args:
        a, b (`Path`): the files, as `write_samples` writes them, with rounds.
        most (`int`): the most questions that are shown.
        metric (`str`, *optional*): the metric by which the answers to a question differ. By default the first that the
            files have for each question.

    Raises:
        ValueError: a file does not have this metric, or the files do not answer the same questions.
    """
    first = read_results(a, metric)
    comparison = compare(first, read_results(b, first.metric, first.filter))
    by_score, by_text = parted(comparison)
    return Disagreements(comparison, [_parting(comparison, *pair) for pair in [*by_score, *by_text][:most]])


def _parting(comparison: Comparison, one: Sample, other: Sample) -> Parting:
    alike = num_alike(*("".join(committed["text"] for committed in sample.rounds) for sample in (one, other)))
    rounds = tuple([read_round(committed) for committed in _until(sample.rounds, alike)] for sample in (one, other))
    return Parting(
        one.number,
        str(one.question.get("question", "")),
        list(one.question.get("answers", one.answers)),
        (one.text, other.text),
        comparison.a.metric,
        (comparison.scale * one.score, comparison.scale * other.score),
        (rounds[0], rounds[1]),
    )


def _until(rounds: list[dict[str, Any]], length: int) -> list[dict[str, Any]]:
    """The rounds up to the first one whose text goes beyond `length` characters."""
    ends = accumulate(len(committed["text"]) for committed in rounds)
    last = next((index for index, end in enumerate(ends) if end > length), len(rounds) - 1)
    return rounds[: last + 1]


def read_round(values: dict[str, Any]) -> AdaFuseRound:
    """The inverse of `AdaFuseRound.to_dict()` after JSON, in which an infinite score is `null`."""
    candidates = [
        AdaFuseCandidate(**{**one, "score": math.inf if one["score"] is None else one["score"]})
        for one in values["candidates"]
    ]
    return AdaFuseRound(**{**values, "candidates": candidates})
