"""The command `hf-adafuse run`: a file of questions to a file of answers, over any number of kills and processes."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .answers import Answers, check_output
from .arguments import (
    SAMPLING,
    STRUCTURED,
    adafuse_config,
    add_config_arguments,
    add_member_arguments,
    add_stop_argument,
    add_text_arguments,
    given_settings,
    member_loading,
    read_text_arguments,
)
from .few_shot import add_examples, add_prompt_arguments
from .flag_types import count
from .job_settings import add_job_arguments
from .progress import Progress
from .questions import Question, Template, read_questions

if TYPE_CHECKING:
    from .batches import Processes

_DESCRIPTION = """\
Answer many questions with an ensemble: one JSON object per line in, one per line out, in the same order, written as
they come. Killed and started again, it goes on where it stopped."""

_EXAMPLES = """\
examples:
  hf-adafuse run questions.jsonl --output answers.jsonl
  hf-adafuse run questions.jsonl --output answers.jsonl --model A --assistant B --template "Q: {question}\\nA:"
  hf-adafuse run squad --split validation --output answers.jsonl --model A --assistant B --template "{question}" --chat
  torchrun --nproc-per-node 2 -m hf_adafuse run questions.jsonl --output answers.jsonl

an answer:
  {"line": 1, "input": {"question": ...}, "prompt": ..., "text": ..., "words": 2, "finish_reason": "stop",
   "confidence": 0.731}
`finish_reason`: "stop" (the text came to its end, or to a --stop, which is not in it), "length" or "error". With an
error there is also "error", which says why, and the text until there. `confidence`: how sure the members are, from 0
to 1, or null; a score, and only of a calibrated method a probability. --rounds adds "rounds", as `generate --json`
writes them. `hf-adafuse compare` sets two such files side by side."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command, put on a parser of the caller's."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument("questions", help="a JSONL file, - for standard input, or a dataset's name or folder")
    parser.add_argument("--output", required=True, metavar="FILE", help="the answers, in JSONL")
    parser.add_argument(
        "--template", help="the prompt, with fields as {name} (default: {prompt}; with the demo pair its question form)"
    )
    add_prompt_arguments(parser)
    parser.add_argument("--split", help="of a dataset")
    parser.add_argument("--subset", help="of a dataset")
    parser.add_argument("--max-new-tokens", type=count, default=128, metavar="N", help="per answer (default: 128)")
    add_stop_argument(parser, "none; with --few-shot the end of a line, or an empty line where answers have several")
    add_text_arguments(parser, "0")
    parser.add_argument("--rounds", action="store_true", default=None, help="also write each answer's rounds")
    parser.add_argument("--html", metavar="FOLDER", help="also write a page for each answer that shows its rounds")
    parser.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="at a bad line or an answer that fails: stop (default), or write an answer with an error and go on",
    )
    add_job_arguments(parser)
    add_member_arguments(parser)
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    adafuse_config(args)  # refuse wrong settings before models are loaded
    read_text_arguments(args)
    check_output(Path(args.output))
    if args.html is not None:
        Path(args.html).mkdir(parents=True, exist_ok=True)
    template = Template(args.template or _default_template(args.model))
    found = read_questions(args.questions, template, args.split, args.subset)
    questions, stops = add_examples(found, args.few_shot, template)
    if args.stop is None and not args.chat:
        args.stop = stops
    if args.on_error == "stop":
        _check_lines(questions, args.questions)

    from ..trees.shared_prefix import prefix_caching
    from .batches import Processes

    processes = Processes.find()
    if processes.count > 1 and args.questions == "-":
        raise ValueError("The questions must be a file with several processes, but are `-`. Write them to a file.")
    with closing(Answers(Path(args.output), questions, processes.index, processes.count)) as answers:
        if processes.index == 0:
            answers.prepare(_settings(args, template), args.overwrite)
        processes.wait()
        left = answers.load()
        processes.wait()  # what is written from here on is this run's
        report = _Report(args, len(questions), answers.num_written, processes.index == 0)
        report.add(answers.collect())
        with prefix_caching():  # few-shot examples are the same in every batch
            has_stopped = _answer_all(args, left, answers, processes, report)
        if not has_stopped:
            processes.wait()
            report.add(answers.finish())
        report.close()
    if not has_stopped:  # else the launcher ends the other processes when this one has ended
        processes.leave()
    return 1 if has_stopped else 0


def _answer_all(
    args: argparse.Namespace, left: list[Question], answers: Answers, processes: Processes, report: _Report
) -> bool:
    """Answer this process's share of the questions; whether it has stopped at an error."""
    from ..call.answering import BATCHES_A_CALL

    share = max(1, math.ceil(len(left) / args.batch_size / processes.count))  # of a process, in batches
    size = args.batch_size * math.ceil(share / math.ceil(share / BATCHES_A_CALL))
    batches = [left[start : start + size] for start in range(0, len(left), size)]
    job = _Job(args, answers, report)
    return any(job.answer(batch) for batch in batches[processes.index :: processes.count])


