"""Saved members, and a batch job in a folder of its own."""

from __future__ import annotations

import copy

import pytest
from support.jobs import PAIR, SETTINGS, questions, write_lines
from support.saved_members import byte_level_tokenizer, metaspace_tokenizer, save_member

from hf_adafuse.cli import main, members


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
