"""How the tasks in `tasks/` are scored, in the form in which the harness calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .metrics import chrf, exact_match, f1, last_number, marked_number
from .translation import has_spbleu

Row = dict[str, Any]


def first_answer(doc: Row) -> str:
    """What a worked example shows as the answer."""
    return str(doc["answers"][0])


def score_answer(doc: Row, results: Sequence[str]) -> dict[str, float]:
    """Exact match and F1 of a short answer."""
    return {metric.__name__: metric(results[0], doc["answers"]) for metric in (exact_match, f1)}


def score_number(doc: Row, results: Sequence[str]) -> dict[str, float]:
    """Whether the last number is right; and the one after `####`, where the accepted answers are marked so."""
    scores = {"last_number": last_number(results[0], doc["answers"])}
    if any("####" in answer for answer in doc["answers"]):
        scores["marked_number"] = marked_number(results[0], doc["answers"])
    return scores


def score_translation(doc: Row, results: Sequence[str]) -> dict[str, Any]:
    """chrF of the sentence; and the pair of the texts, of which the scores of the whole set are made."""
    text, answers = results[0].strip(), list(doc["answers"])
    bleu = "spbleu" if has_spbleu() else "bleu"
    return {"sentence_chrf": chrf(text, answers), "chrf": (answers, text), bleu: (answers, text)}
