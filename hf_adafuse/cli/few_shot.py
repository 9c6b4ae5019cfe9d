"""Puts worked examples in front of every question of a job."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .questions import Question, Template, answers_of, read_questions


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for what goes around a question: which worked examples, and whether it is a message of a chat."""
    parser.add_argument(
        "--few-shot",
        metavar="K",
        help="worked examples in each prompt: the first K questions, which are not asked, or those in a file",
    )
    parser.add_argument(
        "--chat", action="store_true", help="send the prompt as a user's message, in each member's chat template"
    )


def add_examples(
    questions: Sequence[Question], few_shot: str | None, template: Template
) -> tuple[list[Question], list[str] | None]:
    """
    Put worked examples in front of questions. An example is a prompt with its first accepted answer; a blank line
    follows it.

    Args:
        questions (`list[Question]`): all questions of the input.
        few_shot (`str`, *optional*): a number K, or a file of questions with answers. The first K questions are the
            examples, and are not asked.
        template (`Template`): makes prompts of the questions in that file.

    Returns:
        `tuple[list[Question], list[str] | None]`: the questions to ask, and the stop texts of [`default_stops`]; `None`
        without examples.

    Raises:
        ValueError: there are fewer questions, there is no such file, or an example has no answer.
    """
    examples, asked, source = worked_examples(questions, few_shot, template)
    return put_behind(examples, asked, source), default_stops(examples) if examples else None


def worked_examples(
    questions: Sequence[Question], few_shot: str | None, template: Template
) -> tuple[Sequence[Question], Sequence[Question], str]:
    """The examples, the questions to ask, and the name of the examples' source in errors. Takes and raises what
    [`add_examples`] does."""
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
    """The questions to ask, with the examples in front of each prompt. Takes what [`worked_examples`] returns."""
    shown = "".join(f"{_example(example, source)}\n\n" for example in examples)
    return [one if one.prompt is None else replace(one, prompt=shown + one.prompt) for one in asked]


def first_answers(questions: Sequence[Question]) -> list[str]:
    """The first accepted answer of each question that has one."""
    found = [(question.record or {}).get("answer") for question in questions]
    return [answers_of(answer)[0] for answer in found if answer not in (None, [])]


def default_stops(examples: Sequence[Question]) -> list[str]:
    """The stop texts of an answer that follows worked examples: the end of a line, or an empty line where an example's
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
