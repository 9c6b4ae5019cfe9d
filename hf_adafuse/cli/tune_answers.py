"""The answers of a search on disk: one file per candidate, complete after any kill. Knows no model.

The lines are those of `hf-adafuse run`, so that `hf-adafuse compare` reads them; each also says who answered, and how.
An answer that failed has an `error`, as there, and counts as wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..call.answering import answer_each, reason_of
from ..evaluation.candidates import Candidate
from ..evaluation.metrics import METRICS, Metric, answers_of, f1
from .answers import append, mend, read_records
from .job_settings import file_name
from .questions import Question

Ask = Callable[[Candidate, Sequence[str]], Sequence[str]]

# What this package, transformers and torch raise where a prompt, or a pass, is too much for a model. Anything else is a
# bug, and keeps its traceback.
_FAILURES = (ValueError, RuntimeError, IndexError)


class Answer(NamedTuple):
    """A text; or the reason why there is none."""

    text: str
    error: str | None = None


class TuneAnswers:
    """
    What the candidates answer and how right that is; asked once, also over kills.

    Args:
        folder (`Path`): of the files.
        questions (`list[Question]`), names (`list[str]`): of the questions and members.
        metric (`str`), batch_size (`int`)
        ask (`Callable`): the texts of a candidate for some prompts.
        on_answers (`Callable`): is told how many answers came, and whether they were known.

    Attributes:
        failures (`dict[Candidate, list[tuple[int, str]]]`): the questions that a candidate has failed to answer, by
            line, with the reasons, in the order in which they were asked for.
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
        self._answers: dict[Path, dict[int, Answer]] = {}
        self._num_answered = 0
        self.failures: dict[Candidate, list[tuple[int, str]]] = {}

    def evaluate(self, candidate: Candidate, lines: Sequence[int]) -> list[float]:
        """The scores of a candidate on the questions in some lines; 0 where it fails."""
        path = self.path(candidate)
        answers = self._known(candidate, path)
        left = [line for line in lines if line not in answers]
        self._on_answers(len(lines) - len(left), True)
        for start in range(0, len(left), self._batch_size):
            batch = [self._questions[line] for line in left[start : start + self._batch_size]]
            for question, answer in zip(batch, self._asked(candidate, batch), strict=True):
                append(path, self._record(candidate, question, answer))
                answers[question.line] = answer
            self._on_answers(len(batch), False)
        failed = [(line, error) for line in lines if (error := answers[line].error) is not None]
        if failed:
            self.failures.setdefault(candidate, []).extend(failed)
        self._num_answered += len(lines) - len(failed)
        return [self._score(line, answers[line], self._metric) for line in lines]

    def check_any(self) -> None:
        """
        Refuse to go on where nothing at all was answered so far: then it is not the questions that are at fault.

        Raises:
            ValueError: that. Files that hold nothing but failures are dropped: started again, all is asked again.
        """
        if self._num_answered or not self.failures:
            return
        for candidate in self.failures:
            path = self.path(candidate)
            if all(answer.error is not None for answer in self._answers.pop(path).values()):
                path.unlink(missing_ok=True)
        candidate, ((line, error), *_) = next(iter(self.failures.items()))
        number = sum(map(len, self.failures.values()))
        raise ValueError(
            f"The candidates must answer some of the questions, but all {number} answers failed; the first, of "
            f"{candidate.show(self._names)} to line {line}: {error.removesuffix('.')}. Mend that, and start again."
        )

    def _asked(self, candidate: Candidate, batch: Sequence[Question]) -> list[Answer]:
        """Those of a batch, in order."""
        made: dict[int, Answer] = {}

        def ask(some: Sequence[Question], on_answer: Callable[[int, Any], None]) -> None:
            for row, text in enumerate(self._ask(candidate, [question.prompt or "" for question in some])):
                on_answer(row, text)

        def tell(question: Question, text: str) -> None:
            made[question.line] = Answer(text)

        for question, error in answer_each(batch, ask, tell, _FAILURES):
            made[question.line] = Answer("", reason_of(error))
        return [made[question.line] for question in batch]

    def tie_break(self, candidate: Candidate, lines: Sequence[int]) -> float:
        """The F1 of answers that are given already: among candidates that score the same, whose come closer."""
        answers = self._known(candidate, self.path(candidate))
        return sum(self._score(line, answers[line], f1) for line in lines)

    def path(self, candidate: Candidate) -> Path:
        """The file of a candidate."""
        members = "+".join(file_name(self._names[member]) for member in candidate.members)
        rule = "alone" if candidate.is_alone else file_name(candidate.rule)
        return self._folder / f"{members}_{rule}.jsonl"

    def _score(self, line: int, answer: Answer, metric: Metric) -> float:
        accepted = answers_of((self._questions[line].record or {})["answer"])
        return 0.0 if answer.error is not None else metric(answer.text, accepted)

    def _record(self, candidate: Candidate, question: Question, answer: Answer) -> dict[str, Any]:
        record = {"line": question.line, "input": question.record, "prompt": question.prompt, "text": answer.text}
        return record | ({} if answer.error is None else {"error": answer.error}) | self._maker(candidate)

    def _maker(self, candidate: Candidate) -> dict[str, Any]:
        """Who answered, as it is read back from JSON."""
        members = [self._names[member] for member in candidate.members]
        made: dict[str, Any] = json.loads(json.dumps({"members": members, "settings": dict(candidate.settings)}))
        return made

    def _known(self, candidate: Candidate, path: Path) -> dict[int, Answer]:
        if path not in self._answers:
            self._answers[path] = {}
            if path.exists():
                mend(path)
                for record in read_records(path, 0)[0]:
                    self._check(record, candidate, path)
                    self._answers[path][record["line"]] = Answer(record["text"], record.get("error"))
        return self._answers[path]

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
