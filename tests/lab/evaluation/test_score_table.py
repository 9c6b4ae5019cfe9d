"""The table of scores: who is the best member, and how far others are above him."""

from __future__ import annotations

from hf_adafuse.lab.evaluation.score_table import score_rows


def results(metric, values, is_higher_better=True, value=None):
    """What the harness returns for one task; a question without a value does not have the metric."""
    known = [one for one in values if one is not None]
    scores = {f"{metric},none": sum(known) / len(known) if value is None else value, "sample_len": len(values)}
    samples = [{"doc_id": at, **({} if one is None else {metric: one})} for at, one in enumerate(values)]
    return {
        "results": {"task": scores},
        "samples": {"task": samples},
        "higher_is_better": {"task": {metric: is_higher_better}},
    }


def rows_of(metric, *values, **given):
    methods = {name: results(metric, of_method, **given) for name, of_method in zip("EAB", values, strict=True)}
    return {row[2]: row for row in score_rows(methods, ["A", "B"])[1:]}


def test_the_best_member_is_the_one_of_the_better_score():
    values = [1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 1.0]
    assert {name: row[6] for name, row in rows_of("acc", *values).items()} == {"E": "-0.3333", "A": "-0.6667", "B": ""}
    lower = rows_of("bias", *values, is_higher_better=False)
    assert {name: row[6] for name, row in lower.items()} == {"E": "+0.3333", "A": "", "B": "+0.6667"}


def test_a_score_that_is_no_mean_has_no_differences():
    rows = rows_of("perplexity", [-1.0, -2.0], [-1.5, -1.5], [-3.0, -2.0], is_higher_better=False, value=4.5)
    assert {row[6] for row in rows.values()} == {""}


def test_questions_without_the_metric_are_not_counted():
    rows = rows_of("marked_number", [1.0, None, 0.0], [1.0, None, 1.0], [0.0, None, 0.0])
    assert {row[5] for row in rows.values()} == {"2"} and rows["E"][6] == "-0.5000"
