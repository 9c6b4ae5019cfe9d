"""The features of answers: their formulas on small numbers, and what is filled in where one is not known."""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest

from hf_adafuse.confidence import features
from hf_adafuse.confidence.answer_text import last_number_in, normalized_answer
from hf_adafuse.confidence.features import (
    AnswerFacts,
    PromptFacts,
    answer_features,
    feature_names,
    feature_penalties,
    filled,
)
from hf_adafuse.confidence.word_confidence import text_confidence, word_confidences, word_log_confidences
from hf_adafuse.lab.evaluation.metrics import METRICS

PROMPT = PromptFacts([0.5, None], [1.0, 2.0], [3.0, 4.0])
# Two members and two words; the second member has three tokens of the second word.
LIMA = AnswerFacts(" The Lima.", [[[-1.0], [-0.5]], [[-2.0], [-0.5, -0.25, -0.25]]], 10, (0,))
OSLO = AnswerFacts(" Oslo", [[[-3.0]], []], 5, (1,))


def of(answers, texts, weights=(1.0, 1.0), prompt=PROMPT):
    rows = answer_features(answers, texts, list(weights), prompt)
    return [dict(zip(feature_names(2), row, strict=True)) for row in rows]


def test_formulas():
    lima, oslo = of([LIMA, OSLO], [" The Lima.", " Oslo"], (3.0, 1.0))
    assert (lima["log-probability, member 0"], lima["log-probability, member 1"]) == (-1.5, -3.0)
    assert (lima["log-probability per token, member 0"], lima["log-probability per token, member 1"]) == (-0.75, -0.75)
    assert (lima["log-probability per byte, member 0"], lima["log-probability per byte, member 1"]) == (-0.15, -0.3)
    assert (lima["worst word, member 0"], lima["worst word, member 1"]) == (-1.0, -2.0)
    assert (lima["log-probability per byte, authors"], lima["log-probability per byte, others"]) == (-0.15, -0.3)
    assert lima["disagreement"] == pytest.approx(0.075)
    words = [0.75 * math.exp(-1) + 0.25 * math.exp(-2), 0.75 * math.exp(-0.5) + 0.25 * math.exp(-1)]
    assert lima["log-probability, authors"] == pytest.approx(-1.5 / 2**0.5)  # of two tokens
    assert oslo["log-probability, authors"] is None
    assert lima["word confidence"] == pytest.approx(sum(map(math.log, words)) / 2)
    assert lima["word confidence, text"] == pytest.approx(math.log(text_confidence(words)))
    assert lima["word confidence, whole text"] == lima["word confidence, text"]
    assert lima["word confidence, worst"] == pytest.approx(min(map(math.log, words)))
    assert (lima["agreement"], oslo["agreement"]) == (0.75, 0.25)
    assert lima["length"] == math.log(11)
    assert (oslo["log-probability, member 1"], oslo["worst word, member 1"]) == (None, None)
    assert oslo["log-probability per byte, authors"] is None  # the author's tokenizer gives no token
    assert oslo["disagreement"] == 0
    for row in (lima, oslo):
        assert [row[f"{name}, member 0"] for name in ("first entropy", "prompt cost", "question cost")] == [0.5, 1, 3]
        assert [row[f"{name}, member 1"] for name in ("first entropy", "prompt cost", "question cost")] == [None, 2, 4]


def test_how_sure_members_are_of_an_unfinished_answer_counts_beside_unfinished_ones_alone():
    texts = [" The Lima.", " Oslo"]
    whole = of([LIMA, OSLO], texts)
    cut = of([replace(LIMA, is_whole=False), OSLO], texts)
    assert cut == [{**whole[0], "word confidence, whole text": None}, whole[1]]
    assert of([replace(LIMA, is_whole=False), replace(OSLO, is_whole=False)], texts) == whole


@pytest.mark.parametrize(
    ("text", "other", "expected"),
    [
        (" Lima", "Lima ", (1.0, 1.0, 0.5, 1.0)),  # a text without a number agrees with nobody about the number
        (" The LIMA.", " lima", (0.5, 1.0, 0.5, 1.0)),
        (" 1,000 dollars", " so 1000.0", (0.5, 0.5, 1.0, 0.5)),
        (" it is 7", " 7 apples of 8", (0.5, 0.5, 0.5, 0.5 + 0.5 * 2 / 7)),
        (" ...", " !", (0.5, 1.0, 0.5, 1.0)),
        (" a", None, (0.5, 0.5, 0.5, 0.5)),
    ],
    ids=str,
)
def test_agreement(text, other, expected):
    facts = AnswerFacts(text, LIMA.log_probs, 9, (0,))
    (row,) = of([facts], [text, other])
    has_number = bool(re.search(r"\d", text))
    names = ["agreement", "agreement, normalized", "agreement, last number", "agreement, words"]
    exact, normalized, number, words = (row[name] for name in names)
    assert (exact, normalized, words) == (expected[0], expected[1], pytest.approx(expected[3]))
    assert number == (expected[2] if has_number else 0.0)


