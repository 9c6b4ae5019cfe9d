"""What goes around every question of a job: worked examples in front of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .questions import Question, Template, answers_of, read_questions


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """What goes around a question: how many examples, or which, and whether it is a message of a chat."""
    parser.add_argument(
        "--few-shot",
        metavar="K",
        help="worked examples in each prompt: the first K questions, which are not asked, or those in a file",
    )
    parser.add_argument("--chat", action="store_true", help="make it a user's message in each member's chat template")


def add_examples(
    questions: Sequence[Question], few_shot: str | None, template: Template
) -> tuple[list[Question], list[str] | None]:
    """
    The questions to ask, each behind the examples: their prompts and first accepted answers, with blank lines between;
    and the texts at which answers then end ([`default_stops`]), `None` without examples.

    Args:
        questions (`list[Question]`): all of the input.
        few_shot (`str`, *optional*): a number: the first so many questions are the examples, and are not asked; or a
            file of questions with answers.
        template (`Template`): of the questions in that file.

    Raises:
        ValueError: no such number or file, an example without an answer.
    """
    examples, asked, source = worked_examples(questions, few_shot, template)
    return put_behind(examples, asked, source), default_stops(examples) if examples else None


def worked_examples(
    questions: Sequence[Question], few_shot: str | None, template: Template
) -> tuple[Sequence[Question], Sequence[Question], str]:
    """The examples, the questions to ask, and where the examples are from; as of [`add_examples`]."""
    if few_shot is None:
        return [], questions, ""
    if few_shot.isdecimal():
        number = int(few_shot)
        if number >= len(questions):
            raise ValueError(
                f"`--few-shot` must be fewer than the {len(questions)} questions, but is {number}. Give a smaller "
                "number, or a file of examples."
            )
        return questions[:number], questions[number:], "the data"
    if Path(few_shot).is_file():
        return read_questions(few_shot, template), questions, few_shot
    raise ValueError(f"`--few-shot` must be a number or a JSONL file, but {few_shot!r} is neither. Check the name.")


def put_behind(examples: Sequence[Question], asked: Sequence[Question], source: str) -> list[Question]:
    """The questions to ask behind the examples; as of [`worked_examples`]."""
    shown = "".join(f"{_example(example, source)}\n\n" for example in examples)
    return [one if one.prompt is None else replace(one, prompt=shown + one.prompt) for one in asked]


def first_answers(questions: Sequence[Question]) -> list[str]:
    """The first accepted answer of each question that has one."""
    found = [(question.record or {}).get("answer") for question in questions]
    return [answers_of(answer)[0] for answer in found if answer not in (None, [])]


def default_stops(examples: Sequence[Question]) -> list[str]:
    """Where an answer ends that follows worked examples: at the end of a line; at an empty line where an example's
    answer has several lines."""
    has_lines = any("\n" in answer.strip() for answer in first_answers(examples))
    return ["\n\n" if has_lines else "\n"]


def _example(example: Question, source: str) -> str:
    given = (example.record or {}).get("answer")
    first = given[0] if isinstance(given, list) and given else given
    answer = str(first).strip() if isinstance(first, (str, int, float)) else ""
    if example.prompt is None or not answer:
        shown = "none" if given is None else json.dumps(given)
        problem = example.error or f"must have a text or a number as 'answer', but has {shown}"
        raise ValueError(f"line {example.line} of {source}: {problem}. Mend it: it is an example of `--few-shot`.")
    space = "" if example.prompt[-1:].isspace() else " "
    return f"{example.prompt}{space}{answer}"
