"""`hf-adafuse tune` where questions fail: they are wrong, the others are asked, and the report says so."""

from __future__ import annotations

import re

import pytest
from jobs import lines_of, read_json, write_lines, write_numbered

from hf_adafuse import AdaFuseDecodingError
from hf_adafuse.cli import main
from hf_adafuse.evaluation import asking
from hf_adafuse.evaluation.candidates import Candidate


def failing(fails, error):
    """Instead of the models: all are right, but an error comes where `fails(candidate, number)` says."""

    def ask(self, candidate, prompts):
        numbers = [int(prompt.split()[-2]) for prompt in prompts]
        failing.batches.append((candidate, numbers))
        if any(fails(candidate, number) for number in numbers):
            raise error
        return [str(number) for number in numbers]

    failing.batches = []
    return ask


@pytest.mark.parametrize(
    "error",
    [
        ValueError("The prompt must be shorter,\nbut is not. Cut it."),
        IndexError("index out of range in self"),
        RuntimeError(),
        AdaFuseDecodingError("assistant 1", "out of memory", 3, ["a"], [[1]]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_question_that_fails_is_wrong_and_the_others_are_asked(error, tune, monkeypatch):
    write_numbered(tune.folder)
    who = Candidate((1,))
    ask = failing(lambda candidate, number: candidate == who and number in (7, 8), error)
    monkeypatch.setattr(asking.Panel, "ask", ask)
    code, out, _ = tune()
    assert code == 0
    reason = {
        "ValueError": "The prompt must be shorter, but is not. Cut it.",
        "RuntimeError": "RuntimeError",
        "AdaFuseDecodingError": "assistant 1 failed in round 3: out of memory",
    }.get(type(error).__name__, str(error))
    pattern = r"^failed, and counted as wrong: 2 answers\n  2 of (.*); the first, to line (\d+): (.*)$"
    said = re.search(pattern, out, flags=re.MULTILINE)
    assert said and said[1] == "gpt_neox alone" and said[2] in ("8", "9") and said[3] == reason
    evidence = read_json(tune.output / "evidence.json")
    failed = {entry["candidate"]: [one["line"] for one in entry["failed"]] for entry in evidence["candidates"]}
    assert sorted(failed.pop("gpt_neox alone")) == [8, 9] and not any(failed.values())
    records = {record["line"]: record for record in lines_of(tune.output / "answers/gpt_neox_alone.jsonl")}
    assert [line for line, record in records.items() if "error" in record] == [int(said[2]), 17 - int(said[2])]
    assert [record["text"] for line, record in sorted(records.items())] == [
        "" if k in (7, 8) else str(k) for k in range(100)
    ]
    entry = next(entry for entry in evidence["candidates"] if entry["candidate"] == "gpt_neox alone")
    num_wrong = sum(round((1 - entry[part]["mean"]) * entry[part]["n"]) for part in ("searched", "held_out"))
    assert num_wrong == 2
    # Alone are asked those of a batch that has failed, and started again none is.
    alone = {numbers[0] for candidate, numbers in failing.batches if candidate == who and len(numbers) == 1}
    assert {7, 8} < alone and len(alone) <= 16
    failing.batches.clear()
    assert tune()[1] == out and not failing.batches


def test_what_fails_is_left_out_by_compare_and_scored_nothing(tune, monkeypatch, capsys):
    """Also where nothing would be right."""
    write_lines(tune.folder / "dev.jsonl", [{"question": f"say {k}", "answer": [str(k), ""]} for k in range(20)])
    ask = failing(lambda candidate, number: candidate.is_alone and number == 3, ValueError("no"))
    monkeypatch.setattr(asking.Panel, "ask", ask)
    assert tune()[0] == 0
    entry = read_json(tune.output / "evidence.json")["candidates"][0]
    assert min(entry[part]["mean"] for part in ("searched", "held_out")) < 1
    names = ["llama_alone.jsonl", "llama+gpt_neox_span.jsonl"]
    capsys.readouterr()
    assert main(["compare", *(str(tune.output / "answers" / name) for name in names)]) == 0
    assert "1 whose answer failed in A" in capsys.readouterr().out


def test_many_candidates_that_fail(tune, monkeypatch):
    write_numbered(tune.folder)
    monkeypatch.setattr(asking.Panel, "ask", failing(lambda candidate, number: number % 10 == 3, ValueError("no")))
    _, out, _ = tune()
    assert out.count("; the first, to line ") == 5 and "  (and of 1 others: evidence.json)\n" in out


def test_where_all_fails_that_is_an_error(tune, monkeypatch):
    write_numbered(tune.folder)
    monkeypatch.setattr(asking.Panel, "ask", failing(lambda candidate, number: True, RuntimeError("out of memory.")))
    code, out, err = tune()
    assert (code, out) == (2, "")
    assert "The candidates must answer some of the questions, but all 48 answers failed; the first, of llama" in err
    assert re.search(r" alone to line \d+: out of memory\. Mend that, and start again\.\n$", err)
    assert not (tune.output / "evidence.json").exists() and not list((tune.output / "answers").iterdir())
    monkeypatch.setattr(asking.Panel, "ask", failing(lambda candidate, number: False, None))
    assert tune()[0] == 0 and len(failing.batches) > 20  # what has failed is asked again


def test_a_bug_is_no_failure_of_a_question(tune, monkeypatch):
    write_numbered(tune.folder)
    monkeypatch.setattr(asking.Panel, "ask", failing(lambda candidate, number: number == 3, TypeError("a bug")))
    with pytest.raises(TypeError, match="a bug"):
        tune()
