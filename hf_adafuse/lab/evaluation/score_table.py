"""Shows the scores of several methods on the harness's tasks as the rows of a table."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from ...demo.paired import Mean, mean, paired

HarnessResults = Mapping[str, Any]  # what the harness's `simple_evaluate` returns


def score_rows(methods: Mapping[str, HarnessResults], members: Collection[str] = ()) -> list[tuple[str, ...]]:
    """
    The rows of a table: task, metric, name, value, standard error, and number of questions. Where members alone are
    among the methods, each row also says how far it is above the best of them, question by question, with the standard
    error.

    Args:
        methods (`dict`): what [`evaluate`] returned for each method, by its name.
        members (`list[str]`, *optional*): the names that are those of members alone.
    """
    rows: list[tuple[str, ...]] = [("task", "metric", "who", "value", "+- s.e.", "n")]
    if members:
        rows[0] += ("above the best member", "+- s.e.")
    first = next(iter(methods.values()))
    for task, scores in first["results"].items():
        for key in [key for key in scores if "," in key and "_stderr," not in key]:
            sign = 1 if _is_higher_better(first, task, key) else -1
            best = max(members, key=lambda name: sign * methods[name]["results"][task][key], default=None)
            for name, results in methods.items():
                row = _scores_of(results, task, key, name)
                if best is not None:
                    row += _above(None if name == best else methods[best], results, task, key)
                rows.append(row)
    return rows


def _scores_of(results: HarnessResults, task: str, key: str, name: str) -> tuple[str, ...]:
    metric, _, filter_name = key.partition(",")
    scores = results["results"][task]
    shown = metric if filter_name == "none" else f"{metric} ({filter_name})"
    # Not every question need have the metric.
    number = len(_by_question(results, task, key)) or scores.get("sample_len", "")
    error = scores.get(f"{metric}_stderr,{filter_name}")
    return task, shown, name, _digits(scores.get(key)), _digits(error), str(number)


def _above(best: HarnessResults | None, results: HarnessResults, task: str, key: str) -> tuple[str, str]:
    """The cells of the difference to the best member. They are blank for that member itself, and where a score is not
    the mean of the questions' scores, like BLEU and perplexity."""
    difference = None if best is None else _difference(results, best, task, key)
    return ("", "") if difference is None else (f"{difference.value:+.4f}", _digits(difference.error))


def _difference(results: HarnessResults, others: HarnessResults, task: str, key: str) -> Mean | None:
    ours, theirs = (_by_question(one, task, key) for one in (results, others))
    if not ours or ours.keys() != theirs.keys() or not all(isinstance(score, (int, float)) for score in ours.values()):
        return None
    if not math.isclose(mean(list(ours.values())).value, results["results"][task][key], abs_tol=1e-9):
        return None
    return paired(list(ours.values()), [theirs[number] for number in ours]).difference


def _by_question(results: HarnessResults, task: str, key: str) -> dict[int, Any]:
    """The score of each question that has one, by its number; for the score of a whole set, what it is made of."""
    metric, _, filter_name = key.partition(",")
    samples = [one for one in results["samples"].get(task, ()) if one.get("filter", "none") == filter_name]
    return {one["doc_id"]: one[metric] for one in samples if one.get(metric) is not None}


def _is_higher_better(results: HarnessResults, task: str, key: str) -> bool:
    return results.get("higher_is_better", {}).get(task, {}).get(key.partition(",")[0]) is not False


def _digits(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) else "-"
