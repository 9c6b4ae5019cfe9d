"""The command `hf-adafuse score`: writes the log-likelihoods of the answers in a file into another file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..members.templates import is_unicode
from .answers import check_output
from .few_shot import add_examples, add_prompt_arguments
from .file_jobs import Ask, FileJob, check_lines, recording
from .job_settings import add_job_arguments
from .member_flags import add_member_arguments, member_loading, member_settings
from .questions import Question, Template, read_questions
from .run import default_template

_DESCRIPTION = """\
Score given answers under every member: one JSON object per line in, one per line out, in the same order, written as
they come. Killed and started again, it goes on where it stopped."""

_EXAMPLES = """\
examples:
  hf-adafuse score answers.jsonl --output scores.jsonl --model A --assistant B
  hf-adafuse score answers.jsonl --output scores.jsonl --model A --assistant B --template "{question}" --chat --ends

a line of the input, and of the output:
  {"prompt": "Question: What is the capital of Peru?\\nAnswer:", "answers": [" Lima", " Cusco"]}
  {"line": 1, "input": ..., "prompt": ..., "scores": [{"answer": " Lima", "log_likelihoods": [-0.1, -2.3],
   "tokens": [1, 2], "bytes": 5, "confidence": 0.503}, ...]}
An answer begins with the space that parts it from the prompt. Per member: the log-likelihood in nats, and how many of
its own tokens the answer has. `confidence` is the product over the n words of the members' mean probability, to the
power of 1 / root of n. `lossy` names the members, by number, whose tokenizer cannot represent an answer: they score
what it gives instead."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Put the arguments of the command on a parser."""
    parser.description = _DESCRIPTION
    parser.epilog = _EXAMPLES
    parser.add_argument("questions", metavar="FILE", help="a JSONL file, - for standard input")
    parser.add_argument("--output", required=True, metavar="FILE", help="the scores, in JSONL")
    parser.add_argument(
        "--template", help="the prompt, with fields as {name} (default: {prompt}; with the demo pair its question form)"
    )
    parser.add_argument(
        "--answers",
        default="answers",
        metavar="NAME",
        help="the field with a text or a list (default: answers)",
    )
    add_prompt_arguments(parser)
    parser.add_argument("--ends", action="store_true", help="also score that the text ends after each answer")
    parser.add_argument(
        "--words", action="store_true", default=None, help="also write each word's confidence and each token's score"
    )
    parser.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="at a bad line or one that fails: stop (default), or write a record with an error and go on",
    )
    add_job_arguments(parser, kept="scores")
    add_member_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code."""
    check_output(Path(args.output), args.questions, args.few_shot)
    template = Template(args.template or default_template(args.model))
    found = [_with_answers(one, args) for one in read_questions(args.questions, template)]
    questions, _ = add_examples(found, args.few_shot, template)
    if args.on_error == "stop":
        check_lines(questions, args.questions)

    from .batches import Processes

    processes = Processes.find()
    names = ("chat", "ends", "words", "few_shot", "answers")
    settings = member_settings(args) | {name: getattr(args, name) for name in names} | {"template": template.text}
    job = FileJob(
        source=args.questions,
        path=Path(args.output),
        questions=questions,
        settings=settings,
        load=lambda: _load(args),
        failed={},
        batch_size=args.batch_size,
        is_same=lambda record, question: _texts(record["input"], args.answers) == _texts(question.record, args.answers),
        stops=args.on_error == "stop",
        overwrite=args.overwrite,
        progress=args.progress,
        kept="scores",
        unit="answers",
        size_of=lambda record: len(record.get("scores", ())),
    )
    has_stopped = job.run(processes)
    if not has_stopped:
        processes.leave()
    return 1 if has_stopped else 0


def _load(args: argparse.Namespace) -> Ask:
    """Load the members. Returns the function that has them score answers."""
    from ..ensemble import AdaFuseEnsemble
    from .members import load_members

    ensemble = AdaFuseEnsemble(load_members(args.model, args.assistant, **member_loading(args)))
    if args.chat:
        ensemble.encode(["?"], chat=True)  # a missing template is found before the first prompt

    def score(questions: Sequence[Question], tell: Callable[[int, Any], None]) -> None:
        ensemble.score(
            [question.prompt for question in questions],
            [_texts(question.record, args.answers) for question in questions],
            chat=args.chat,
            ends=args.ends,
            max_batch_size=args.batch_size,
            on_scores=tell,
        )

    return recording(score, lambda scores: {"scores": [_shown(score, args.words) for score in scores]})


def _shown(score: Any, with_words: bool | None) -> dict[str, Any]:
    """A score as plain JSON values, to four digits. Further digits depend on which prompts shared a pass."""
    shown: dict[str, Any] = {
        "answer": score.text,
        "log_likelihoods": [_rounded(value) for value in score.log_likelihoods],
        "tokens": score.num_tokens,
        "bytes": score.num_bytes,
        "confidence": _rounded(score.confidence),
    }
    if score.lossy:
        shown["lossy"] = score.lossy
    if with_words:
        shown["words"] = score.words
        shown["confidences"] = [_rounded(value) for value in score.confidences]
        shown["log_probs"] = [[_rounded(value) for value in of_member] for of_member in score.log_probs]
    return shown


def _rounded(value: float | None) -> float | None:
    """A number to four digits; `None` for an infinite one, which JSON does not have."""
    return None if value is None or value in (float("inf"), float("-inf")) else round(value, 4)


def _texts(record: dict[str, Any] | None, field: str) -> list[Any]:
    given = (record or {}).get(field)
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _with_answers(question: Question, args: argparse.Namespace) -> Question:
    """The question. It gets an error where it has no answers that can be scored."""
    texts = _texts(question.record, args.answers)
    if question.error is None and not (texts and all(_can_be_scored(text, args.ends) for text in texts)):
        problem = f"must have a text or a list of texts in the field {args.answers!r}"
        shown = (question.record or {}).get(args.answers)
        return replace(question, error=f"{problem}{'' if args.ends else ', none empty'}, but has {shown!r}")
    return question


def _can_be_scored(text: Any, ends: bool) -> bool:
    return isinstance(text, str) and is_unicode(text) and bool(text or ends)
