"""How sure members are of words: the numbers."""

import math

import pytest

from hf_adafuse.confidence.word_confidence import text_confidence, word_confidences


def test_the_mean_over_members_of_the_products_of_tokens():
    log_half = math.log(0.5)
    found = word_confidences([[[log_half, log_half], [0.0]], [[math.log(0.75)], [log_half]]], [1.0, 3.0])
    assert found == pytest.approx([(0.25 + 3 * 0.75) / 4, (1 + 3 * 0.5) / 4])


def test_members_that_have_not_scored_a_text_do_not_count():
    assert word_confidences([[[math.log(0.5)]], []], [1.0, 1.0]) == pytest.approx([0.5])
    assert word_confidences([[[], []], [[], []]], [1.0, 1.0]) == [None, None]
    assert word_confidences([[], []], [1.0, 1.0]) == []


def test_what_is_forbidden_has_no_probability():
    assert word_confidences([[[-math.inf]], [[0.0]]], [1.0, 1.0]) == [0.5]


def test_rounding_does_not_lead_beyond_one():
    assert word_confidences([[[1e-7]]], [1.0]) == [1.0]


def test_the_confidence_of_a_text_falls_with_its_words():
    assert text_confidence([0.5, None, 0.125]) == pytest.approx(0.5 ** (4 / 2**0.5))
    assert text_confidence([0.3]) == pytest.approx(0.3)
    assert text_confidence([0.9] * 9) == pytest.approx(0.9**3)  # between the product and the geometric mean
    assert text_confidence([0.5, 0.0]) == 0.0
    assert text_confidence([None]) is None
    assert text_confidence([]) is None
