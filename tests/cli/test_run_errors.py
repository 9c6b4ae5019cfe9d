"""Errors on the way of a batch job: they stop it or are skipped, and the next run asks again."""

from __future__ import annotations

import pytest
from support.jobs import answers_to, lines_of, questions, rewrite

from hf_adafuse import AdaFuseDecodingError, AdaFuseEnsemble
from hf_adafuse.cli import main, members
from hf_adafuse.cli.batches import Answerer


def test_a_bad_line_stops_before_anything_is_loaded(job, capsys, monkeypatch):
    monkeypatch.setattr(members, "load_members", None)
    rewrite(job, lambda asked: [asked[0], "{", asked[1], {"id": 3}])
    assert job() == 2
    err = capsys.readouterr().err
    assert f"line 2 of {job.input}: must be a JSON object" in err
    assert "So have 1 others." in err
    assert not job.output.exists()


def test_bad_lines_are_skipped_when_asked(job, capsys):
    rewrite(job, lambda asked: [asked[0], "{", asked[1], {"id": 3}, asked[2]])
    assert job("--on-error", "skip", "--batch-size", "2") == 0
    records = lines_of(job.output)
    assert [record["line"] for record in records] == [1, 2, 3, 4, 5]
    assert [r["text"] for r in records if "error" not in r] == answers_to(questions()[:3])
    assert [r["input"] for r in records if "error" in r] == [None, {"id": 3}]
    err = capsys.readouterr().err
    assert f"hf-adafuse: warning: line 2 of {job.input}: must be a JSON object" in err
    assert f"hf-adafuse: warning: line 4 of {job.input}: must have the field 'question'" in err
    assert "5 new (2 with an error)" in err
    whole = job.output.read_bytes()
    assert job("--on-error", "skip") == 0
    assert job.output.read_bytes() == whole


def test_a_prompt_that_is_too_long_takes_no_other_with_it(job, capsys, short_contexts):
    rewrite(job, lambda asked: [asked[0], {"question": "why " * 3000}, asked[1]])
    assert job("--on-error", "skip") == 0
    first, long, last = lines_of(job.output)
    assert [first["text"], last["text"]] == answers_to(questions()[:2])
    assert "must be at most" in long["error"]
    assert long["text"] == ""
    assert "warning: line 2 of" in capsys.readouterr().err


@pytest.fixture
def failing(monkeypatch):
    """The fourth question fails in its third round, in a batch and alone."""
    generate = Answerer._generate

    def fail(self, asked, tell):
        if any(questions()[3] in question.prompt for question in asked):
            raise AdaFuseDecodingError("assistant 1", "out of memory", 3, [" half an"] * len(asked), [])
        return generate(self, asked, tell)

    with monkeypatch.context() as patch:
        patch.setattr(Answerer, "_generate", fail)
        yield patch


def test_a_failure_stops_and_the_next_run_asks_again(job, failing, capsys):
    assert job() == 1
    records = lines_of(job.output)
    assert [record["text"] for record in records] == [*answers_to(questions()[:3]), " half an"]
    assert records[3]["error"] == "assistant 1 failed in round 3: out of memory"
    err = capsys.readouterr().err
    assert f"hf-adafuse: error: line 4 of {job.input}: assistant 1 failed in round 3: out of memory. The answers" in err
    assert job() == 1  # still failing: nothing is doubled
    assert [record["line"] for record in lines_of(job.output)] == [1, 2, 3, 4]
    failing.undo()
    assert job() == 0
    records = lines_of(job.output)
    assert [record["text"] for record in records] == answers_to(questions())
    assert not any("error" in record or "stopped" in record for record in records)


def test_answers_that_are_there_are_not_asked_for_again(job, monkeypatch, capsys):
    """Of a call that fails late: what has been written stays, and the failure is named where it is."""
    generate, asked = Answerer._generate, []

    def fail(self, questions_, tell):
        asked.append([question.line for question in questions_])
        failing = [row for row, question in enumerate(questions_) if questions()[6] in question.prompt]
        if begun := questions_[: failing[0]] if failing else questions_:
            generate(self, begun, tell)
        if failing:
            raise AdaFuseDecodingError("assistant 1", "out of memory", 3, [" half an"] * len(questions_), [])

    with monkeypatch.context() as patch:
        patch.setattr(Answerer, "_generate", fail)
        patch.setattr(AdaFuseEnsemble, "rounds", at_most_once(AdaFuseEnsemble.rounds))
        assert job("--batch-size", "2", "--on-error", "skip") == 0
    records = lines_of(job.output)
    assert [record["line"] for record in records if "error" in record] == [7]
    assert [record["text"] for record in records[:6] + records[7:]] == answers_to(questions()[:6] + questions()[7:])
    assert asked[0] == list(range(1, 15)) and all(min(lines) >= 7 for lines in asked[1:])
    assert capsys.readouterr().err.count("warning") == 1


def at_most_once(rounds):
    """Fails where a prompt is answered twice, or none is given."""
    seen = []

    def asked(self, prompts, **kwargs):
        assert prompts and not {*prompts} & {*seen}
        seen.extend(prompts)
        return rounds(self, prompts, **kwargs)

    return asked


def test_the_first_failure_stops(job, monkeypatch, capsys):
    """Not after all others have been asked."""
    calls = []

    def fail(self, questions_, tell):
        calls.append(len(questions_))
        raise AdaFuseDecodingError("assistant 1", "out of memory", 3, [], [])

    monkeypatch.setattr(Answerer, "_generate", fail)
    assert job() == 1
    assert calls == [14, 7, 4, 2, 1]
    assert "error: line 1 of" in capsys.readouterr().err


def test_an_answer_that_cannot_be_written_is_no_failure_of_a_question(job, monkeypatch, capsys):
    def refuse(self, record):
        raise ValueError("the disk is full")

    monkeypatch.setattr("hf_adafuse.cli.answers.AnswersFile.write", refuse)
    assert job("--on-error", "skip") == 2
    assert "error: the disk is full" in capsys.readouterr().err


def test_a_failure_is_skipped_when_asked(job, failing, capsys):
    assert job("--on-error", "skip", "--batch-size", "5") == 0
    records = lines_of(job.output)
    assert records[3]["text"] == " half an"
    assert records[3]["error"] == "assistant 1 failed in round 3: out of memory"
    del records[3]
    assert [record["text"] for record in records] == answers_to(questions()[:3] + questions()[4:])
    assert f"warning: line 4 of {job.input}: assistant 1" in capsys.readouterr().err


def test_where_no_line_makes_a_prompt_the_template_is_missing(job, capsys):
    rewrite(job, lambda asked: [{"text": "a"}, {"text": "b"}])
    assert job() == 2
    err = capsys.readouterr().err
    assert "must have the field 'question'" in err and "Pass --template" in err and "--on-error" not in err


def test_the_answers_must_go_to_a_file(job, capsys, monkeypatch):
    monkeypatch.chdir(job.input.parent)
    assert main(["run", str(job.input), "--output", "-"]) == 2
    assert "`--output` must be a file" in capsys.readouterr().err
    assert not (job.input.parent / "-").exists()
