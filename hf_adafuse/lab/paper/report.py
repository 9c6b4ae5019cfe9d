"""`Report`: shows a table or figure of the paper as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...demo.paired import Mean
from ..evaluation.candidates import Contestant
from .clock import Timing
from .scores import SHARES, Gain, Scores, average, best
from .values import TASKS, Contrast, Experiment, slug

_NONE = "-"
METRIC_NAMES = {
    "exact_match": "exact match",
    "f1": "F1",
    "last_number": "accuracy of the last number",
    "marked_number": "accuracy of the number after ####",
    "spbleu": "spBLEU",
    "bleu": "BLEU",
    "chrf": "chrF",
    "sentence_chrf": "chrF of each sentence",
}
Rows = list[list[str]]


@dataclass(frozen=True)
class Report:
    """
    The scores of a table or figure.

    Attributes:
        experiment (`Experiment`): the table or figure.
        names (`list[str]`): the names of the members, the main model's first.
        tasks (`list[str]`): the tasks, one for each column.
        scores (`dict[tuple[str, Contestant], Scores]`): the scores by task and candidate.
        left_out (`dict[str, str]`): why a task or peer is not in the table, by its name.
        settings (`dict`): how the questions were asked, which the JSON records.
    """

    experiment: Experiment
    names: Sequence[str]
    tasks: Sequence[str]
    scores: Mapping[tuple[str, Contestant], Scores]
    left_out: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def label(self, candidate: Contestant) -> str:
        """What the candidate is called in the table."""
        return (
            f"{candidate.members[0] + 1}: {self.names[candidate.members[0]]}" if candidate.is_alone else candidate.rule
        )

    def of_task(self, task: str) -> dict[Contestant, Scores]:
        """The scores of each candidate that was asked this task."""
        return {candidate: scores for (known, candidate), scores in self.scores.items() if known == task}

    def gain(self, task: str, contrast: Contrast) -> tuple[Gain, Contestant] | None:
        """A difference, and the candidate over which it is; `None` where one of the candidates was not asked."""
        found = self.of_task(task)
        if any(one not in found for one in (contrast.candidate, *contrast.others)):
            return None
        other = best(contrast.others, found)
        return found[contrast.candidate].above(found[other]), other

    def markdown(self, more: str = "") -> str:
        """The whole text. `more`: a part that comes before the words per round."""
        words = self.word_rows()
        blocks = [more] if more else []
        if len(words) > 1:
            about = "Words per round, and the shares of rounds of 1 / 2 / 3 words in % (the end of the text is a word):"
            blocks += [about, "\n".join(table(words))]
        return self.text(self._units(), table(self.score_rows()), *blocks)

    def text(self, about: str, rows: Sequence[str], *more: str) -> str:
        """A text with a table. The title comes first, then the members, what is left out, `about` (what the table's
        numbers are), the table's lines `rows`, and further parts."""
        named = ", ".join(f"{number} {name}" for number, name in enumerate(self.names, start=1))
        blocks = [f"# {self.experiment.title}", f"{self.experiment.about} Members: {named}."]
        blocks += [f"Left out: {_sentences(self.left_out)}"] * bool(self.left_out)
        return "\n\n".join([*blocks, about, "\n".join(rows), *more]) + "\n"

    def score_rows(self) -> Rows:
        """The rows of the table of scores: one for each candidate, then one for each difference."""
        counts = [str(next(iter(self.of_task(task).values())).mean.n) for task in self.tasks]
        has_average = len(self.tasks) > 1
        rows = [["", *map(_label, self.tasks), *["average"] * has_average]]
        rows.append(["n", *counts, *[str(sum(map(int, counts)))] * has_average])
        for candidate in self.experiment.candidates:
            found = [self.of_task(task).get(candidate) for task in self.tasks]
            rows.append([self.label(candidate), *_cells([None if one is None else one.mean for one in found])])
        for contrast in self.experiment.contrasts:
            gains = [self.gain(task, contrast) for task in self.tasks]
            rows.append([contrast.label, *_cells([None if one is None else one[0].difference for one in gains], True)])
        return rows

    def word_rows(self) -> Rows:
        """The rows of the table of words per round."""
        rows = [["", *map(_label, self.tasks)]]
        for candidate in self.experiment.candidates:
            found = [self.of_task(task).get(candidate) for task in self.tasks]
            if any(scores is not None and scores.sizes for scores in found):
                rows.append([self.label(candidate), *(_words(scores) for scores in found)])
        return rows

    def json(self) -> dict[str, Any]:
        """Everything as plain JSON values, except that numbers may be NaN."""
        return {
            "experiment": self.experiment.name,
            "title": self.experiment.title,
            "members": list(self.names),
            "settings": dict(self.settings),
            "left_out": dict(self.left_out),
            "cells": [self._cell(task, candidate) for task, candidate in self.scores],
            "averages": self._averages(),
            "differences": [one for task in self.tasks for one in self._differences(task)],
            "average_differences": self._average_differences(),
        }

    def _cell(self, task: str, candidate: Contestant) -> dict[str, Any]:
        scores = self.scores[task, candidate]
        return {
            "task": task,
            "who": self.label(candidate),
            "folder": slug(candidate),
            "members": list(candidate.members),
            "settings": dict(candidate.settings),
            "metric": scores.metric,
            **_figures(scores.mean),
            "rounds": len(scores.sizes),
            "words_per_round": scores.words_per_round,
            "shares": {str(size): share for size, share in scores.shares.items()},
        }

    def _averages(self) -> list[dict[str, Any]]:
        found = []
        for candidate in self.experiment.candidates:
            means = [self.of_task(task)[candidate].mean for task in self.tasks if candidate in self.of_task(task)]
            if len(means) == len(self.tasks) > 1:
                found.append({"who": self.label(candidate), **_figures(average(means))})
        return found

    def _differences(self, task: str) -> list[dict[str, Any]]:
        found = []
        for contrast in self.experiment.contrasts:
            gained = self.gain(task, contrast)
            if gained is not None:
                entry = {"task": task, "what": contrast.label, "over": self.label(gained[1])}
                found.append({**entry, **_figures(gained[0].difference), "p_value": gained[0].p_value})
        return found

    def _average_differences(self) -> list[dict[str, Any]]:
        found = []
        for contrast in self.experiment.contrasts:
            gains = [gained for task in self.tasks if (gained := self.gain(task, contrast)) is not None]
            if len(gains) == len(self.tasks) > 1:
                means = [gain.difference for gain, _ in gains]
                found.append({"what": contrast.label, **_figures(average(means))})
        return found

    def _units(self) -> str:
        by_metric: dict[str, list[str]] = {}
        for task in self.tasks:
            by_metric.setdefault(next(iter(self.of_task(task).values())).metric, []).append(_label(task))
        named = "; ".join(f"{METRIC_NAMES[metric]} ({', '.join(tasks)})" for metric, tasks in by_metric.items())
        text = f"In points (0 to 100) ± standard error: {named}. Differences are taken on the same questions."
        if any(len(contrast.others) > 1 for contrast in self.experiment.contrasts):
            text += (
                " The best of several rows is picked by its score on the same questions. That favours it, so the "
                "difference to it is a little too small."
            )
        return text


