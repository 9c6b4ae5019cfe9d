"""The answers of a search on disk: one file per candidate, complete after any kill. Knows no model.

The lines are those of `hf-adafuse run`, so that `hf-adafuse compare` reads them; each also says who answered, and how.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..evaluation.candidates import Candidate
from ..evaluation.metrics import METRICS, answers_of, f1
from .answers import append, mend, read_records
from .questions import Question

Ask = Callable[[Candidate, Sequence[str]], Sequence[str]]


class TuneAnswers:
    """
    What the candidates answer and how right that is; asked once, also over kills.

    Args:
        folder (`Path`): of the files.
        questions (`list[Question]`), names (`list[str]`): of the questions and members.
        metric (`str`), batch_size (`int`)
        ask (`Callable`): the texts of a candidate for some prompts.
        on_answers (`Callable`): is told how many answers came, and whether they were known.
    """

    def __init__(
        self,
        folder: Path,
        questions: Sequence[Question],
        names: Sequence[str],
        metric: str,
        batch_size: int,
        ask: Ask,
        on_answers: Callable[[int, bool], None] = lambda number, known: None,
    ) -> None:
        self._folder = folder
        self._questions = {question.line: question for question in questions}
        self._names = names
        self._metric = METRICS[metric]
        self._batch_size = batch_size
        self._ask = ask
        self._on_answers = on_answers
        self._texts: dict[Path, dict[int, str]] = {}

    def evaluate(self, candidate: Candidate, lines: Sequence[int]) -> list[float]:
        """The scores of a candidate on the questions in some lines."""
        path = self.path(candidate)
        texts = self._known(candidate, path)
        left = [line for line in lines if line not in texts]
        self._on_answers(len(lines) - len(left), True)
        for start in range(0, len(left), self._batch_size):
            batch = [self._questions[line] for line in left[start : start + self._batch_size]]
            made = self._ask(candidate, [question.prompt or "" for question in batch])
            for question, text in zip(batch, made, strict=True):
                append(path, self._record(candidate, question, text))
                texts[question.line] = text
            self._on_answers(len(batch), False)
        return [self._score(line, texts[line]) for line in lines]

    def tie_break(self, candidate: Candidate, lines: Sequence[int]) -> float:
        """The F1 of answers that are given already: among candidates that score the same, whose come closer."""
        texts = self._known(candidate, self.path(candidate))
        return sum(f1(texts[line], self._accepted(line)) for line in lines)

    def path(self, candidate: Candidate) -> Path:
        """The file of a candidate."""
        members = "+".join(re.sub(r"[^\w.-]+", "-", self._names[member]) for member in candidate.members)
        rule = "alone" if candidate.is_alone else re.sub(r"[^\w.]+", "-", candidate.rule)
        return self._folder / f"{members}_{rule}.jsonl"

    def _score(self, line: int, text: str) -> float:
        return self._metric(text, self._accepted(line))

    def _accepted(self, line: int) -> list[str]:
        return answers_of((self._questions[line].record or {})["answer"])

    def _record(self, candidate: Candidate, question: Question, text: str) -> dict[str, Any]:
        record = {"line": question.line, "input": question.record, "prompt": question.prompt, "text": text}
        return record | self._maker(candidate)

    def _maker(self, candidate: Candidate) -> dict[str, Any]:
        """Who answered, as it is read back from JSON."""
        members = [self._names[member] for member in candidate.members]
        made: dict[str, Any] = json.loads(json.dumps({"members": members, "settings": dict(candidate.settings)}))
        return made

    def _known(self, candidate: Candidate, path: Path) -> dict[int, str]:
        if path not in self._texts:
            self._texts[path] = {}
            if path.exists():
                mend(path)
                for record in read_records(path, 0)[0]:
                    self._check(record, candidate, path)
                    self._texts[path][record["line"]] = record["text"]
        return self._texts[path]

    def _check(self, record: dict[str, Any], candidate: Candidate, path: Path) -> None:
        question = self._questions.get(record["line"])
        is_same = question is not None and record.get("prompt") == question.prompt and "text" in record
        maker = self._maker(candidate)
        if not is_same or any(record.get(name) != value for name, value in maker.items()):
            raise ValueError(
                f"The questions and rules must be those of the earlier run, but the answer to line {record['line']} in "
                f"{str(path)!r} is to another question, or by other settings. Give the same data, another --output, or "
                "start over with --overwrite."
            )
