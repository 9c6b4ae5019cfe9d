"""`hf-adafuse score`: what `AdaFuseEnsemble.score` gives, line by line, over stops, kills and bad lines."""

from __future__ import annotations

import copy
import json

import pytest
from support.jobs import PAIR, killed_after, lines_of, questions, read_json, write_lines

from hf_adafuse import AdaFuseEnsemble
from hf_adafuse.cli import main
from hf_adafuse.demo.data import PROMPT
from hf_adafuse.members.model_handle import ModelHandle

TEXTS = [[" Lima", " 3"], [" 3", " 4", " four"], " Oslo"]


@pytest.fixture
def score(tmp_path, loaded_once):
    asked = [
        {"question": question, "answers": TEXTS[number % 3], "id": number}
        for number, question in enumerate(questions())
    ]
    write_lines(tmp_path / "in.jsonl", asked)

    def run(*flags):
        return main(["score", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"), *flags])

    run.asked, run.input, run.output = asked, tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    return run


def direct(asked, **options):
    prompts = [PROMPT.format(question=line["question"]) for line in asked]
    answers = [line["answers"] if isinstance(line["answers"], list) else [line["answers"]] for line in asked]
    return AdaFuseEnsemble([(copy.copy(model), tok) for model, tok in PAIR()]).score(prompts, answers, **options)


def test_records_are_those_of_the_method(score, capsys):
    assert score("--batch-size", "4") == 0
    records = lines_of(score.output)
    for number, (record, line, expected) in enumerate(zip(records, score.asked, direct(score.asked), strict=True), 1):
        assert (record["line"], record["input"]) == (number, line)
        assert record["prompt"] == PROMPT.format(question=line["question"])
        assert len(record["scores"]) == len(expected)
        for shown, one in zip(record["scores"], expected, strict=True):
            assert list(shown) == ["answer", "log_likelihoods", "tokens", "bytes", "confidence"]
            assert (shown["answer"], shown["tokens"], shown["bytes"]) == (one.text, one.num_tokens, one.num_bytes)
            assert shown["log_likelihoods"] == pytest.approx(one.log_likelihoods, abs=2e-4)
            assert shown["confidence"] == pytest.approx(one.confidence, abs=2e-4)
    assert "14 of 14 scores in" in capsys.readouterr().err


def test_ends_and_words(score):
    assert score("--ends", "--words") == 0
    for record, expected in zip(lines_of(score.output), direct(score.asked, ends=True), strict=True):
        for shown, one in zip(record["scores"], expected, strict=True):
            assert shown["words"] == one.words
            assert shown["bytes"] == len(one.text) + 1
            for values, others in zip(shown["log_probs"], one.log_probs, strict=True):
                assert values == pytest.approx(others, abs=2e-4)


def test_it_goes_on_where_it_stopped_and_with_the_same_input_only(score, capsys):
    with killed_after(5):
        assert score("--batch-size", "2") == 130
    assert len(lines_of(score.output)) == 5
    assert score("--batch-size", "2") == 0
    assert "9 new" in capsys.readouterr().err
    assert [record["line"] for record in lines_of(score.output)] == list(range(1, 15))
    assert score("--ends") == 2
    assert "`--ends` must be left out" in capsys.readouterr().err
    changed = [dict(line) for line in score.asked]
    changed[3]["answers"] = [" other"]
    write_lines(score.input, changed)
    assert score() == 2
    assert "The questions must be those of the earlier run, but the answer to line 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"question": "a?"}, "must have a text or a list of texts in the field 'answers', none empty, but has None"),
        ({"question": "a?", "answers": []}, "none empty, but has []"),
        ({"question": "a?", "answers": [" b", ""]}, "none empty, but has [' b', '']"),
        ({"question": "a?", "answers": [3]}, "none empty, but has [3]"),
        ({"answers": [" b"]}, "'question'"),
        ("{", "must be a JSON object"),
    ],
    ids=str,
)
def test_bad_lines(score, capsys, line, problem):
    write_lines(score.input, [score.asked[0], line, score.asked[1]])
    assert score() == 2
    err = capsys.readouterr().err
    assert "line 2 of" in err and problem in err
    assert not score.output.exists()
    assert score("--on-error", "skip") == 0
    good, bad, other = lines_of(score.output)
    assert problem in bad["error"] and bad["line"] == 2
    assert len(good["scores"]) == len(other["scores"]) - 1 == 2


def test_an_answer_that_is_too_long_takes_no_other_with_it(score, monkeypatch):
    monkeypatch.setattr(ModelHandle, "context", lambda self, prompts: (300, "the context"))
    write_lines(score.input, [score.asked[0], {**score.asked[1], "answers": [" b" * 400]}, score.asked[2]])
    assert score("--on-error", "skip") == 0
    good, bad, other = lines_of(score.output)
    assert "must fit behind its prompt into the context" in bad["error"]
    assert "scores" in good and "scores" in other


def test_an_answer_of_another_field(score):
    write_lines(score.input, [{"question": line["question"], "text": " Lima"} for line in score.asked[:2]])
    assert score("--answers", "text") == 0
    assert [record["scores"][0]["answer"] for record in lines_of(score.output)] == [" Lima", " Lima"]
    assert read_json(score.output.with_name("out.jsonl.settings.json"))["answers"] == "text"
    assert json.dumps(lines_of(score.output))
