"""Batch jobs for tests: questions, the answers that `generate()` gives, and files of JSON lines."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from pathlib import Path

import pytest

from hf_adafuse import demo, enable_adafuse
from hf_adafuse.cli.answers import AnswersFile
from hf_adafuse.cli.questions import Question
from hf_adafuse.demo.data import PROMPT

NEW = 10
SETTINGS = ["--max-new-tokens", str(NEW)]
PAIR = functools.cache(demo.load_pair)


@functools.cache
def questions() -> list[str]:
    head, tail = PROMPT.split("{question}")
    return [q.prompt.removeprefix(head).removesuffix(tail) for q in demo.test_questions(14)]


@functools.cache
def direct(prompt: str):
    """The rounds that `generate()` gives for the prompt alone."""
    (model, tokenizer), (other, other_tokenizer) = PAIR()
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = enable_adafuse(copy.copy(model)).generate(
        **inputs,
        tokenizer=tokenizer,
        assistant_models=[other],
        assistant_tokenizers=[other_tokenizer],
        max_new_tokens=NEW,
        return_dict_in_generate=True,
    )
    return output.rounds[0]


def answers_to(asked: list[str]) -> list[str]:
    return ["".join(r.text for r in direct(PROMPT.format(question=question))) for question in asked]


def lines_of(path: Path) -> list[dict]:
    content = path.read_bytes()
    assert content.endswith(b"\n") or not content
    return [json.loads(line) for line in content.splitlines()]


def write_lines(path: Path, records) -> None:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")


def rewrite(job, change) -> None:
    """Put other records into the input."""
    write_lines(job.input, change([json.loads(line) for line in job.input.read_text(encoding="utf-8").splitlines()]))


def left_over(job) -> set[str]:
    return {path.name for path in job.output.parent.iterdir()} - {job.input.name, job.output.name}


def record_of(question: Question) -> dict:
    return {"line": question.line, "prompt": question.prompt, "text": f"answer {question.line}"}


def read_json(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


@contextlib.contextmanager
def killed_after(left):
    """A job is interrupted once it has written so many records."""
    write = AnswersFile.write

    def killed(self, record):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return write(self, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AnswersFile, "write", killed)
        yield
