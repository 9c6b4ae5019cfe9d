"""The calibration of confidence: what it learns, that it is one of the simplest maths, and what it refuses."""

import json
import math

import numpy as np
import pytest
import torch

from hf_adafuse.confidence import Calibration
from hf_adafuse.confidence.ridge import fit_ridge_logistic, sigmoid


def questions(rng, number, num_candidates=3, noise=1.0):
    """Two ratings of each candidate that say, with noise, whether it is right; member 0 is right more often."""
    rates = np.linspace(0.7, 0.4, num_candidates)
    is_right = (rng.random((number, num_candidates)) < rates).astype(float)
    ratings = is_right[:, :, None] + noise * rng.normal(size=(number, num_candidates, 2))
    return ratings, is_right


def chosen(calibration, features, is_right):
    best = calibration.probabilities(features).argmax(1)
    return is_right[np.arange(len(best)), best].mean()


def test_ridge_logistic_is_at_its_minimum():
    rng = np.random.default_rng(0)
    columns, labels, penalties = rng.normal(size=(60, 4)), rng.integers(0, 2, 60), np.array([0.1, 1.0, 3.0, 30.0])
    found = torch.tensor(fit_ridge_logistic(columns, labels, penalties), requires_grad=True)
    values = torch.tensor(columns) @ found
    loss = torch.nn.functional.binary_cross_entropy_with_logits(values, torch.tensor(labels * 1.0), reduction="sum")
    (loss + 0.5 * (torch.tensor(penalties) * found**2).sum()).backward()
    assert found.grad.abs().max() < 1e-6


def test_ridge_logistic_bears_labels_that_one_column_separates():
    columns = np.array([[1.0, -5.0], [1.0, -4.0], [1.0, 6.0], [1.0, 7.0]])
    found = fit_ridge_logistic(columns, np.array([0, 0, 1, 1]), np.array([1e-6, 1e-3]))
    assert np.isfinite(found).all()
    assert sigmoid(columns @ found).round(2).tolist() == [0.0, 0.0, 1.0, 1.0]


def test_sigmoid_of_large_numbers():
    assert sigmoid(np.array([-1e4, 0.0, 1e4])).tolist() == [0.0, 0.5, 1.0]


def test_a_fit_of_one_feature_by_hand():
    """Two candidates, one feature: the columns are 1, half the difference, the mean, two places, two products."""
    features = np.array([[[1.0], [3.0]], [[2.0], [1.0]], [[0.0], [5.0]], [[4.0], [4.0]]])
    is_right = np.array([[0, 1], [1, 0], [0, 1], [1, 1]])
    means = features[:, :, 0].mean(1)
    own = (features[:, :, 0] - means[:, None]) / (features[:, :, 0] - means[:, None]).std()
    mean = (means - means.mean()) / means.std()
    rows = [
        [1.0, own[q, c], mean[q], c == 0, c == 1, mean[q] * (c == 0), mean[q] * (c == 1)]
        for q in range(4)
        for c in range(2)
    ]
    penalties = np.array([1e-6, 10.0, 10.0, 3.0, 3.0, 30.0, 30.0])
    found = fit_ridge_logistic(np.array(rows, dtype=float), is_right.reshape(-1), penalties)
    expected = sigmoid(np.array(rows, dtype=float) @ found).reshape(4, 2)
    got = Calibration.fit(features, is_right).probabilities(features)
    assert np.allclose(got, expected, atol=1e-7)


def test_a_feature_of_a_larger_penalty_says_less():
    """By the definition of the minimum: with an infinite penalty it is as if it were not there."""
    features, is_right = questions(np.random.default_rng(14), 80)
    first = Calibration.fit(features[:, :, :1], is_right).probabilities(features[:, :, :1])
    both = Calibration.fit(features, is_right)
    shut = Calibration.fit(features, is_right, [10.0, 1e9])
    assert abs(shut.own[1]) < 1e-6 < abs(both.own[1]) < abs(Calibration.fit(features, is_right, [10.0, 0.1]).own[1])
    products = np.abs(np.array(shut.products)[:, 1]).max()
    assert np.abs(shut.probabilities(features) - first).max() < 0.02 + products
    assert Calibration.fit(features, is_right, [10.0, 10.0]) == both


@pytest.mark.parametrize("penalties", [[1.0], [1.0, 0.0], [1.0, float("nan")], "ab"])
def test_penalties_that_are_none(penalties):
    with pytest.raises(ValueError, match="`penalties` must be"):
        Calibration.fit(*questions(np.random.default_rng(15), 10), penalties)


def test_chosen_answers_are_right_more_often_than_the_best_member():
    rng = np.random.default_rng(1)
    calibration = Calibration.fit(*questions(rng, 100))
    features, is_right = questions(rng, 2000)
    assert calibration.note is None
    assert chosen(calibration, features, is_right) > is_right.mean(0).max() + 0.08


