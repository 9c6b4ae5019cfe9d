"""`hf_adafuse.lab.evaluation.fitting`: worlds where it is known what is best, and laws of cross-validation."""

from __future__ import annotations

import random
import statistics

import pytest

from hf_adafuse.lab.evaluation import fitting
from hf_adafuse.lab.evaluation.fitting import FUSION, SELECT, Answered, choice_of, judge, parts_of


def world(number, rates=(0.5, 0.5), noise=0.5, fused=0.4, seed=0, groups=None):
    """Members that are right at some rates, with a feature that shows it but for noise."""
    rng = random.Random(seed)
    right = [[float(rng.random() < rate) for rate in rates] for _ in range(number)]
    rows = [[[own + rng.gauss(0, noise), rng.gauss(0, 1)] for own in one] for one in right]
    made = [float(rng.random() < fused) for _ in range(number)]
    return Answered(right, rows, made, range(number) if groups is None else groups)


def test_selection_where_the_features_tell():
    judged = judge(world(60))
    assert judged.choice == SELECT
    gain = judged.gain(SELECT)
    steps = [one - other for one, other in zip(judged.select, judged.members[judged.best], strict=True)]
    assert gain.difference.value == pytest.approx(statistics.mean(steps))
    assert gain.difference.error == pytest.approx(statistics.stdev(steps) / 60**0.5)
    assert all(one <= most for one, most in zip(judged.select, judged.oracle, strict=True))


def test_one_member_where_they_do_not():
    judged = judge(world(60, rates=(0.3, 0.9), noise=50.0))
    assert judged.choice == judged.best == 1
    assert judged.nested == judged.members[1]


def test_the_fusion_where_it_is_best():
    assert judge(world(60, noise=50.0, fused=0.95)).choice == FUSION


@pytest.mark.parametrize("question", [0, 7])
def test_no_question_is_judged_by_what_has_seen_it(question):
    """So its labels turn only its own scores around."""
    given = world(24, noise=0.8, fused=0.0)
    given = Answered([[one, 1 - one] for one, _ in given.right], given.rows, given.fused, given.groups)
    turned = [[1 - score for score in scores] if at == question else scores for at, scores in enumerate(given.right)]
    one, other = judge(given), judge(Answered(turned, given.rows, given.fused, given.groups))
    assert other.select[question] == pytest.approx(1 - one.select[question])
    assert other.nested[question] == pytest.approx(1 - one.nested[question])


def test_no_choice_fits_on_what_it_is_judged_on(monkeypatch):
    """Inside the outer part, the inner cross-validation fits on neither."""
    choose, fit, held, num = fitting._chosen, fitting._fit, [], []

    def chosen(answered, rest, part, seed):
        held.append({answered.groups[one] for one in part})
        try:
            return choose(answered, rest, part, seed)
        finally:
            held.pop()

    def fitted(answered, questions):
        num.append(1)
        assert not held or held[-1].isdisjoint(answered.groups[one] for one in questions)
        return fit(answered, questions)

    monkeypatch.setattr(fitting, "_chosen", chosen)
    monkeypatch.setattr(fitting, "_fit", fitted)
    judge(world(20, groups=[number // 2 for number in range(20)]))
    assert len(num) > 3 * 10 + 3 * 10 * 5


def test_equal_questions_stay_in_one_part():
    groups = [number % 7 for number in range(30)]
    for number in (2, 5, 10):
        parts = parts_of(groups, range(30), number, 3)
        assert len(parts) == min(number, 7) and sorted(sum(parts, [])) == list(range(30))
        kinds = [{groups[one] for one in part} for part in parts]
        assert sum(map(len, kinds)) == 7
    assert parts_of(groups, range(30), 5, 3) == parts_of(groups, range(30), 5, 3) != parts_of(groups, range(30), 5, 4)


@pytest.mark.parametrize(("score", "said"), [(1.0, "all candidates of the 3 questions were right"), (0.0, "wrong")])
def test_three_questions_all_right_or_all_wrong(score, said, recwarn):
    rows = [[[0.1 * k, None], [0.3, None]] for k in range(3)]
    judged = judge(Answered([[score, score]] * 3, rows, [score] * 3, range(3)))
    assert judged.choice == 0 and judged.select == judged.nested == [score] * 3
    assert said in judged.calibration.note
    assert not recwarn.list


def test_a_member_without_an_answer_is_not_selected():
    judged = judge(Answered([[1.0, 0.0]] * 8, [[[1.0], None]] * 8, [0.0] * 8, range(8)))
    assert judged.select == [1.0] * 8


def test_one_question_cannot_be_judged():
    with pytest.raises(ValueError, match="The questions must be 2 or more different ones, but are 1"):
        judge(world(4, groups=[0] * 4))


def test_what_is_chosen():
    ones, none = [1.0] * 10, [0.0] * 10
    half = [1.0] * 5 + [0.0] * 5
    assert choice_of([half, half], half, half) == 0  # equals: the first member, which costs least
    assert choice_of([none, half], none, ones) == SELECT == choice_of([none, half], ones, ones)
    assert choice_of([none, half], ones, half) == FUSION
    one_won = [1.0] * 6 + [0.0] * 4  # one question won is one standard error, and no more
    assert choice_of([half, none], half, one_won) == 0
    two_won = [1.0] * 7 + [0.0] * 3
    assert choice_of([half, none], half, two_won) == SELECT


def test_no_questions_cannot_be_judged_and_the_error_says_that_there_are_none():
    with pytest.raises(ValueError, match="The questions must be 2 or more different ones, but are 0:"):
        judge(Answered([], [], [], []))
