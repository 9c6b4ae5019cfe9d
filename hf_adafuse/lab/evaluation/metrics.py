"""Metrics: each says how right a text is as the answer to one question, from 0 to 1, or for translations from 0 to 100.

`exact_match` and `f1` are those of SQuAD (Rajpurkar et al., 2016, section 6.1). NaturalQuestions and TriviaQA have them
too, but their own scripts part words at hyphens and other signs that are dropped here. Of several accepted answers the
one that gives the highest score counts.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

from ...confidence.answer_text import last_number_in, numbers_in, word_f1

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(text: str, answers: Sequence[str]) -> float:
    """1 where the text is one of the answers, ignoring case, punctuation, articles and spaces, else 0. Of an
    answer that is nothing but these, like the choice `A` or the sign `-`, they count."""
    return float(any(found == expected for found, expected in _pairs(text, answers)))


def f1(text: str, answers: Sequence[str]) -> float:
    """The harmonic mean of precision and recall of the answer's words as of [`exact_match`], from 0 to 1."""
    return max((word_f1(found.split(), expected.split()) for found, expected in _pairs(text, answers)), default=0.0)


def last_number(text: str, answers: Sequence[str]) -> float:
    """1 where the last number of the text is that of an answer (GSM8K; `3.0` is `3`, `1,000` is `1000`), else 0."""
    found = last_number_in(text)
    return float(found is not None and any(found == last_number_in(answer) for answer in answers))


def marked_number(text: str, answers: Sequence[str]) -> float:
    """1 where the number after `####`, as GSM8K marks its answers, is that of an answer, else 0."""
    _, mark, rest = text.partition("####")
    found = numbers_in(rest.partition("\n")[0]) if mark else []
    return float(bool(found) and any(found[0] == last_number_in(answer) for answer in answers))


def contains(text: str, answers: Sequence[str]) -> float:
    """1 where the words of an answer stand in the text, ignoring case, punctuation and articles, else 0. An answer that
    is an article, like the option A, must stand there as it is written."""
    found = _pairs(text, answers, (_normalized, lambda one: _words(one.translate(_PUNCTUATION))))
    return float(any(answer and f" {answer} " in f" {given} " for given, answer in found))


def chrf(text: str, answers: Sequence[str]) -> float:
    """chrF of one sentence (Popovic, 2015), from 0 to 100, by sacrebleu (extra `eval`)."""
    return float(_sacrebleu().sentence_chrf(text, list(answers)).score) if answers else 0.0


def bleu(text: str, answers: Sequence[str]) -> float:
    """BLEU of one sentence, smoothed, from 0 to 100, by sacrebleu (extra `eval`)."""
    return float(_sacrebleu().sentence_bleu(text, list(answers)).score) if answers else 0.0


Metric = Callable[[str, Sequence[str]], float]
METRICS: dict[str, Metric] = {
    metric.__name__: metric for metric in (exact_match, f1, contains, last_number, marked_number, chrf, bleu)
}


def _sacrebleu() -> Any:
    try:
        return import_module("sacrebleu")
    except ImportError as error:
        raise ImportError(
            '`chrf` and `bleu` need the package sacrebleu. Install it with `pip install "hf_adafuse[eval]"`.'
        ) from error


def _normalized(text: str) -> str:
    return _words(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)))


def _words(text: str) -> str:
    return " ".join(text.split())


_WAYS = (_normalized, lambda one: _words(one.lower().translate(_PUNCTUATION)), lambda one: _words(one.lower()))


def _pairs(
    text: str, answers: Sequence[str], ways: Sequence[Callable[[str], str]] = _WAYS
) -> Iterator[tuple[str, str]]:
    """The text and each answer, normalized in the first of the ways that leaves something of the answer."""
    for answer in answers:
        way = next((way for way in ways if way(answer)), ways[-1])
        yield way(text), way(answer)