def test_probabilities_are_calibrated_on_questions_not_seen():
    rng = np.random.default_rng(2)
    calibration = Calibration.fit(*questions(rng, 400))
    features, is_right = questions(rng, 4000)
    probabilities = calibration.probabilities(features)
    assert probabilities.shape == (4000, 3)
    for low in (0.0, 0.2, 0.4, 0.6, 0.8):
        inside = (probabilities >= low) & (probabilities < low + 0.2)
        if inside.sum() > 200:
            assert abs(probabilities[inside].mean() - is_right[inside].mean()) < 0.06


def mixed_traffic(rng, number, num_members=3):
    """Each kind of prompt has its own best member, and only the prompt says of which kind it is."""
    kinds = rng.integers(0, num_members, number)
    rates = np.full((num_members, num_members), 0.3) + 0.5 * np.eye(num_members)
    is_right = (rng.random((number, num_members)) < rates[kinds]).astype(float)
    surprise = rng.normal(0, 0.3, (number, num_members)) - np.eye(num_members)[kinds]
    shape = (number, num_members, num_members)
    return np.broadcast_to(surprise[:, None, :], shape), is_right


def test_mixed_traffic_is_learned_from_what_belongs_to_the_prompt():
    rng = np.random.default_rng(3)
    calibration = Calibration.fit(*mixed_traffic(rng, 100))
    features, is_right = mixed_traffic(rng, 2000)
    assert is_right.mean(0).max() < 0.52
    assert chosen(calibration, features, is_right) > 0.7


def test_places_alone_say_whom_to_ask():
    rng = np.random.default_rng(4)
    is_right = (rng.random((200, 2)) < [0.3, 0.8]).astype(float)
    probabilities = Calibration.fit(np.zeros((200, 2, 1)), is_right).probabilities(np.zeros((1, 2, 1)))
    assert np.allclose(probabilities, is_right.mean(0), atol=0.03)


@pytest.mark.parametrize(("label", "word", "probability"), [(1, "right", 0.8), (0, "wrong", 0.2)])
def test_questions_that_are_all_right_or_all_wrong(label, word, probability):
    features = np.random.default_rng(5).normal(size=(3, 2, 4))
    with pytest.warns(UserWarning, match=f"falls back: all candidates of the 3 questions were {word}"):
        calibration = Calibration.fit(features, np.full((3, 2), label))
    assert np.allclose(calibration.probabilities(features), probability)
    assert word in calibration.note
    assert Calibration.from_dict(calibration.to_dict()) == calibration


def test_few_questions_are_noted():
    features, is_right = questions(np.random.default_rng(6), 29)
    assert "29 questions only" in Calibration.fit(features, is_right).note


def test_json_keeps_it_exactly():
    features, is_right = questions(np.random.default_rng(7), 50)
    calibration = Calibration.fit(features, is_right)
    again = Calibration.from_dict(json.loads(json.dumps(calibration.to_dict())))
    assert again == calibration
    assert np.array_equal(again.probabilities(features), calibration.probabilities(features))


def test_units_do_not_matter():
    features, is_right = questions(np.random.default_rng(8), 60)
    other = features * [1000.0, 0.01] + [5.0, -7.0]
    first = Calibration.fit(features, is_right).probabilities(features)
    assert np.allclose(Calibration.fit(other, is_right).probabilities(other), first, atol=1e-6)


def test_members_in_another_order_have_the_same_probabilities():
    features, is_right = questions(np.random.default_rng(9), 60)
    first = Calibration.fit(features, is_right).probabilities(features)
    turned = Calibration.fit(features[:, ::-1], is_right[:, ::-1]).probabilities(features[:, ::-1])
    assert np.allclose(turned[:, ::-1], first, atol=1e-6)


def test_an_outlier_counts_as_five_deviations():
    features, is_right = questions(np.random.default_rng(10), 60)
    calibration = Calibration.fit(features, is_right)
    far, further = features[:1].copy(), features[:1].copy()
    far[0, 0, 0], further[0, 0, 0] = 1e6, 1e12
    assert np.allclose(calibration.probabilities(far), calibration.probabilities(further))


@pytest.mark.parametrize("outlier", [-100.0, 1e3, 1e6])
def test_an_outlier_in_the_fit_leaves_the_feature_its_say(outlier):
    features, is_right = questions(np.random.default_rng(10), 100)
    asked, _ = questions(np.random.default_rng(11), 400)
    clean = Calibration.fit(features, is_right)
    features[7, 1, 0] = outlier
    spoilt = Calibration.fit(features, is_right)
    assert np.allclose(spoilt.own_spreads, clean.own_spreads, rtol=0.2)
    chosen = [one.probabilities(asked).argmax(1) for one in (clean, spoilt)]
    assert (chosen[0] == chosen[1]).mean() > 0.9


@pytest.mark.parametrize("number", [1, 3, 4, 10])
def test_a_feature_of_few_candidates_counts_in_any_unit(number):
    rng = np.random.default_rng(13)
    is_right = (rng.random((100, 2)) < 0.4).astype(float)
    is_right[:number] = [1, 0]
    features = np.zeros((100, 2, 1))
    features[:number, 0] = 1.0
    asked = np.array([[[1.0], [0.0]], [[0.0], [0.0]]])
    found = [Calibration.fit(unit * features, is_right).probabilities(unit * asked) for unit in (0.01, 1.0, 100.0)]
    assert np.allclose(found[0], found[1]) and np.allclose(found[2], found[1])
    assert found[1][0, 0] > found[1][1, 0]


