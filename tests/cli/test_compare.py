"""`hf-adafuse compare`: two files question by question, where they part, and files that cannot be compared."""

from __future__ import annotations

import json
import re

import pytest
from support.calls import FORM
from support.jobs import lines_of, rewrite, write_lines

from hf_adafuse.cli import main
from hf_adafuse.lab.evaluation.disagreements import compare as pair_results
from hf_adafuse.lab.evaluation.samples import read_results

ANSWERS = [["Lima"], "Rome", ["42", "forty-two"], "Paris"]


def asked(number):
    return {"question": f"Question {number}?", "answer": ANSWERS[number - 1]}


def answer(number, text, **more):
    return {"line": number, "input": asked(number), "prompt": f"Q: Question {number}?", "text": text, **more}


def span(text, score=0.5, by=(0,), ends=False):
    words = text.split()
    candidate = {"text": text, "score": score, "proposers": list(by)}
    return {"text": text, "words": words, "ends": ends, "proposer": by[0], "winner": 0, "candidates": [candidate]}


@pytest.fixture
def compare(tmp_path, capsys):
    """Runs the command on two lists of records: what it prints, or its error."""

    def run(a, b, *flags):
        for name, records in (("a", a), ("b", b)):
            write_lines(tmp_path / f"{name}.jsonl", records)
        code = main(["compare", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), *flags])
        out, err = capsys.readouterr()
        out, err = (text.replace(f"{tmp_path}/", "") for text in (out, err))
        if code:
            assert (code, out) == (2, "")
            (line,) = err.splitlines()
            return line.removeprefix("hf-adafuse: error: ")
        assert err == ""
        return re.sub(r"(?m)^(A|B|B - A) {2,}", r"\1  ", out)  # the columns of the figures are as wide as need be

    run.folder = tmp_path
    return run


A = [answer(1, " Lima"), answer(2, " Milan"), answer(3, " 42"), answer(4, " Lyon")]
B = [answer(1, " lima."), answer(2, " Rome"), answer(3, " 41"), answer(4, " Paris")]


def test_figures_and_where_answers_part(compare):
    assert (
        compare(A, B)
        == """\
exact_match on the 4 questions that both answer, in points (0 to 100) ± standard error

A  50.0 ± 28.9  a.jsonl
B  75.0 ± 25.0  b.jsonl
B - A  +25.0 ± 47.9  question by question: 2 won by B, 1 lost, 1 tied; sign test p = 1

3 questions with another score, 1 with another text and the same score

question 2: Question 2?
  accepted: Rome
  A    0  Milan
  B  100  Rome

question 3: Question 3?
  accepted: 42 | forty-two
  A  100  42
  B    0  41

question 4: Question 4?
  accepted: Paris
  A    0  Lyon
  B  100  Paris

question 1: Question 1?
  accepted: Lima
  A  100  Lima
  B  100  lima.
"""
    )


def test_order_does_not_matter_and_fewer_are_shown(compare):
    out = compare(A, B[::-1], "--show", "1")
    assert "+25.0 ± 47.9" in out
    assert "3 questions with another score, 1 with another text and the same score; 1 shown (--show):" in out
    assert out.count("accepted:") == 1
    assert "accepted" not in compare(A, B, "--show", "0")


def test_another_metric(compare):
    out = compare(A, [answer(1, "Lima or not"), *B[1:]], "--metric", "contains")
    assert out.startswith("contains on the 4 questions")
    assert "B  75.0 ± 25.0" in out


def test_questions_of_one_file_and_failed_ones_are_left_out_with_counts(compare):
    failed = {"line": 3, "input": asked(3), "text": "", "error": "too long"}
    out = compare(A[:3], [*B[1:2], failed, B[3]])
    assert "exact_match on the 1 question that both answer" in out
    assert "left out: 1 only in A, 1 only in B, 1 whose answer failed in B" in out
    assert "B - A  +100.0 ± ?" in out


def test_many_accepted_answers(compare):
    asked = {"question": "Who?", "answer": list("abcdefg")}
    a, b = ({"line": 1, "input": asked, "prompt": "Who?", "text": text} for text in "xb")
    assert "  accepted: a | b | c | d | e (and 2 others)\n" in compare([a], [b])


