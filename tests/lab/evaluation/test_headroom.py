"""`hf_adafuse.lab.evaluation.headroom`: counts by hand, and the exact interval by its definition."""

from __future__ import annotations

import math

import pytest

from hf_adafuse.lab.evaluation.headroom import Headroom, clopper_pearson, same_by, vote


def tail(numbers, of, p):
    return sum(math.comb(of, k) * p**k * (1 - p) ** (of - k) for k in numbers)


@pytest.mark.parametrize(("number", "of"), [(0, 3), (3, 3), (1, 1), (3, 40), (20, 41)])
def test_the_interval_is_where_either_tail_is_rare(number, of):
    low, high = clopper_pearson(number, of)
    assert low <= number / of <= high
    assert low == 0 if number == 0 else tail(range(number, of + 1), of, low) == pytest.approx(0.025)
    assert high == 1 if number == of else tail(range(number + 1), of, high) == pytest.approx(0.025)


def test_answers_that_say_the_same():
    same = same_by("exact_match")
    assert same(" The Lima.", "lima") and not same("Lima", "Cusco") and not same(None, None)
    assert same_by("last_number")("It is 3,000.", "3000.0") and not same_by("last_number")("3", "4")
    assert same_by("last_number")("none", " none")
    # Each must be right by the other: else one may be right where the other is wrong.
    assert same_by("contains")("The Lima.", "lima") and not same_by("contains")("Lima.", "It is Lima or Cusco.")
    marked = same_by("marked_number")
    assert marked("so #### 12", "#### 12.0") and not marked("It is 12.", "so #### 12")


def test_votes():
    same = same_by("exact_match")
    assert vote(["a b", "c", "c!"], [1.0] * 3, [0.1, 0.9, 0.5], same) == 2  # most say c; of these the likelier
    assert vote(["x", "y"], [1.0] * 2, [0.5, 0.2], same) == 1  # a tie: the lower NLL
    assert vote(["x", None, "y"], [0.3, 9.0, 0.4], [0.1, 0.0, 0.9], same) == 2
    assert vote([None, None], [1.0, 1.0], [0.0, 0.0], same) is None


def test_how_often_members_differ_and_whom_to_ask():
    texts = [["a", "a", "b"], ["a", "a", "a"], ["a", "c", "c"], [None, "d", "d"]]
    found = Headroom.of(texts, [[-1.0, -2.0, None]] * 4, [same_by("contains")] * 4)
    assert (found.num_questions, found.differ) == (4, 3)
    assert found.pairs == {(0, 1): 2, (0, 2): 3, (1, 2): 1}
    assert found.agreement == pytest.approx([1 - 5 / 8, 1 - 3 / 8, 1 - 4 / 8])
    assert found.belief[:2] == [-1.0, -2.0] and math.isnan(found.belief[2])
    assert found.suggested == 1
    two = Headroom.of([["x", "y"], ["z", "z"]], [[-3.0, -1.0], [-9.0, -9.0]], [same_by("contains")] * 2)
    assert two.belief == [-3.0, -1.0] and two.suggested == 1  # of two the one that the other believes
    equal = Headroom.of([["x", "x"]], [[-1.0, -1.0]], [same_by("contains")])
    assert (equal.differ, equal.suggested) == (0, 0)