def table(rows: Rows) -> list[str]:
    """The lines of a Markdown table that can be read as plain text, too. The first row is its head, and numbers are
    flush right."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for number, (first, *others) in enumerate(rows):
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append(f"| {' | '.join(cells)} |")
        if number == 0:
            lines.append("|".join(["", "-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:]), ""]))
    return lines


def time_rows(labels: Mapping[Contestant, str], timings: Mapping[Contestant, Timing]) -> Rows:
    """The rows of the table of times."""
    rows = [["", "seconds / prompt", "time / members' own", "tokens/s"]]
    for candidate, timing in timings.items():
        shown = [f"{one.value:.3f} ± {one.error:.3f}" for one in (timing.seconds, timing.ratio)]
        rows.append([labels[candidate], *shown, f"{timing.tokens_per_second:.1f}"])
    return rows


def times_json(labels: Mapping[Contestant, str], timings: Mapping[Contestant, Timing]) -> list[dict[str, Any]]:
    """The times as plain JSON values, except that numbers may be NaN."""
    return [
        {
            "who": labels[candidate],
            "folder": slug(candidate),
            "seconds": _figures(timing.seconds),
            "ratio": _figures(timing.ratio),
            "tokens_per_second": timing.tokens_per_second,
        }
        for candidate, timing in timings.items()
    ]


def _cells(means: Sequence[Mean | None], signed: bool = False) -> list[str]:
    """The cells of some means, one for each task, and of their average where there are several tasks."""
    cells = [_NONE if one is None else one.show(signed=signed) for one in means]
    if len(means) > 1:
        known = [one for one in means if one is not None]
        cells.append(average(known).show(signed=signed) if len(known) == len(means) else _NONE)
    return cells


def _words(scores: Scores | None) -> str:
    if scores is None or not scores.sizes:
        return _NONE
    shares = " / ".join(f"{100 * scores.shares[size]:.1f}" for size in SHARES)
    return f"{scores.words_per_round:.2f} ({shares})"


def _figures(found: Mean) -> dict[str, Any]:
    return {"n": found.n, "value": found.value, "standard_error": found.error}


def _label(task: str) -> str:
    return TASKS[task]


def _sentences(left_out: Mapping[str, str]) -> str:
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason.rstrip("."), []).append(TASKS.get(name, name))
    sentences = [f"{', '.join(alike)} ({reason})" for reason, alike in names.items()]
    return f"{'; '.join(sentences)}."
