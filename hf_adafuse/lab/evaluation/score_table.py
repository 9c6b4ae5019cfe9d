"""Shows the scores of several methods on the harness's tasks as the rows of a table."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ...demo.paired import Mean, paired

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
            best = max(members, key=lambda name: methods[name]["results"][task][key], default=None)
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
    number = results["n-samples"].get(task, {}).get("effective", scores.get("sample_len", ""))
    error = scores.get(f"{metric}_stderr,{filter_name}")
    return task, shown, name, _digits(scores.get(key)), _digits(error), str(number)


def _above(best: HarnessResults | None, results: HarnessResults, task: str, key: str) -> tuple[str, str]:
    """The cells of the difference to the best member. They are blank for that member itself, and where a score is one
    of the whole set."""
    difference = None if best is None else _difference(results, best, task, key)
    return ("", "") if difference is None else (f"{difference.value:+.4f}", _digits(difference.error))


def _difference(results: HarnessResults, others: HarnessResults, task: str, key: str) -> Mean | None:
    ours, theirs = (_by_question(one, task, key) for one in (results, others))
    if not ours or ours.keys() != theirs.keys():
        return None
    return paired(list(ours.values()), [theirs[number] for number in ours]).difference


def _by_question(results: HarnessResults, task: str, key: str) -> dict[int, float]:
    """The score of each question by its number; empty where scores of questions are no numbers."""
    metric, _, filter_name = key.partition(",")
    samples = [one for one in results["samples"].get(task, ()) if one.get("filter", "none") == filter_name]
    scores = {one["doc_id"]: one.get(metric) for one in samples}
    return scores if all(isinstance(score, (int, float)) for score in scores.values()) else {}


def _digits(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) else "-"
