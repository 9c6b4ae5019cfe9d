"""The figures of confidence by their definitions, and what is known of made answers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from hf_adafuse.confidence.features import feature_names
from hf_adafuse.lab.evaluation.answer_confidences import held_out_confidences
from hf_adafuse.lab.evaluation.confidence_figures import auroc, bins, bootstrapped, calibration_error, risk


def drawn(seed, number=40, levels=6):
    """Confidences with many ties, and labels that follow them a little."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, levels, number) / (levels - 1)
    return values.tolist(), (rng.random(number) < 0.2 + 0.5 * values).astype(float).tolist()


@pytest.mark.parametrize("seed", range(20))
def test_auroc_is_the_share_of_pairs_in_order(seed):
    values, labels = drawn(seed)
    pairs = [
        1.0 if right > wrong else 0.5 if right == wrong else 0.0
        for (right, is_right), (wrong, other) in itertools.product(zip(values, labels, strict=True), repeat=2)
        if is_right and not other
    ]
    assert auroc(values, labels) == pytest.approx(sum(pairs) / len(pairs))
    assert auroc([-value for value in values], labels) == pytest.approx(1 - sum(pairs) / len(pairs))


def test_auroc_of_one_kind_of_answers_is_not_known():
    assert math.isnan(auroc([0.1, 0.9], [1, 1])) and math.isnan(auroc([0.1, 0.9], [0, 0]))


@pytest.mark.parametrize("seed", range(20))
def test_risk_is_the_mean_over_all_orders_of_equal_ones(seed):
    values, labels = drawn(seed, number=12, levels=3)
    rng = np.random.default_rng(seed)
    for coverage in (0.25, 0.5, 1.0):
        number = round(coverage * len(values))
        ties = rng.random((4000, len(values)))
        orders = [sorted(range(len(values)), key=lambda at, tie=tie: (-values[at], tie[at]))[:number] for tie in ties]
        mean = np.mean([1 - labels[at] for order in orders for at in order])
        assert risk(values, labels, coverage) == pytest.approx(mean, abs=0.03)


def test_bins_and_calibration_error_by_hand():
    values, labels = [0.05, 0.06, 0.95, 1.0], [0, 1, 1, 1]
    low, high = bins(values, labels)
    assert (low.low, low.high, low.number, low.right) == (0.0, 0.1, 2, 0.5)
    assert (high.low, high.high, high.number, high.right) == (0.9, 1.0, 2, 1.0)
    assert low.confidence == pytest.approx(0.055) and high.confidence == pytest.approx(0.975)
    assert calibration_error(values, labels) == pytest.approx((2 * (0.5 - 0.055) + 2 * 0.025) / 4)


def test_the_bootstrap_gives_the_standard_error_of_a_mean():
    rng = np.random.default_rng(0)
    values = rng.normal(size=400)
    found = bootstrapped(lambda own, right: float(np.mean(own)), values.tolist(), [0.0] * 400)
    assert found.value == pytest.approx(values.mean())
    assert found.error == pytest.approx(values.std() / 20, rel=0.1)
    same = bootstrapped(lambda own, right: float(np.mean(own)), values.tolist(), [0.0] * 400, (values - 1).tolist())
    assert same.value == pytest.approx(1.0) and same.error == pytest.approx(0.0, abs=1e-9)  # paired


def made(number, seed=0):
    """Two members; member 1 is better, and what both together say of its answers tells whether they are right."""
    rng = np.random.default_rng(seed)
    names = feature_names(2)
    right = (rng.random((number, 2)) < (0.3, 0.6)).astype(float)
    rows = rng.normal(-3, 0.2, (number, 2, len(names)))
    for at, name in enumerate(names):
        if name.startswith(("log-probability", "word confidence")):
            rows[:, :, at] = -np.abs(rows[:, :, at])
    for name in ("word confidence, text", "word confidence, whole text"):
        rows[:, :, names.index(name)] += right
    return right.tolist(), rows.tolist(), names


def test_what_other_members_say_tells_right_from_wrong():
    right, rows, names = made(200)
    found = held_out_confidences(right, rows, range(200))
    assert found.best == 1 and found.is_right == [scores[1] for scores in right]
    at = names.index("log-probability per token, member 1")
    assert found.per_token == pytest.approx([math.exp(row[1][at]) for row in rows])
    assert auroc(found.calibrated, found.is_right) > 0.9
    assert 0.3 < auroc(found.own_calibrated, found.is_right) < 0.7  # the member alone cannot know
    assert calibration_error(found.calibrated, found.is_right) < 0.15
    assert sum(found.chosen_right) > sum(found.is_right)


def test_no_answer_is_judged_by_a_calibration_that_has_seen_its_question():
    """Labels that nothing tells: a calibration that had seen them would know them by heart."""
    rng = np.random.default_rng(1)
    right, rows, names = made(100, seed=1)
    labels = rng.integers(0, 2, (100, 2)).astype(float).tolist()
    twice, groups = [*rows, *rows], [*range(100), *range(100)]
    found = held_out_confidences([*labels, *labels], twice, groups)
    assert 0.35 < auroc(found.calibrated, found.is_right) < 0.65
    assert len(names) == len(rows[0][0]) and len(right) == 100


def test_questions_without_an_answer_of_the_best_member_are_left_out():
    right, rows, _ = made(40)
    rows[3][1], rows[4][0] = None, None
    found = held_out_confidences(right, rows, range(40))
    assert len(found.is_right) == 39 == len(found.chosen)
    with pytest.raises(ValueError, match="must be 2 or more different ones that the best member answers, but are 1"):
        held_out_confidences(right, rows, ["the same"] * 40)
