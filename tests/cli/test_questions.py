"""What a batch job reads: files, datasets and templates; and the errors in them that are the user's."""

from __future__ import annotations

import json
import os
import sys
import time
import types

import pytest
from support.jobs import answers_to, lines_of, questions, write_lines

from hf_adafuse.cli.few_shot import put_behind
from hf_adafuse.cli.questions import Question, Template, read_questions


@pytest.mark.parametrize(
    ("template", "record", "prompt"),
    [
        ("{a}", {"a": "x"}, "x"),
        ("{{{a}}}\\n\\t\\\\n{b}", {"a": "{b}\\n", "b": 3}, "{{b}\\n}\n\t\\n3"),
        ("{a}{b}", {"a": "", "b": ["é", True, None]}, '["é", true, null]'),
        ("{a}", {"a": " \ttext "}, " \ttext "),
    ],
)
def test_templates(template, record, prompt):
    assert Template(template).fill(record) == prompt


@pytest.mark.parametrize("template", ["", "no field", "{}", "{0}", "{a", "a}", "{a.b}", "{a[0]}", "{a!r}", "{a:>3}"])
def test_templates_that_are_refused(template):
    with pytest.raises(ValueError, match=r"`--template` must (be text with fields|have a field) as \{name\}"):
        Template(template)


BAD = {
    "{": "must be a JSON object, but is not JSON in UTF-8",
    "[1]": "must be a JSON object, but is of type list",
    '"text"': "must be a JSON object, but is of type str",
    '{"answer": 1, "id": 2}': "must have the field 'question', but its fields are: answer, id",
    '{"question": null}': "must have a value in the field 'question', but it is null",
    '{"question": " \\n"}': "must make a prompt, but the template's fields are empty",
    '{"question": "\\ud800"}': "must be valid Unicode text",
    "[" * 100_000: "must be a JSON object, but is not JSON",
}


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:20])
def test_bad_lines_are_found(line, tmp_path):
    path = tmp_path / "in.jsonl"
    write_lines(path, [{"question": "a"}, line, {"question": "b"}])
    first, bad, last = read_questions(str(path), Template("{question}"))
    assert (first.prompt, last.prompt, last.line) == ("a", "b", 3)
    assert (bad.line, bad.prompt) == (2, None)
    assert bad.error.startswith(BAD[line])


def test_a_line_that_is_not_utf8(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b'{"question": "a"}\n{"question": "\xff"}\n')
    assert "not JSON in UTF-8" in read_questions(str(tmp_path / "in.jsonl"), Template("{question}"))[1].error


def test_a_dataset(job, monkeypatch):
    asked = []

    def load_dataset(name, subset, split):
        asked.append((name, subset, split))
        return [{"question": question, "seen": time.struct_time} for question in questions()[:2]]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert job("--split", "test", "--subset", "easy", source="some/quiz") == 0
    assert asked == [("some/quiz", "easy", "test")]
    assert [record["text"] for record in lines_of(job.output)] == answers_to(questions()[:2])


def test_a_real_dataset(job, tmp_path, monkeypatch):
    """A folder of files is a dataset, too, and needs no Hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "quiz"
    folder.mkdir()
    write_lines(folder / "train.jsonl", [json.dumps({"question": question}) for question in questions()[:2]])
    assert job("--split", "train", source=str(folder)) == 0
    assert [record["text"] for record in lines_of(job.output)] == answers_to(questions()[:2])


@pytest.mark.parametrize(
    ("source", "more", "message"),
    [
        ("some/quiz", [], "'some/quiz' is no file"),
        ("missing.jsonl", ["--split", "test"], "'missing.jsonl' is no file"),
        ("some/quiz", ["--split", "test"], 'pip install "hf_adafuse[datasets]"'),
        (".", [], "`--split` must be given with a dataset"),
        (None, ["--split", "test"], "`--split` and `--subset` must be left out with a file"),
        (None, ["--template", "none"], "`--template` must have a field"),
        (None, ["--batch-size", "0"], "must be a whole number of at least 1, but is '0'"),
        (None, ["--threshold", "-1"], "`margin_threshold` must be"),
        (None, ["--assistant", "x"], "`--model` must be given with `--assistant`"),
        (None, ["--chat"], "`tokenizers[0]` must have a chat template"),
        (None, ["--weights", "1,2,3"], "`model_weights` must be one per member"),
        (os.devnull, [], "no file"),
    ],
)
def test_errors_of_the_user(source, more, message, job, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # not installed
    assert job(*more, source=source) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hf-adafuse: error: ")
    assert message in line
    assert not job.output.exists() or not job.output.read_bytes()


def test_an_empty_input(job, capsys):
    write_lines(job.input, ["", " "])
    assert job() == 2
    assert "The questions must not be empty" in capsys.readouterr().err


@pytest.mark.parametrize("answer", ["", " \n", {}, {"value": "Paris"}, [], [""], [None], None], ids=str)
def test_an_example_needs_a_text_or_a_number_as_answer(answer):
    example = Question(3, {"question": "a?", "answer": answer}, "Q: a?\nA:")
    with pytest.raises(ValueError, match=r"line 3 of the data: must have a text or a number as 'answer', but has "):
        put_behind([example], [], "the data")


@pytest.mark.parametrize(
    ("answer", "shown"), [("Paris", "Paris"), ([" Paris", "Lyon"], "Paris"), (0, "0"), (2.5, "2.5")]
)
def test_an_example_is_written_with_its_first_answer(answer, shown):
    example = Question(3, {"question": "a?", "answer": answer}, "Q: a?\nA:")
    (asked,) = put_behind([example], [Question(4, {}, "Q: b?\nA:")], "the data")
    assert asked.prompt == f"Q: a?\nA: {shown}\n\nQ: b?\nA:"
