"""Reads the questions of a batch job, from lines of JSON or the rows of a dataset, and makes a prompt of each."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from ..members.templates import PromptTemplate
from .flag_types import unescaped


@dataclass(frozen=True)
class Question:
    """
    One line of the input.

    Attributes:
        line (`int`): its number, from 1.
        record (`dict`, *optional*): the line's JSON object; `None` where the line is none.
        prompt (`str`, *optional*): the template, filled with the record; `None` where it cannot be filled.
        error (`str`, *optional*): why there is no prompt.
        repeat (`int`): how many earlier lines have the same prompt.
    """

    line: int
    record: dict[str, Any] | None
    prompt: str | None
    error: str | None = None
    repeat: int = 0


def answers_of(value: Any) -> list[str]:
    """
    The accepted answers of a question, which gives one answer or a list of them. `72.0` is the answer 72: tables write
    whole numbers so where some are missing.

    Raises:
        ValueError: an answer is neither a text nor a number.
    """
    return [_answer(one) for one in value] if isinstance(value, (list, tuple)) else [_answer(value)]


def _answer(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, (str, int, float)) or value != value:
        raise ValueError(f"An answer must be a text or a number, but is {value!r}. Write it as a text.")
    return str(value)


class Template(PromptTemplate):
    """
    A template from the command line. In it a newline, a tab and a backslash may be written as `\\n`, `\\t` and `\\\\`,
    as a shell passes them on.

    Raises:
        ValueError: the template has no field, or a field that is not just a name.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text, "--template", unescaped)


def read_questions(
    source: str, template: Template, split: str | None = None, subset: str | None = None
) -> list[Question]:
    """
    All questions of the input, the bad ones too, in order.

    Args:
        source (`str`): a JSONL file, `-` for standard input, or the name or folder of a dataset.
        template (`Template`): makes a prompt of a record.
        split, subset (`str`, *optional*): the split and the subset of the dataset.

    Raises:
        ValueError: the input is neither a file nor a dataset with its split, or is empty.
        ImportError: the input is a dataset, but `datasets` is not installed.
    """
    path = Path(source)
    if source == "-" or path.is_file():
        if split or subset:
            raise ValueError(
                f"`--split` and `--subset` must be left out with a file, but are given for {source!r}. Drop them."
            )
        with nullcontext(sys.stdin.buffer) if source == "-" else path.open("rb") as lines:
            questions = list(_of_lines(lines, template))
    elif path.suffix in (".jsonl", ".json") or (not split and not path.is_dir()):
        raise ValueError(
            f"The questions must be a JSONL file, `-` or, for `run`, a dataset with its `--split`, but {source!r} is "
            "no file. Check the name."
        )
    else:
        questions = list(_of_lines(_rows(source, split, subset), template))
    if not questions:
        raise ValueError(f"The questions must not be empty, but {source!r} is. Write one JSON object per line.")
    return list(_with_repeats(questions))


def _with_repeats(questions: Iterable[Question]) -> Iterator[Question]:
    seen: Counter[str | None] = Counter()
    for question in questions:
        yield replace(question, repeat=seen[question.prompt])
        seen[question.prompt] += 1


def _of_lines(lines: Iterable[bytes], template: Template) -> Iterator[Question]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            record = json.loads(text, parse_float=_number, parse_constant=_number)
        except (ValueError, RecursionError) as error:
            yield Question(number, None, None, f"must be a JSON object, but is not JSON in UTF-8 ({error})")
            continue
        yield _question(number, record, template)


def _question(number: int, record: Any, template: Template) -> Question:
    if not isinstance(record, dict):
        return Question(number, None, None, f"must be a JSON object, but is of type {type(record).__name__}")
    try:
        return Question(number, record, template.fill(record))
    except ValueError as error:
        return Question(number, record, None, str(error))


def _number(text: str) -> float:
    """A number of the input. Python reads NaN and 1e999, but could not write either as JSON again."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _rows(name: str, split: str | None, subset: str | None) -> Iterator[bytes]:
    """The rows of a dataset, as lines of JSON."""
    if not split:
        raise ValueError(
            f"`--split` must be given with a dataset, which `run` alone reads, but is not for {name!r}. Name one, e.g. "
            "test, or give a JSONL file."
        )
    try:
        load_dataset = import_module("datasets").load_dataset
    except ImportError as error:
        raise ImportError(
            f"The package `datasets` must be installed to read {name!r}, but is not. "
            'pip install "hf_adafuse[datasets]", or give a JSONL file.'
        ) from error
    for row in load_dataset(name, subset, split=split):
        yield json.dumps(dict(row), default=str).encode()  # dates and images, which JSON does not know, become text