def test_rounds_side_by_side_until_they_part(compare):
    ours = [span(" The capital is", 0.21), span(" Milan", 1.5, (0, 1), ends=True)]
    theirs = [span(" The"), span(" capital is Rome", 0.25, (1,)), span(" .")]
    milan, rome = answer(2, " The capital is Milan", rounds=ours), answer(2, " The capital is Rome .", rounds=theirs)
    out = compare([milan], [rome])  # both are wrong
    assert out.endswith(
        "    1  [The capital is] 3 words, 0.21, by 0  |   [The] 1 word, 0.50, by 0\n"
        "    2 >[Milan] <end> 1 word, 1.50, by 0 1    |  >[capital is Rome] 3 words, 0.25, by 1\n"
    )


def test_rounds_of_answers_with_other_scores(compare):
    ours = [span(" A"), span(" B"), span(" C"), span(" Milan", 1.5, (0, 1), ends=True)]
    theirs = [span(" A"), span(" B"), span(" C"), span(" Rome", 0.25, (1,)), span(" never shown")]
    out = compare([answer(2, "Milan", rounds=ours)], [answer(2, "Rome", rounds=theirs)])
    assert "Of each round: the words that were committed, the winner's score" in out
    assert out.endswith(
        "  (1 round before: not shown)\n"
        "    2  [B] 1 word, 0.50, by 0              |   [B] 1 word, 0.50, by 0\n"
        "    3  [C] 1 word, 0.50, by 0              |   [C] 1 word, 0.50, by 0\n"
        "    4 >[Milan] <end> 1 word, 1.50, by 0 1  |  >[Rome] 1 word, 0.25, by 1\n"
    )
    one_has_none = compare([answer(2, "Milan")], [answer(2, "Rome", rounds=theirs)])
    assert "    1 >no rounds  |  >[A] 1 word, 0.50, by 0\n" in one_has_none


def sample(number, text, **more):
    doc = {"question": f"Question {number}?"}
    arguments = {"gen_args_0": {"arg_0": f"Shown\n\nQuestion {number}?", "arg_1": "{'until': ['\\n']}"}}
    return {
        "doc_id": number, "doc": doc, "target": "42", "arguments": arguments, "resps": [[text]],
        "filtered_resps": [text], "filter": "none", "metrics": ["exact_match", "em2"],
        "exact_match": float(text == "42"), "em2": float("4" in text), **more,
    }  # fmt: skip


def test_samples_of_lm_eval(compare):
    out = compare([sample(0, "41"), sample(1, "42")], [sample(0, "42"), sample(1, "42")])
    assert out.startswith("exact_match on the 2 questions")
    assert "B - A  +50.0 ± 50.0" in out
    assert "question 0: Question 0?\n  accepted: 42\n  A    0  41\n  B  100  42\n" in out
    assert "B - A  +0.0 ± 0.0" in compare([sample(0, "41"), sample(1, "42")], [sample(0, "42"), sample(1, "42")],
                                           "--metric", "em2")  # fmt: skip


def test_a_perplexity_is_no_score_of_a_question(compare):
    """lm-eval's samples hold a log-likelihood in its place."""
    rows = [[sample(0, "42", metrics=["perplexity", "acc"], perplexity=-value, acc=1.0)] for value in (0.9, 1.8)]
    assert compare(*rows).startswith("acc on the 1 question ")
    assert "`--metric` must be one that" in compare(*rows, "--metric", "perplexity")


def test_filters_of_lm_eval(compare):
    a = [sample(0, "41", filter="strict"), sample(0, "42", filter="flexible")]
    b = [sample(0, "42", filter="strict"), sample(0, "42", filter="flexible")]
    out = compare(a, b)
    assert out.startswith("a.jsonl has the filters strict, flexible: strict is read (--filter).\n")
    assert "B - A  +100.0 ± ?" in out
    assert "B - A  +0.0 ± ?" in compare(a, b, "--filter", "flexible")
    assert "`--filter` must be one of ['strict', 'flexible'], but is 'x'" in compare(a, b, "--filter", "x")
    # B is read by A's filter, and not by its own first one.
    assert "B - A  +100.0 ± ?" in compare(a, b[::-1])
    assert "`--filter` must be one of ['flexible'], but is 'strict'. Choose one that b.jsonl has" in compare(a, b[1:])


def test_results_of_other_filters_are_not_compared(compare):
    compare([sample(0, "41", filter="strict")], [sample(0, "42", filter="strict")])
    a = read_results(compare.folder / "a.jsonl")
    write_lines(compare.folder / "b.jsonl", [sample(0, "42", filter="flexible")])
    with pytest.raises(ValueError, match="`filter` must be the same for both files, but is 'strict' for "):
        pair_results(a, read_results(compare.folder / "b.jsonl"))


