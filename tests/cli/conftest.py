"""Saved members, and a batch job in a folder of its own."""

from __future__ import annotations

import copy

import pytest
from jobs import PAIR, SETTINGS, TUNE_NEW, TUNE_RULES, questions, write_lines
from saved_members import byte_level_tokenizer, metaspace_tokenizer, save_member

from hf_adafuse import demo
from hf_adafuse.cli import main, members
from hf_adafuse.evaluation import candidates


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A byte-level member and a SentencePiece-like one."""
    root = tmp_path_factory.mktemp("members")
    return [save_member(root / "byte", byte_level_tokenizer(), 1), save_member(root / "meta", metaspace_tokenizer(), 3)]


@pytest.fixture(params=[False, True], ids=["byte-level first", "metaspace first"])
def pair(request, folders):
    return folders[::-1] if request.param else folders


@pytest.fixture
def loaded_once(monkeypatch):
    monkeypatch.setattr(members, "default_pair", lambda: [(copy.copy(model), tok) for model, tok in PAIR()])


@pytest.fixture
def job(tmp_path, loaded_once):
    """Runs the command on `questions.jsonl`; gives the exit code."""
    asked = [{"id": f"q{index}", "question": question} for index, question in enumerate(questions())]
    write_lines(tmp_path / "questions.jsonl", asked)

    def run(*more, source=None):
        source = source or str(tmp_path / "questions.jsonl")
        return main(["run", source, "--output", str(tmp_path / "answers.jsonl"), *SETTINGS, *more])

    run.input, run.output = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    return run


@pytest.fixture
def tune(tmp_path, loaded_once, monkeypatch, capsys):
    """Runs the command on the demo's questions: the exit code, and what it printed on both streams."""
    monkeypatch.setattr(candidates, "RULES", TUNE_RULES)
    asked = [{"question": text, "answer": [q.answer, "?"]} for text, q in zip(questions(), demo.test_questions(14))]
    write_lines(tmp_path / "dev.jsonl", asked)

    def run(*flags, data="dev.jsonl", output="tuned"):
        arguments = [
            "--data",
            str(tmp_path / data),
            "--output",
            str(tmp_path / output),
            "--max-new-tokens",
            str(TUNE_NEW),
        ]
        code = main(["tune", *arguments, *flags])
        out, err = capsys.readouterr()
        return code, out, err

    run.folder, run.asked, run.output = tmp_path, asked, tmp_path / "tuned"
    return run
