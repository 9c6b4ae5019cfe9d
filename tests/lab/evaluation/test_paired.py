"""Paired statistics, against the same computed another way."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from hf_adafuse.demo.paired import mean, paired, ratio_error, sign_test


def test_a_mean_and_its_error():
    values = [0.0, 1.0, 1.0, 0.25, 0.5]
    found = mean(values)
    assert found.value == pytest.approx(statistics.mean(values))
    assert found.error == pytest.approx(statistics.stdev(values) / math.sqrt(5))
    assert found.n == 5
    assert found.show(100) == "55.0 ± 20.0"
    assert found.show(100, signed=True) == "+55.0 ± 20.0"


def test_too_little_to_tell():
    assert mean([0.5]).show() == "0.5 ± ?"
    assert mean([]).show() == "? ± ?"


def test_differences_are_taken_question_by_question():
    ours, theirs = [1.0, 1.0, 0.0, 1.0, 0.0, 0.5], [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    found = paired(ours, theirs)
    steps = [1.0, 0.0, 0.0, 1.0, -1.0, 0.5]
    assert found.difference.value == pytest.approx(statistics.mean(steps))
    assert found.difference.error == pytest.approx(statistics.stdev(steps) / math.sqrt(6))
    assert (found.wins, found.losses, found.ties) == (3, 1, 2)
    back = paired(theirs, ours)
    assert back.difference.value == pytest.approx(-found.difference.value)
    assert back.p_value == found.p_value


def test_the_error_is_that_of_repeated_samples():
    """A method that shares its luck with the other: the paired error is right, and far below that of two means."""
    chance = random.Random(0)

    def sample():
        hard = [chance.random() for _ in range(200)]
        return [float(h > 0.5) for h in hard], [float(h + chance.gauss(0, 0.1) > 0.55) for h in hard]

    found = [paired(*sample()) for _ in range(300)]
    spread = statistics.stdev(one.difference.value for one in found)
    assert statistics.mean(one.difference.error for one in found) == pytest.approx(spread, rel=0.15)
    assert spread < 0.5 * math.sqrt(2 * 0.25 / 200)


@pytest.mark.parametrize("wins", range(13))
def test_the_sign_test_is_the_binomials(wins):
    expected = sum(math.comb(12, k) for k in range(13) if abs(k - 6) >= abs(wins - 6)) / 2**12
    assert sign_test(wins, 12 - wins) == pytest.approx(expected)


def test_the_error_of_a_ratio_is_that_of_repeated_samples():
    rng = random.Random(0)

    def sample():
        sizes = [rng.randint(5, 30) for _ in range(60)]
        return [(-sum(rng.gauss(2.0, 0.7) for _ in range(size)) + rng.gauss(0, 5), size) for size in sizes]

    def perplexity(ratio):
        return math.exp(-ratio)

    samples = [sample() for _ in range(400)]
    values = [perplexity(sum(top for top, _ in one) / sum(size for _, size in one)) for one in samples]
    errors = [ratio_error(one, perplexity) for one in samples]
    assert statistics.mean(errors) == pytest.approx(statistics.stdev(values), rel=0.1)
    assert math.isnan(ratio_error([(1.0, 2.0)], perplexity))


def test_the_sign_test_of_many_and_of_none():
    assert sign_test(0, 0) == 1
    assert sign_test(50_000, 50_000) == 1
    assert 0 < sign_test(49_000, 51_000) < 1e-9


def test_other_numbers_of_scores_are_refused():
    with pytest.raises(ValueError, match="`others` must be one score per question, as `scores`, but is 1 for 2"):
        paired([1.0, 0.0], [1.0])