def test_a_multiple_choice_shows_the_likeliest(compare):
    arguments = {f"gen_args_{k}": {"arg_0": "Q", "arg_1": text} for k, text in enumerate((" yes", " no"))}
    first = sample(0, "", arguments=arguments, filtered_resps=[["-1.5", "False"], ["-0.5", "True"]])
    second = sample(0, "42", arguments=arguments, filtered_resps=[["-0.1", "False"], ["-0.5", "True"]])
    out = compare([first], [second])
    assert "  A    0  no\n  B  100  yes\n" in out


@pytest.mark.parametrize(
    ("a", "b", "flags", "expected"),
    [
        (A[:1], B[1:], [], "The files must have questions in common, but"),
        (A[:1], [{**B[1], "line": 1}], [], "The files must hold answers to the same questions, but question 1 is"),
        ([A[0], A[0]], B, [], "but 'a.jsonl' has line 1 twice."),
        ([sample(0, "1"), sample(0, "1")], B, [], "but 'a.jsonl' has doc_id 0 twice."),
        ([sample(0, "1", filter="f")], B, ["--filter", "g"], "`--filter` must be one"),
        (A, B, ["--metric", "x"], "`--metric` must be one of ['exact_match', "),
        ([sample(0, "1")], [sample(0, "1")], ["--metric", "x"], "`--metric` must be one that 'a.jsonl' has for each"),
        ([sample(0, "1", metrics=[])], B, [], "but is no metric that is a number."),
        ([sample(0, "1", exact_match=[1, 2])], B, ["--metric", "exact_match"], "but is 'e"),
        ([sample(0, "1"), sample(1, "1", exact_match=float("nan"))], B, [], "`exact_match` must be a number for each "
         "question, but is nan for question 1 of 'a.jsonl'."),
        ([{**A[0], "input": {"question": "x"}}], B, [], "must have the accepted ones in `input`"),
        (["{"], B, [], "The results must be JSON, but row 1 of 'a.jsonl' is not"),
        (['{"text": 1}'], B, [], "but row 1 of 'a.jsonl' has neither `line` nor `doc_id`."),
        ([], B, [], "The results must not be empty, but 'a.jsonl' is."),
        (A, B, ["--filter", "x"], "`--filter` must be left out with answers of `hf-adafuse run`"),
        (A, [sample(1, "1")], [], "The files must hold answers to the same questions, but"),
        ([sample(1, "42")], A, [], "`--filter` must be left out with answers of `hf-adafuse run`, but is 'none' for "),
    ],
)  # fmt: skip
def test_what_cannot_be_compared(a, b, flags, expected, compare):
    line = compare(a, b, *flags)
    assert expected in line
    assert re.match(FORM, line), line


def test_a_file_that_is_not_there(capsys):
    assert main(["compare", "nowhere.jsonl", "x.jsonl"]) == 2
    assert "The results must be a JSONL file, but 'nowhere.jsonl' is none." in capsys.readouterr().err


def test_answers_of_run_with_rounds(job, tmp_path, capsys):
    """A run is to be gone on with as it began."""
    rewrite(job, lambda lines: [{**line, "answer": "4"} for line in lines])
    assert job("--rounds") == 0
    records = lines_of(job.output)
    assert all("".join(one["text"] for one in record["rounds"]) == record["text"] for record in records)
    json.dumps(records, allow_nan=False)
    other = tmp_path / "other.jsonl"
    other.write_bytes(job.output.read_bytes())
    capsys.readouterr()
    assert main(["compare", str(job.output), str(other)]) == 0
    assert "B - A  +0.0 ± 0.0" in capsys.readouterr().out
    assert job() == 2  # without rounds: other settings
    assert "`--rounds` must be true, as in the earlier run" in capsys.readouterr().err


def test_texts_are_scored_as_they_stand(compare):
    """A run has cut them at its stop texts; files of settings are not read, so a broken one changes nothing."""
    (compare.folder / "a.jsonl.settings.json").write_text(json.dumps({"stop": ["\n", "Q:"]}), encoding="utf-8")
    out = compare([answer(1, " Lima\nQ: more")], [answer(1, " Lima\nQ: more")])
    assert "A  0.0 ± ?" in out
    assert "B  0.0 ± ?" in out
