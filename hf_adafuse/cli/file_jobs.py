"""`FileJob`: makes a record of each question of a file, over any number of kills and processes.

`hf-adafuse run`, `score` and `fit` run their questions through it.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..demo.job_progress import Progress
from .answers import AnswersFile, Record
from .questions import Question

if TYPE_CHECKING:
    from .batches import Processes

# `ask(questions, on_record)` tells `on_record` each record as soon as it is made. Both return whether to stop.
Ask = Callable[[Sequence[Question], Callable[[Record], bool]], bool]


@dataclass(frozen=True)
class FileJob:
    """
    A job: questions, the file of their records, and what makes the records.

    Args:
        source (`str`): the name of the questions' file in messages.
        path (`Path`): the file that the records go to.
        questions (`list[Question]`): all questions, the bad ones too.
        settings (`dict`): what the records depend on, by flag. A run that goes on must have the same.
        load (`Callable`): loads the models. Called before anything is dropped, else before the first question is
            asked. Returns the function that asks questions.
        failed (`dict`): what the record of a bad line holds beside its error.
        batch_size (`int`): how many questions are asked at a time.
        is_same (`Callable`): as of [`AnswersFile`].
        stops (`bool`): whether to stop at a bad line or a failure. Otherwise a record with an error is written.
        overwrite (`bool`): whether to drop what an earlier run has written.
        progress (`bool`, *optional*): whether to show a bar, as of [`Progress`].
        kept (`str`): what messages call the records, like `"answers"`.
        unit (`str`): what the rate counts, like `"words"`.
        size_of (`Callable`): how many of the unit a record holds.
    """

    source: str
    path: Path
    questions: Sequence[Question]
    settings: dict[str, Any]
    load: Callable[[], Ask]
    failed: dict[str, Any]
    batch_size: int
    is_same: Callable[[Record, Question], bool] = lambda record, question: True
    stops: bool = True
    overwrite: bool = False
    progress: bool | None = None
    kept: str = "answers"
    unit: str = "words"
    size_of: Callable[[Record], int] = lambda record: int(record.get("words", 0))

    def run(self, processes: Processes) -> bool:
        """Make all records that are not there yet. Returns whether the job has stopped at an error."""
        from ..trees.shared_prefix import prefix_caching

        if processes.count > 1 and self.source == "-":
            raise ValueError("The questions must be a file with several processes, but are `-`. Write them to a file.")
        answers = AnswersFile(self.path, self.questions, processes.index, processes.count, self.is_same)
        with closing(answers):
            if processes.index == 0:
                answers.prepare(self.settings, self.overwrite)
            load = functools.cache(self.load)
            if self.overwrite:
                load()
                processes.wait()  # until every process has loaded its models
                if processes.index == 0:
                    answers.start_over(self.settings)
            processes.wait()
            left = answers.load()
            processes.wait()  # until every process has read what earlier runs have written
            report = _Report(self, answers.num_written, processes.index == 0)
            report.add(answers.collect())
            writer = _BatchWriter(self, answers, report, load)
            try:
                with prefix_caching():  # few-shot examples are the same in every batch
                    has_stopped = self._ask_all(left, writer, processes)
            except KeyboardInterrupt:
                report.say("interrupted; the same command goes on from here")
                report.close()
                raise
            if not has_stopped:
                processes.wait()
                report.add(answers.finish())
            report.close()
        return has_stopped

    def _ask_all(self, left: list[Question], writer: _BatchWriter, processes: Processes) -> bool:
        """Ask this process's share of the questions. Returns whether the job has stopped at an error."""
        from ..call.answering import BATCHES_A_CALL

        share = max(1, math.ceil(len(left) / self.batch_size / processes.count))  # a process's number of batches
        size = self.batch_size * math.ceil(share / math.ceil(share / BATCHES_A_CALL))
        batches = [left[start : start + size] for start in range(0, len(left), size)]
        return any(writer.answer(batch) for batch in batches[processes.index :: processes.count])