def test_a_fit_of_few_right_or_wrong_answers_is_noted():
    features, is_right = questions(np.random.default_rng(12), 60)
    assert Calibration.fit(features, is_right).note is None
    few = np.zeros_like(is_right)
    few[:3, 0] = 1
    assert Calibration.fit(features, few).note == "fitted on 3 right answers only: its probabilities say little"
    assert Calibration.fit(features, 1 - few).note == "fitted on 3 wrong answers only: its probabilities say little"


def test_tensors_and_lists_are_taken():
    features, is_right = questions(np.random.default_rng(11), 40)
    of_tensors = Calibration.fit(torch.tensor(features), torch.tensor(is_right).bool())
    assert of_tensors == Calibration.fit(features.tolist(), is_right.tolist())


@pytest.mark.parametrize(
    ("features", "is_right", "message"),
    [
        (np.zeros((4, 2)), np.zeros((4, 2)), r"`features` must have the shape .* but have \(4, 2\)"),
        (np.zeros((0, 2, 1)), np.zeros((0, 2)), r"each at least 1, but have \(0, 2, 1\)"),
        (np.zeros((4, 2, 1)), np.zeros((4, 3)), r"`is_right` must have the shape \(4, 2\) .* but has \(4, 3\)"),
        (np.zeros((4, 2, 1)), np.full((4, 2), 0.5), r"`is_right` must be 0 or 1, but holds 0.5"),
        (
            np.full((4, 2, 1), math.inf),
            np.zeros((4, 2)),
            r"numbers below 1e\+100, but features\[0, 0, 0\] is inf",
        ),
        ([[[1.0], [2.0, 3.0]]], [[0, 1]], r"`features` must be an array of numbers"),
        ([[["a"], ["b"]]], [[0, 1]], r"`features` must be an array of numbers"),
    ],
)
def test_what_cannot_be_fitted_is_refused(features, is_right, message):
    with pytest.raises(ValueError, match=message):
        Calibration.fit(features, is_right)


def test_other_features_than_those_of_the_fit_are_refused():
    calibration = Calibration.fit(*questions(np.random.default_rng(12), 40))
    with pytest.raises(ValueError, match=r"the shape \(questions, 3, 2\) as those of the fit, but have \(1, 2, 2\)"):
        calibration.probabilities(np.zeros((1, 2, 2)))


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.pop("own"),
        lambda values: values.update(version=2),
        lambda values: values.update(places=[0.0]),
        lambda values: values.update(products=[[0.0, 0.0]]),
        lambda values: values.update(intercept=None),
        lambda values: values.update(intercept=math.nan),
        lambda values: values.update(num_candidates=2.7),
        lambda values: values.update(num_candidates=10**400),
        lambda values: values["own_spreads"].__setitem__(0, 0.0),
        lambda values: values["prompt_spreads"].__setitem__(1, -1.0),
        lambda values: values.update(centres="12"),
        lambda values: values["prompt"].__setitem__(0, math.nan),
    ],
)
def test_what_is_no_calibration_is_refused(change):
    values = Calibration.fit(*questions(np.random.default_rng(13), 40)).to_dict()
    change(values)
    with pytest.raises(ValueError, match=r"`calibration` must be what `Calibration.to_dict\(\)` gave"):
        Calibration.from_dict(values)


def test_no_mapping_is_refused():
    with pytest.raises(ValueError, match="must be what"):
        Calibration.from_dict([1, 2])


def test_features_of_any_size_are_told_apart():
    features, is_right = questions(np.random.default_rng(16), 60)
    expected = Calibration.fit(features, is_right).probabilities(features)
    for size in (1e-30, 1e-9, 1e60):
        found = Calibration.fit(features * size, is_right).probabilities(features * size)
        assert np.allclose(found, expected, atol=1e-6), size
    with pytest.raises(ValueError, match=r"must be finite numbers below 1e\+100, but features\[0, 0, 0\] is"):
        Calibration.fit(np.full((4, 2, 1), 1e160), np.zeros((4, 2)))


def test_a_feature_that_differs_by_rounding_alone_says_nothing():
    features, is_right = questions(np.random.default_rng(17), 60)
    noise = 0.1 + 1e-17 * np.random.default_rng(18).normal(size=features[:, :, :1].shape)
    found = Calibration.fit(np.concatenate([features, noise], axis=2), is_right)
    assert found.own_spreads[-1] == found.prompt_spreads[-1] == 1.0


def test_tensors_of_any_kind():
    features, is_right = questions(np.random.default_rng(19), 40)
    rough = torch.tensor(features, dtype=torch.bfloat16).requires_grad_()
    expected = Calibration.fit(rough.detach().double().numpy(), is_right)
    assert Calibration.fit(rough, torch.tensor(is_right) > 0) == expected