class _Job:
    """Answers questions and writes what comes of them."""

    def __init__(self, args: argparse.Namespace, answers: Answers, report: _Report) -> None:
        self._args, self._answers, self._report = args, answers, report
        self._ask: Callable[..., bool] | None = None

    def answer(self, batch: list[Question]) -> bool:
        """Answer some questions; whether the job has stopped at one that failed."""
        for question in batch:
            if question.error is not None:
                record = {"line": question.line, "input": question.record, "text": "", "finish_reason": "error"}
                self._write({**record, "error": question.error})
        good = [question for question in batch if question.error is None]
        if not good:
            return False
        self._ask = self._ask or _load(self._args)
        return self._ask(good, self._write)

    def _write(self, record: dict[str, Any]) -> bool:
        """Write a record; whether the job stops there."""
        if "error" in record:
            return self._fails(record)
        self._report.add(self._answers.write(record))
        return False

    def _fails(self, record: dict[str, Any]) -> bool:
        """Write an error; whether the job stops there."""
        stops: bool = self._args.on_error == "stop"
        if stops:
            record["stopped"] = True  # the next run asks it again
        self._report.add(self._answers.write(record))
        problem = _problem(record["line"], self._args.questions, record["error"])
        advice = f" The answers before it are in {self._args.output}; started again, the run goes on."
        self._report.say(f"error: {problem}{advice}" if stops else f"warning: {problem}")
        return stops


def _load(args: argparse.Namespace) -> Callable[..., bool]:
    from .batches import Answerer
    from .members import load_members

    members = load_members(args.model, args.assistant, **member_loading(args))
    return Answerer(args, members).answer


def _check_lines(questions: list[Question], source: str) -> None:
    bad = [question for question in questions if question.error is not None]
    if bad:
        others = f" So have {len(bad) - 1} others." if len(bad) > 1 else ""
        problem = _problem(bad[0].line, source, str(bad[0].error))
        # Where no line makes a prompt, the lines are not what is wrong.
        advice = "Mend it, or pass --on-error skip."
        if len(bad) == len(questions) and bad[0].record is not None:
            advice = 'Pass --template, e.g. --template "Question: {question}\\nAnswer:".'
        raise ValueError(f"{problem}{others} {advice}")


def _problem(line: int, source: str, error: str) -> str:
    """A sentence; `generate()` ends its own errors with a period, a bad line's has none."""
    return f"line {line} of {source}: {error.removesuffix('.')}."


def _default_template(model: str | None) -> str:
    if model is not None:
        return "{prompt}"
    from ..demo.data import PROMPT  # the only form that the members of the demo know

    return PROMPT


def _settings(args: argparse.Namespace, template: Template) -> dict[str, Any]:
    """What the answers depend on, by flag. Not among it: what changes no answer, as the batch size."""
    names = ("model", "assistant", "dtype", "chat", "max_new_tokens", "stop", "rounds", "few_shot", "seed", *SAMPLING)
    settings = {name: getattr(args, name) for name in names} | {"template": template.text}
    settings |= {kind: (args.structured or {}).get(kind) for kind in STRUCTURED}
    return settings | given_settings(args)


class _Report:
    """Progress on standard error, and a last line. Silent but for `say` in every process but the main one."""

    def __init__(self, args: argparse.Namespace, total: int, written: int, is_main: bool) -> None:
        self._output, self._is_main, self._total, self._written = args.output, is_main, total, written
        self._progress = Progress(total, "answers", written, args.progress if is_main else False)
        self._errors = self._words = 0
        self._start = time.monotonic()

    def add(self, records: list[dict[str, Any]]) -> None:
        """Count records that came into the file."""
        self._errors += sum("error" in record for record in records)
        self._words += sum(record.get("words", 0) for record in records)
        self._progress.note(self._rate())
        self._progress.add(len(records))

    def say(self, message: str) -> None:
        """A line of its own."""
        self._progress.say(message)

    def close(self) -> None:
        """The last line."""
        self._progress.close()
        if self._is_main:
            new = self._progress.num_new
            errors = f" ({self._errors} with an error)" if self._errors else ""
            sys.stderr.write(
                f"hf-adafuse: {self._written + new} of {self._total} answers in {self._output}, "
                f"{new} new{errors}, {self._rate()}\n"
            )

    def _rate(self) -> str:
        return f"{self._words / max(time.monotonic() - self._start, 1e-9):.1f} words/s"
