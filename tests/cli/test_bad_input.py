"""What the commands are given that they cannot take: bytes that are no text, numbers that JSON has not, devices."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
from support.jobs import answers_to, questions, rewrite
from support.saved_members import PROMPT

from hf_adafuse.cli import main
from hf_adafuse.cli.questions import Template, read_questions

NOT_A_NUMBER = '{"question": "x", "score": NaN}'


def error_of(arguments, capsys) -> str:
    """The one line of a call that is refused."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("hf-adafuse: error: ")
    return line


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["demo", "--questions", "²"], "--questions"),
        (["run", "x", "--output", "y", "--batch-size", "²"], "--batch-size"),
        (["bench", "--threads", "²"], "--threads"),
        (["bench", "--batch", "1,²"], "--batch"),
    ],
)
def test_a_digit_that_is_no_number(arguments, flag, capsys):
    expected = f"argument {flag}: must be a whole number of at least 1, but is '²'"
    assert expected in error_of(arguments, capsys)


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # as Python reads in one locale or another
def test_a_prompt_that_is_not_utf8(errors, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a \xff"), encoding="utf-8", errors=errors))
    assert "The prompt must be text in " in error_of(["generate"], capsys)


def test_arguments_that_are_not_utf8(capsys):
    argument = os.fsdecode(b"a \xff")
    assert "The prompt must be text in UTF-8" in error_of(["generate", argument], capsys)
    assert "argument --stop: must be text in UTF-8" in error_of(["generate", PROMPT, "--stop", argument], capsys)


def test_questions_that_are_not_utf8(job, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    line = error_of(["run", "-", "--output", str(job.output)], capsys)
    assert "line 1 of -: must be a JSON object, but is not JSON in UTF-8 (" in line


@pytest.mark.parametrize("number", ["NaN", "Infinity", "[-Infinity]", "1e999"])
def test_numbers_that_an_answer_could_not_hold(number, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(f'{{"question": "x", "score": {number}}}\n', encoding="utf-8")
    (question,) = read_questions(str(path), Template("{question}"))
    expected = f"must be a JSON object, but is not JSON in UTF-8 ({number.strip('[]')} is not a finite number)"
    assert question.error == expected


def test_answers_are_valid_json(job):
    rewrite(job, lambda asked: [{"question": questions()[0], "score": 0.5}, NOT_A_NUMBER])
    assert job("--on-error", "skip") == 0
    lines = job.output.read_text(encoding="utf-8").splitlines()
    fine, bad = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert fine["input"]["score"] == 0.5
    assert [fine["text"]] == answers_to(questions()[:1])
    assert "NaN is not a finite number" in bad["error"]


def test_a_dataset_with_a_number_that_json_has_not(tmp_path, monkeypatch):
    rows = [{"question": "a", "score": 0.5}, {"question": "b", "score": float("nan")}]
    monkeypatch.setattr("datasets.load_dataset", lambda *_, split: rows)
    fine, bad = read_questions("some/quiz", Template("{question}"), "test")
    assert (fine.record, fine.error) == (rows[0], None)
    assert "NaN is not a finite number" in bad.error


def special_file(kind: str, folder: Path) -> str:
    if kind == "a device":
        return os.devnull
    if kind == "a pipe or a socket":
        os.mkfifo(folder / "pipe")
        return str(folder / "pipe")
    return str(folder)


@pytest.mark.parametrize("kind", ["a device", "a folder", "a pipe or a socket"])
def test_an_output_that_is_no_regular_file(kind, job, tmp_path, capsys):
    path = special_file(kind, tmp_path)
    line = error_of(["run", str(job.input), "--output", path], capsys)
    assert f"`--output` must be a regular file, but {path!r} is {kind}. Choose another name." in line
    assert not Path(f"{path}.settings.json").exists()


def test_a_problem_is_one_sentence(job, capsys, short_contexts):
    """Of `generate()`, whose errors end with a period, as of a line, whose errors do not."""
    rewrite(job, lambda asked: [{"question": "why " * 3000}, "{"])
    assert job("--on-error", "skip") == 0
    long, bad, _ = capsys.readouterr().err.splitlines()
    for line in (long, bad):
        assert line.endswith(".")
        assert not line.endswith("..")
