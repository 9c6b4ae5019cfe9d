"""The flags of `hf-adafuse fit`, `headroom` and `confidence`, and the questions that they ask."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ...cli.few_shot import add_prompt_arguments, default_stops, first_answers, put_behind, worked_examples
from ...cli.file_jobs import check_lines
from ...cli.flag_types import count
from ...cli.job_settings import add_job_arguments
from ...cli.member_flags import add_member_arguments
from ...cli.questions import Question, Template, read_questions
from ...cli.text_flags import add_stop_argument

TEMPLATE = "Question: {question}\\nAnswer:"
# The metrics that say right or wrong.
BINARY = ("exact_match", "contains", "last_number", "marked_number")


def add_asking_arguments(parser: argparse.ArgumentParser, description: str, details: str) -> None:
    """Put on a parser what commands that ask members have in common: the flags are the same, so that one goes on from
    another's answers."""
    parser.description = description
    parser.epilog = details
    parser.add_argument("--data", required=True, metavar="FILE", help="questions in JSONL")
    parser.add_argument(
        "--out", "--output", dest="output", default="adafuse.json", metavar="FILE",
        help="what `fit` writes; answers are kept in the folder FILE.answers (default: adafuse.json)",
    )  # fmt: skip
    parser.add_argument(
        "--metric", choices=BINARY, default="exact_match",
        help="what is right, and which answers are the same, where a line of the data has no `metric` of its own",
    )  # fmt: skip
    parser.add_argument(
        "--template", metavar="TEXT",
        help=f"the prompt, with fields as {{name}} (default: {TEMPLATE}; {{question}} in chats)",
    )  # fmt: skip
    add_prompt_arguments(parser)
    parser.add_argument(
        "--with-ratings", action="store_true", help="the members also rate each other's answers (method peer-review)"
    )
    add_stop_argument(parser, "the end of a line; with examples of several lines, an empty line; in chats none")
    parser.add_argument(
        "--max-new-tokens", type=count, default=64, metavar="N", help="the most tokens of an answer (default: 64)"
    )
    add_job_arguments(parser, "questions")
    add_member_arguments(parser)


def read_asked(args: argparse.Namespace, with_answers: bool) -> tuple[list[Question], Template]:
    """
    Read the questions to ask, and put the worked examples in front of them. `args.stop` gets its default.

    Args:
        args (`Namespace`): the arguments of the command.
        with_answers (`bool`): whether every question must have an answer.

    Returns:
        `tuple[list[Question], Template]`: the questions, and the template of their prompts.

    Raises:
        ValueError: a line makes no prompt or lacks its answer, or there are fewer than two members.
    """
    if args.model is not None and not args.assistant:
        raise ValueError("`--assistant` must be given, but is not: there is nothing to choose. Name another member.")
    template = Template(args.template or ("{question}" if args.chat else TEMPLATE))
    found = read_questions(args.data, template)
    _check_answers(found, args.data)
    if args.stop is None and not args.chat:
        args.stop = default_stops(found)
    examples, others, source = worked_examples(found, args.few_shot, template)
    shown = {example.prompt for example in examples} - {None}
    asked = put_behind(examples, [question for question in others if question.prompt not in shown], source)
    _tell(len(others) - len(asked), "are among the worked examples")
    different = [question for question in asked if question.prompt is None or not question.repeat]
    _tell(len(asked) - len(different), "have the prompt of an earlier one, which counts once")
    asked = different
    check_lines(asked, args.data, "Mend it.")
    for question in asked:
        metric = (question.record or {}).get("metric", args.metric)
        if metric not in BINARY:
            raise ValueError(
                f"line {question.line} of {args.data}: `metric` must be one of {list(BINARY)}, but is {metric!r}. Mend "
                "it, or leave it out."
            )
    unlabelled = [question for question in asked if not first_answers([question])]
    if with_answers and unlabelled:
        raise ValueError(
            f"line {unlabelled[0].line} of {args.data}: must have the field 'answer', but has none. Mend it; "
            "`hf-adafuse headroom` needs none."
        )
    return asked, template


def _check_answers(questions: Sequence[Question], source: str) -> None:
    """Raises `ValueError` where a question has an answer that is none."""
    for question in questions:
        try:
            first_answers([question])
        except ValueError as error:
            raise ValueError(f"line {question.line} of {source}: {error}") from None


def _tell(number: int, what: str) -> None:
    if number:
        sys.stderr.write(f"hf-adafuse: {number} questions {what}: not asked\n")
