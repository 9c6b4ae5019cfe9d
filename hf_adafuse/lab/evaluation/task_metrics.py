"""Scores the answers to the tasks in `tasks/`, by functions that the harness calls. `doc` is a row of the dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .local_data import QuestionRow
from .metrics import chrf, exact_match, f1, last_number, marked_number
from .translation import has_spbleu


def first_answer(doc: QuestionRow) -> str:
    """The answer that a worked example shows: the first accepted one."""
    return str(doc["answers"][0])


def score_answer(doc: QuestionRow, results: Sequence[str]) -> dict[str, float]:
    """The scores of a short answer: `exact_match` and `f1`, from 0 to 1."""
    return {metric.__name__: metric(results[0], doc["answers"]) for metric in (exact_match, f1)}


def score_number(doc: QuestionRow, results: Sequence[str]) -> dict[str, float]:
    """The scores of a number: `last_number`, and `marked_number` where an accepted answer has a number after `####`."""
    scores = {"last_number": last_number(results[0], doc["answers"])}
    if any("####" in answer for answer in doc["answers"]):
        scores["marked_number"] = marked_number(results[0], doc["answers"])
    return scores


def score_translation(doc: QuestionRow, results: Sequence[str]) -> dict[str, Any]:
    """The score of a translated sentence, `sentence_chrf`, and under the names of the scores of the whole set the pair
    of accepted translations and text that those are made of."""
    text = results[0].strip()
    answers = list(doc["answers"])
    bleu = "spbleu" if has_spbleu() else "bleu"
    return {"sentence_chrf": chrf(text, answers), "chrf": (answers, text), bleu: (answers, text)}