class _BatchWriter:
    """Asks batches of questions and writes their records. The job's models are loaded for the first good question."""

    def __init__(self, job: FileJob, answers: AnswersFile, report: _Report, load: Callable[[], Ask]) -> None:
        self._job = job
        self._answers = answers
        self._report = report
        self._load = load

    def answer(self, batch: list[Question]) -> bool:
        """Ask some questions. Returns whether the job has stopped at one that failed."""
        for question in batch:
            if question.error is not None:
                record = {"line": question.line, "input": question.record, **self._job.failed}
                self._write({**record, "error": question.error})
        good = [question for question in batch if question.error is None]
        if not good:
            return False
        return self._load()(good, self._write)

    def _write(self, record: Record) -> bool:
        """Write a record. Returns whether the job stops there."""
        if "error" in record:
            return self._fails(record)
        self._report.add(self._answers.write(record))
        return False

    def _fails(self, record: Record) -> bool:
        """Write a record with an error, and say so. Returns whether the job stops there."""
        job = self._job
        if job.stops:
            record["stopped"] = True  # the next run asks it again
        self._report.add(self._answers.write(record))
        problem = problem_of(record["line"], job.source, record["error"])
        advice = f" The {job.kept} before it are in {job.path}; started again, the run goes on."
        self._report.say(f"error: {problem}{advice}" if job.stops else f"warning: {problem}")
        return job.stops


def recording(
    ask: Callable[[Sequence[Question], Callable[[int, Any], None]], Any], shown: Callable[[Any], Record]
) -> Ask:
    """
    A function that asks questions as a [`FileJob`] calls it. It makes one record of each question, also of one that
    fails.

    Args:
        ask (`Callable`): `ask(questions, tell)` answers questions, as [`answer_each`] calls it.
        shown (`Callable`): `shown(answer)` returns what a record holds of an answer.
    """
    from ..call.answering import answer_each, reason_of

    def record(question: Question) -> Record:
        return {"line": question.line, "input": question.record, "prompt": question.prompt}

    def ask_all(questions: Sequence[Question], on_record: Callable[[Record], bool]) -> bool:
        def tell(question: Question, answer: Any) -> None:
            on_record(record(question) | shown(answer))

        failed = answer_each(questions, ask, tell)
        return any(on_record(record(question) | {"error": reason_of(error)}) for question, error in failed)

    return ask_all


def check_lines(questions: Sequence[Question], source: str, advice: str = "Mend it, or pass --on-error skip.") -> None:
    """Raises `ValueError` where some lines make no prompt. `advice`: what to do where others do."""
    bad = [question for question in questions if question.error is not None]
    if bad:
        others = f" So have {len(bad) - 1} others." if len(bad) > 1 else ""
        problem = problem_of(bad[0].line, source, str(bad[0].error))
        # Where no line makes a prompt, the template is wrong and not the lines.
        if len(bad) == len(questions) and bad[0].record is not None and bad[0].prompt is None:
            advice = 'Pass --template, e.g. --template "Question: {question}\\nAnswer:".'
        raise ValueError(f"{problem}{others} {advice}")


def problem_of(line: int, source: str, error: str) -> str:
    """A sentence that says where an error is. Errors of `generate()` end with a period already, those of bad lines do
    not."""
    return f"line {line} of {source}: {error.removesuffix('.')}."


class _Report:
    """Shows on standard error how far a job is, and what has come of it. In other processes than the main one only
    `say` writes anything."""

    def __init__(self, job: FileJob, written: int, is_main: bool) -> None:
        self._job = job
        self._is_main = is_main
        self._total = len(job.questions)
        self._written = written
        self._progress = Progress(self._total, job.kept, written, job.progress if is_main else False)
        self._errors = 0
        self._size = 0
        self._start = time.monotonic()

    def add(self, records: list[Record]) -> None:
        """Count records that came into the file."""
        self._errors += sum("error" in record for record in records)
        self._size += sum(map(self._job.size_of, records))
        if records or self._progress.num_new or not self._written:  # a run that goes on has no rate at first
            self._progress.note(self._rate())
        self._progress.add(len(records))

    def say(self, message: str) -> None:
        """Write a line of its own."""
        self._progress.say(message)

    def close(self) -> None:
        """Write the last line: how many records there are, and how many are new."""
        self._progress.close()
        if self._is_main:
            new = self._progress.num_new
            errors = f" ({self._errors} with an error)" if self._errors else ""
            sys.stderr.write(
                f"hf-adafuse: {self._written + new} of {self._total} {self._job.kept} in {self._job.path}, "
                f"{new} new{errors}, {self._rate()}\n"
            )

    def _rate(self) -> str:
        return f"{self._size / max(time.monotonic() - self._start, 1e-9):.1f} {self._job.unit}/s"