def test_what_is_not_known_is_filled_in():
    rows = [[[1.0, None, None], [3.0, 4.0, None]], [[5.0, None, None], None]]
    values = filled(rows)
    assert values.tolist() == [[[1, 4, 0], [3, 4, 0]], [[5, 4, 0], [5, 4, 0]]]
    assert filled(rows, [7.0, 8.0, 9.0]).tolist() == [[[1, 4, 9], [3, 4, 9]], [[5, 8, 9], [5, 8, 9]]]
    assert filled([[[math.inf, 1.0], [2.0, math.nan]]]).tolist() == [[[2, 1], [2, 1]]]
    assert filled([[None, None]], [1.0, 2.0]).tolist() == [[[1, 2], [1, 2]]]
    assert np.isfinite(values).all()


def test_every_feature_is_documented():
    documented = re.findall(r"^- `([^`]+)`:", features.__doc__, flags=re.MULTILINE)
    names = feature_names(3, with_ratings=True)
    assert documented == list(dict.fromkeys(re.sub(r"member \d", "member k", name) for name in names))
    assert len(set(names)) == len(names) and names[: len(feature_names(3))] == feature_names(3)


def test_every_feature_has_a_penalty():
    for with_ratings in (False, True):
        penalties = dict(zip(feature_names(2, with_ratings), feature_penalties(2, with_ratings), strict=True))
        assert penalties["log-probability, authors"] == penalties["word confidence, whole text"] == 3.0
        assert penalties["length"] == penalties["prompt cost, member 1"] == 30.0
        assert penalties.get("rating, member 1", 10.0) == 10.0


def test_confidences_too_small_for_a_number_have_a_logarithm():
    log_probs = [[[-800.0, -100.0]], [[-1000.0]]]
    assert word_log_confidences(log_probs, [1.0, 3.0]) == [pytest.approx(-900 - math.log(4))]
    assert word_confidences(log_probs, [1.0, 3.0]) == [0.0]
    assert word_log_confidences([[[-math.inf]], []], [1.0, 1.0]) == [-math.inf]
    assert word_log_confidences([[], []], [1.0, 1.0]) == []


def test_normalized_answers():
    assert normalized_answer("  The\n'Lima'.") == "the lima"
    assert normalized_answer("-3.5%, +.5") == "-3.5 +.5"
    # Vowel signs and symbols are no punctuation.
    for one, other in [
        ("\u0932\u095c\u0915\u093e", "\u0932\u095c\u0915\u0940"),
        ("C++", "C#"),
        ("\u0e17\u0e35\u0e48", "\u0e17\u0e35"),
        ("A+", "A-"),
    ]:
        assert normalized_answer(one) != normalized_answer(other)
    assert normalized_answer("`Lima`, **so**") == "lima so" and normalized_answer("<5") != normalized_answer(">5")
    assert normalized_answer("\U0001f44d!") == "\U0001f44d"
    assert normalized_answer("\ufeff|Lima|\u200b ~72") == "lima 72"
    assert normalized_answer("New York - USA") == "new york usa"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3.0", 3),
        (".5", 0.5),
        ("0.5", 0.5),
        ("-.5", -0.5),
        ("1,000", 1000),
        ("pages 5-10", 10),
        ("5 -10", -10),
        ("a", None),
        ("(3,4)", 4),
        ("1990,1991", 1991),
        ("1,2,3", 3),
        ("1,2345", 2345),
        ("2,1,000", 1000),
        ("-$1,234,567.50.", Decimal("-1234567.5")),
        ("1,00,000", 100000),
        ("1.000.000", 1000000),
        ("12.05.2020", 2020),
        ("2.1.3", 3),
        ("is 3.14.", Decimal("3.14")),
    ],
)
def test_the_last_number_is_the_same_for_features_and_metrics(text, number):
    assert last_number_in(text) == number
    assert METRICS["last_number"](text, [str(number)]) == (number is not None)


@pytest.mark.parametrize("text", ["12," * 20000, "1" + ".123" * 20000 + "4", "1" * 20000, "1." * 20000, "-" * 20000])
def test_long_texts_of_digits_are_read_at_once(text):
    start = time.process_time()
    last_number_in(text)
    assert time.process_time() - start < 20  # a search that tries all ends takes minutes


def test_answers_with_equal_numbers_agree_however_these_are_written():
    names = feature_names(2)
    facts = [AnswerFacts(text, [[[-1.0]], [[-1.0]]], 3, (k,)) for k, text in enumerate((".5", "It is 0.50"))]
    rows = answer_features(facts, [".5", "It is 0.50"], [1.0, 1.0], PromptFacts([None] * 2, [None] * 2, [None] * 2))
    assert [row[names.index("agreement, last number")] for row in rows] == [1.0, 1.0]


def test_a_number_keeps_its_sign():
    for text in ("-5", "-$5", " (-\u20ac5)", "\u22125.", "\u2013$5!"):
        assert normalized_answer(text) == "-5"
    for text in ("5", "$5", "(\xa35)"):
        assert normalized_answer(text) == "5"
    assert normalized_answer("It's well-known \u2013 since 5\u201310") == "it's well-known since 5-10"
