"""What a search has found, as text and as files. Knows no model."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .. import __version__
from ..evaluation.candidates import Candidate
from ..evaluation.paired import Mean, mean, paired
from ..evaluation.tuning import Tuning
from .arguments import as_flags
from .plain_json import with_nulls

_MOST_SHOWN = 5  # ensembles in the table, or candidates that failed


class TuneReport:
    """
    The outcome of a search.

    Args:
        tuning (`Tuning`), candidates (`list[Candidate]`): of the search.
        names (`list[str]`): of the members, as they are shown.
        paths (`list[str]`): of the members, as they are loaded.
        metric (`str`), data (`str`): what was scored on what.
        failures (`dict`): as of `TuneAnswers`.
    """

    def __init__(
        self,
        tuning: Tuning,
        candidates: Sequence[Candidate],
        names: Sequence[str],
        paths: Sequence[str],
        metric: str,
        data: str,
        failures: Mapping[Candidate, Sequence[tuple[int, str]]] = MappingProxyType({}),
    ) -> None:
        self._tuning, self._candidates = tuning, candidates
        self._names, self._paths = names, paths
        self._metric, self._data = metric, data
        self._failures = failures
        values = [score for scores in tuning.search.scores for score in scores]
        self._scale = 100.0 if all(0 <= value <= 1 for value in values) else 1.0

    def text(self) -> str:
        """Tables of both parts, and what to choose."""
        tuning = self._tuning
        num_searched, num_held_out = len(tuning.plan.searched), len(tuning.held_out)
        exhaustive = len(self._candidates) * num_searched
        unit = "points (0 to 100)" if self._scale == 100 else "the metric's own unit"
        best = self._show(tuning.member)
        lines = [
            f"{self._metric} in {unit} ± standard error; then the difference to the best member, by question",
            "",
            f"searched on {num_searched} questions: {len(self._candidates)} candidates, {tuning.search.num_answers} "
            f"answers (each asked everything: {exhaustive})",
            *self._table(self._shown(), dict(enumerate(tuning.search.scores))),
        ]
        others = len(self._candidates) - len(self._shown())
        lines += [f"  ({others} others: evidence.json)"] * bool(others)
        lines += ["", f"held out: {num_held_out} questions that the search has not seen"]
        lines += self._table(list(tuning.held_out_scores), tuning.held_out_scores)
        return "\n".join([*lines, *self._failed(), "", *self._verdict(best)])

    def _shown(self) -> list[int]:
        """The members alone, and the best ensembles that have answered all questions."""
        search = self._tuning.search
        alone = [one for one in search.finalists if self._candidates[one].is_alone]
        others = [one for one in search.finalists if not self._candidates[one].is_alone]
        ranked = sorted(others, key=lambda one: -mean(search.scores[one]).value)
        return [*alone, *ranked[:_MOST_SHOWN]]

    def _table(self, rows: Sequence[int], scores: dict[int, list[float]]) -> list[str]:
        best = self._tuning.member
        cells = []
        for row in rows:
            lead = paired(scores[row], scores[best]).difference.show(self._scale, signed=True) if row != best else ""
            cells.append((self._show(row), mean(scores[row]).show(self._scale), lead))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return [
            f"  {name:<{widths[0]}}  {value:>{widths[1]}}  {lead:>{widths[2]}}".rstrip() for name, value, lead in cells
        ]

    def _failed(self) -> list[str]:
        """What could not be answered, by whom, and why at first."""
        number = sum(map(len, self._failures.values()))
        if not number:
            return []
        lines = ["", f"failed, and counted as wrong: {number} answers"]
        for candidate, failed in list(self._failures.items())[:_MOST_SHOWN]:
            (line, error), *_ = failed
            reason = " ".join(error.split())
            lines.append(f"  {len(failed)} of {candidate.show(self._names)}; the first, to line {line}: {reason}")
        others = len(self._failures) - _MOST_SHOWN
        return lines + [f"  (and of {others} others: evidence.json)"] * (others > 0)

    def _verdict(self, best: str) -> list[str]:
        tuning = self._tuning
        ensemble = self._show(tuning.ensemble)
        seen, honest = tuning.gain.difference, tuning.held_out_gain.difference
        figures = f"{self._points(seen)} where it was searched for, {self._points(honest)} held out (n = {honest.n})"
        if tuning.held_out_member != tuning.member:
            figures += f", there against {self._show(tuning.held_out_member)}"
        if tuning.winner != tuning.ensemble:
            other = "it" if tuning.winner == tuning.member else best
            if seen.value <= 0:
                reason = f"not above {other}"
            elif not tuning.is_above:
                reason = f"not above {other} by more than {tuning.min_gain:g} standard errors"
            else:
                reason = "behind the best member where it was not searched for"
            return [
                f"The best choice is one member alone: {self._show(tuning.winner)}.",
                f"The best ensemble, {ensemble}, is {reason}: {figures}.",
            ]
        lines = [f"The best choice: {ensemble}.", f"Above the best member, {best}: {figures}."]
        if not honest.value > honest.error:  # also where one question has no error
            lines.append("Held out that is no clear gain: more questions would tell.")
        return [*lines, f"Its flags: {self._flags(tuning.winner)}"]

    def _points(self, gained: Mean) -> str:
        return gained.show(self._scale, signed=True)

    def _show(self, index: int) -> str:
        return self._candidates[index].show(self._names)

    def _flags(self, index: int) -> str:
        candidate = self._candidates[index]
        main, *assistants = [self._paths[member] for member in candidate.members]
        members = ["--model", main, *(part for name in assistants for part in ("--assistant", name))]
        return shlex.join([*members, *as_flags(candidate.settings)])

    def write(self, folder: Path, evidence: dict[str, Any]) -> None:
        """The settings, as transformers and this package read them, and what speaks for them."""
        from transformers import GenerationConfig

        winner = self._candidates[self._tuning.winner]
        config = None if winner.config is None else winner.config.to_dict()
        # False switches AdaFuse off, whatever is bound or passed.
        GenerationConfig(adafuse_config=False if config is None else config).save_pretrained(folder)
        members = [self._paths[member] for member in winner.members]
        _write(folder / "adafuse_config.json", {"members": members, "adafuse_config": config})
        _write(folder / "evidence.json", self.evidence() | evidence)

    def evidence(self) -> dict[str, Any]:
        """Everything that the choice was made of."""
        tuning, n = self._tuning, self._tuning.held_out
        return {
            "hf_adafuse": __version__,
            "data": self._data,
            "metric": self._metric,
            "searched": tuning.plan.searched,
            "held_out": n,
            "winner": self._show(tuning.winner),
            "best_member": self._show(tuning.member),
            "best_member_held_out": self._show(tuning.held_out_member),
            "best_ensemble": self._show(tuning.ensemble),
            "min_gain": tuning.min_gain,
            "gain_searched": _figures(tuning.search.scores[tuning.ensemble], tuning.search.scores[tuning.member]),
            "gain_held_out": _figures(
                tuning.held_out_scores[tuning.ensemble], tuning.held_out_scores[tuning.held_out_member]
            ),
            "candidates": [self._entry(index) for index in range(len(self._candidates))],
        }

    def _entry(self, index: int) -> dict[str, Any]:
        tuning, candidate = self._tuning, self._candidates[index]
        scores, held_out = tuning.search.scores[index], tuning.held_out_scores.get(index)
        looks = tuning.search.looks
        left = next((look for look in looks if index in (*look.worse, *look.halved)), None)
        fate = "asked all" if left is None else "significantly worse" if index in left.worse else "in the worse half"
        return {
            "candidate": candidate.show(self._names),
            "members": [self._paths[member] for member in candidate.members],
            "settings": dict(candidate.settings),
            "fate": fate,
            "failed": [{"line": line, "error": error} for line, error in self._failures.get(candidate, [])],
            "searched": _figures(scores, tuning.search.scores[tuning.member][: len(scores)]),
            "held_out": held_out and _figures(held_out, tuning.held_out_scores[tuning.member]),
        }


def _figures(scores: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """A mean, and the paired difference to the best member on the same questions."""
    own, lead = mean(scores), paired(scores, others)
    return {
        "n": own.n,
        "mean": own.value,
        "standard_error": own.error,
        "difference": lead.difference.value,
        "difference_standard_error": lead.difference.error,
        "wins": lead.wins,
        "losses": lead.losses,
        "ties": lead.ties,
        "p_value": lead.p_value,
    }


def _write(path: Path, value: Any) -> None:
    text = json.dumps(with_nulls(value), indent=1, ensure_ascii=False, allow_nan=False)
    text = re.sub(r"\[[\d\s,.]+\]", lambda numbers: " ".join(numbers[0].split()), text)  # on one line
    path.write_text(f"{text}\n", encoding="utf-8")
