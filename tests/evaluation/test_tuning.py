"""The search for settings, driven with made-up candidates: what it finds, what it costs, what it may not see."""

from __future__ import annotations

import functools
import random

import pytest

from hf_adafuse.config import PRESETS, AdaFuseConfig
from hf_adafuse.decoding.strategies.registry import STRATEGIES
from hf_adafuse.evaluation.candidates import RULES, Candidate, make_candidates, rules_named, with_own_settings
from hf_adafuse.evaluation.halving import first_questions, most_answers, search
from hf_adafuse.evaluation.paired import mean
from hf_adafuse.evaluation.tuning import make_plan, tune

MEMBERS = [Candidate((0,)), Candidate((1,))]
RATES = [0.4, 0.25, *[0.2 + 0.01 * k for k in range(30)], 0.65]  # of two members and 31 ensembles, the last the best
MADE_UP = [*MEMBERS, *(Candidate((0, 1), f"rule {k}") for k in range(31))]


class World:
    """Candidates that answer each question with a chance of their own; easy questions are easy for all."""

    def __init__(self, rates, seed=0, num_questions=200):
        self.rates = dict(zip([c.show("ab") for c in MADE_UP], rates))
        chance = random.Random(seed)
        self.luck = {
            name: [0.7 * shared + 0.3 * chance.random() for shared in self._shared(seed, num_questions)]
            for name in self.rates
        }
        self.calls = []

    @staticmethod
    @functools.cache
    def _shared(seed, num_questions):
        chance = random.Random(f"shared {seed}")
        return [chance.random() for _ in range(num_questions)]

    def evaluate(self, candidate, questions):
        self.calls.append((candidate, list(questions)))
        name = candidate.show("ab")
        return [float(self.luck[name][question] < self.rates[name]) for question in questions]

    @property
    def num_answers(self):
        return sum(len(questions) for _, questions in self.calls)


@functools.cache
def tuned(seed, **options):
    world = World(RATES, seed)
    return world, tune(MADE_UP, range(200), world.evaluate, seed=seed, **options)


def test_the_best_is_found_nearly_always():
    assert sum(tuned(seed)[1].winner == len(MADE_UP) - 1 for seed in range(40)) >= 38


def test_never_below_the_best_member_on_the_questions_that_were_asked():
    worse = [0.4, 0.25] + [0.3] * 31  # where the best of many is above by luck alone
    for seed in range(40):
        for rates, min_gain in ((RATES, 1.0), (worse, 1.0), (worse, 0.0)):
            found = tune(MADE_UP, range(200), World(rates, seed).evaluate, seed=seed, min_gain=min_gain)
            means = [mean(scores).value for scores in found.search.scores]
            assert max(means[:2]) == means[found.member]
            whole = {one: mean(found.search.scores[one] + held).value for one, held in found.held_out_scores.items()}
            assert whole[found.winner] >= max(whole[0], whole[1])
            if found.winner == found.ensemble:
                assert means[found.winner] >= means[found.member]
            assert all(len(found.search.scores[one]) == 140 for one in (0, 1, found.ensemble, found.winner))


@pytest.mark.parametrize("number", range(11, 40))
def test_one_lucky_question_is_not_more_than_a_standard_error(number):
    """Whatever the rounding: the difference is one standard error exactly."""

    def evaluate(candidate, asked):
        return [float(not candidate.is_alone and one == plan.searched[0]) for one in asked]

    plan = make_plan(3, 2, range(number), 0.3, 0)
    found = tune([*MEMBERS, Candidate((0, 1), "rule")], range(number), evaluate)
    assert (found.gain.wins, found.gain.losses) == (1, 0)
    assert found.winner == 0 and not found.is_above


def test_a_finer_measure_decides_between_the_best():
    names = ["coarse", "fine", "third"]
    choices = [*MEMBERS, *(Candidate((0, 1), name) for name in names)]

    def evaluate(candidate, asked):
        return [float(not candidate.is_alone) for _ in asked]

    found = tune(choices, range(40), evaluate, tie_break=lambda one, asked: float("fine" in one.show("ab")))
    assert choices[found.winner].show("ab") == "a + b: fine"


def test_where_no_ensemble_is_chosen_the_member_is_the_best_of_all_questions():
    right = {"a alone": (0.5, 0.25), "b alone": (0.45, 0.75), "a + b: rule": (0.4, 0.4)}
    held_out = make_plan(3, 2, range(40), 0.3, 0).held_out

    def evaluate(candidate, asked):
        return [right[candidate.show("ab")][one in held_out] for one in asked]

    found = tune([*MEMBERS, Candidate((0, 1), "rule")], range(40), evaluate)
    assert (found.member, found.held_out_member, found.whole_member, found.winner) == (0, 1, 1, 1)


def test_a_member_wins_ties():
    found = tune(MADE_UP, range(40), lambda candidate, asked: [float(question % 2) for question in asked], min_gain=0)
    assert found.winner == found.member == 0
    assert found.gain.difference.value == 0


def test_a_gain_within_the_error_is_no_reason_for_an_ensemble():
    """Ensembles like the best member: the best of them is above it by luck, and is taken far less often."""
    rates = [0.4, 0.25] + [0.4] * 31
    taken = [
        sum(tune(MADE_UP, range(200), World(rates, seed).evaluate, min_gain=z).winner > 1 for seed in range(40))
        for z in (0.0, 1.0, 3.0)
    ]
    assert taken[0] > taken[1] > taken[2] == 0


def test_the_same_by_the_seed_alone():
    world, first = tuned(3)
    again = World(RATES, 3)
    second = tune(MADE_UP, range(200), again.evaluate, seed=3)
    assert again.calls == world.calls
    assert second == first
    assert tune(MADE_UP, range(200), again.evaluate, seed=4).held_out != first.held_out


def test_few_answers_are_asked_for_and_none_twice():
    for seed in range(10):
        world, found = tuned(seed)
        asked = [(candidate.show("ab"), question) for candidate, questions in world.calls for question in questions]
        assert len(asked) == len(set(asked))
        assert world.num_answers <= found.plan.most
        assert found.plan.most < 0.5 * len(MADE_UP) * 200
        judging = 3 * len(found.held_out)
        assert found.search.num_answers == world.num_answers - judging


def test_members_are_asked_everything():
    found = tuned(0)[1]
    assert [len(found.search.scores[one]) for one in (0, 1)] == [140, 140]
    assert set(found.held_out_scores) == {0, 1, found.ensemble}
    assert {len(scores) for scores in found.held_out_scores.values()} == {60}


def test_the_search_does_not_see_what_is_held_out():
    world, found = tuned(1)
    held_out = set(found.held_out)
    assert sorted([*found.held_out, *found.plan.searched]) == list(range(200))
    first = next(at for at, (_, questions) in enumerate(world.calls) if held_out & set(questions))
    assert all(set(questions) <= held_out for _, questions in world.calls[first:])
    assert len(world.calls) - first == 3

    def lying(candidate, questions):  # the opposite, of what is held out alone
        scores = world.evaluate(candidate, questions)
        return [1 - score if question in held_out else score for question, score in zip(questions, scores)]

    other = tune(MADE_UP, range(200), lying, seed=1)
    assert (other.ensemble, other.member, other.search) == (found.ensemble, found.member, found.search)
    assert found.winner == found.ensemble
    assert other.winner == other.member  # which is all that it can do


def test_held_out_an_ensemble_stands_against_the_member_that_is_best_there():
    """Which another one may be than on the questions searched."""
    right = {"a alone": (0.5, 0.25), "b alone": (0.25, 0.75)}

    def tuned(ensemble_held_out):
        rates = right | {"a + b: rule": (0.75, ensemble_held_out)}
        held_out = make_plan(3, 2, range(40), 0.3, 0).held_out

        def evaluate(candidate, asked):
            rate = rates[candidate.show("ab")]
            return [rate[one in held_out] + (0.01 if one % 2 else -0.01) for one in asked]

        return tune([*MEMBERS, Candidate((0, 1), "rule")], range(40), evaluate)

    for held_out, gain in ((0.5, -0.25), (0.75, 0.0), (1.0, 0.25)):
        found = tuned(held_out)
        assert (found.member, found.held_out_member, found.ensemble) == (0, 1, 2)
        assert found.held_out_gain.difference.value == pytest.approx(gain)
        assert found.winner == (2 if gain >= 0 else 0)
        assert found.gain.difference.value == pytest.approx(0.25)


def test_figures_of_what_is_held_out_are_honest():
    """Those searched on flatter the ensemble that was chosen for them; those held out do not."""
    rates = [0.4, 0.25] + [0.4] * 31
    found = [tune(MADE_UP, range(200), World(rates, seed).evaluate, seed=seed) for seed in range(60)]
    seen = mean([one.gain.difference.value for one in found])
    honest = mean([one.held_out_gain.difference.value for one in found])
    assert seen.value > 5 * seen.error
    assert abs(honest.value) < 3 * honest.error


@pytest.mark.parametrize("budget", [600, 800, 1200])
def test_a_budget_is_kept(budget):
    world = World(RATES)
    found = tune(MADE_UP, range(200), world.evaluate, budget=budget)
    assert world.num_answers <= found.plan.most <= budget
    assert found.held_out == tune(MADE_UP, range(200), world.evaluate).held_out
    assert len(found.plan.searched) < 140


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"budget": 100}, "`budget` must be at least 246, but is 100. Of these the questions held out take 180"),
        ({"holdout": 0.0}, "`holdout` must be above 0 and below 1, but is 0.0"),
        ({"holdout": 1.0}, "`holdout` must be above 0 and below 1, but is 1.0"),
    ],
)
def test_what_cannot_be_planned(options, expected):
    with pytest.raises(ValueError, match=expected):
        tune(MADE_UP, range(200), World(RATES).evaluate, **options)


def test_few_questions():
    with pytest.raises(ValueError, match="The questions must be 10 or more, but are 9"):
        tune(MADE_UP, range(9), World(RATES).evaluate)
    found = tune(MADE_UP, range(10), World(RATES).evaluate)
    assert (len(found.plan.searched), len(found.held_out)) == (7, 3)


class TestGroups:
    """Questions that are equal: where one is held out, none of them is searched."""

    @staticmethod
    def split(sizes, **options):
        """The groups on both sides, of questions in so many groups of these sizes, in any order."""
        groups = [group for group, size in enumerate(sizes) for _ in range(size)]
        random.Random(7).shuffle(groups)
        plan = make_plan(
            len(MADE_UP), 2, range(len(groups)), **{"holdout": 0.3, "seed": 0, **options}, group=groups.__getitem__
        )
        assert sorted([*plan.searched, *plan.held_out]) == list(range(len(groups)))
        return [[groups[one] for one in side] for side in (plan.searched, plan.held_out)]

    @pytest.mark.parametrize("sizes", [[2] * 20, [1, 3] * 20, [1] * 11 + [90], [1] * 9 + [2]])
    @pytest.mark.parametrize("seed", range(5))
    def test_they_stay_together(self, sizes, seed):
        searched, held_out = self.split(sizes, seed=seed)
        assert not set(searched) & set(held_out)
        assert len(set(held_out)) == round(0.3 * len(sizes))

    def test_without_equal_ones_nothing_changes(self):
        plan = make_plan(len(MADE_UP), 2, range(40), 0.3, 5)
        assert self.split([1] * 40, seed=5) != self.split([1] * 40, seed=6)
        shuffled = list(range(40))
        random.Random(5).shuffle(shuffled)
        assert (plan.held_out, plan.searched) == (shuffled[:12], shuffled[12:])

    def test_they_count_once(self):
        with pytest.raises(ValueError, match="must be 10 or more, but are 9 different ones, on 27 lines"):
            self.split([3] * 9)

    def test_of_a_search(self):
        world = World(RATES)
        found = tune(MADE_UP, range(200), world.evaluate, group=lambda question: question // 4)
        assert not {one // 4 for one in found.held_out} & {one // 4 for one in found.plan.searched}


def test_looks_are_told_with_what_is_still_to_come():
    told = []
    world = World(RATES)
    found = tune(MADE_UP, range(200), world.evaluate, on_look=lambda look, most: told.append((look, most)))
    assert [look for look, _ in told] == found.search.looks
    assert told[-1][1] == 3 * 60
    asked, done = 0, iter(world.calls)
    for look, most in told:
        before = [len(MADE_UP)] + [len(one.left) for one in found.search.looks]
        asked += sum(len(next(done)[1]) for _ in range(before[found.search.looks.index(look)]))
        assert asked + most <= found.plan.most


class TestHalving:
    def test_the_better_half_goes_on(self):
        def evaluate(one, asked):  # as many wins as losses against any other: nothing is significant
            return [1 - one / 200 if question % 2 else one / 100 for question in asked]

        found = search(9, {0}, range(40), evaluate, first=8)
        assert [(look.num_questions, look.left, look.halved) for look in found.looks] == [
            (8, [0, 5, 6, 7, 8], [1, 2, 3, 4]),
            (16, [0, 7, 8], [5, 6]),
            (24, [0, 7, 8], []),
            (32, [0, 8], [7]),
            (40, [0, 8], []),
        ]
        assert [len(scores) for scores in found.scores] == [40, 8, 8, 8, 8, 16, 16, 32, 40]
        assert found.best([0, 8]) == 8

    def test_a_significantly_worse_one_leaves_sooner(self):
        chance = random.Random(0)
        rates = [0.5, 0.5, 0.05, 0.9]
        found = search(4, {0}, range(128), lambda one, asked: [float(chance.random() < rates[one]) for _ in asked], 64)
        left = next(look.num_questions for look in found.looks if 2 in look.worse)
        assert left < 64
        assert 3 in found.finalists and 0 in found.finalists

    def test_lots_decide_among_equals(self):
        """Not the order of the table, whose first half has another main model than the second."""
        staying = set()
        for seed in range(20):
            found = search(9, {0}, range(16), lambda one, asked: [0.5] * len(asked), 8, seed=seed)
            again = search(9, {0}, range(16), lambda one, asked: [0.5] * len(asked), 8, seed=seed)
            assert found == again
            staying.add(tuple(found.looks[0].left))
        assert len(staying) > 10 and all(len(left) == 5 for left in staying)

    def test_a_finer_measure_comes_before_lots(self):
        seen = []

        def tie_break(one, asked):
            seen.append(list(asked))
            return float(one in (2, 5, 7, 8))

        found = search(9, {0}, range(16), lambda one, asked: [0.5] * len(asked), 8, tie_break=tie_break)
        assert found.looks[0].left == [0, 2, 5, 7, 8]
        assert {tuple(asked) for asked in seen} == {tuple(range(8)), tuple(range(16))}  # and at the end
        assert found.best([0, 2, 5]) == 2

    def test_a_few_unlucky_answers_are_not_significant(self):
        found = search(3, {0}, range(8), lambda one, asked: [float(one != 1 or k > 2) for k in range(8)], 8)
        assert found.finalists == [0, 1, 2]

    def test_one_that_may_leave_is_always_left(self):
        found = search(3, {0}, range(64), lambda one, asked: [float(one == 0)] * len(asked), 32)
        assert len(found.finalists) == 2
        assert len(found.scores[found.finalists[1]]) == 64

    @pytest.mark.parametrize("num", [3, 10, 33, 200])
    @pytest.mark.parametrize("questions", [5, 40, 300])
    def test_the_most_is_what_a_search_takes_without_early_leaves(self, num, questions):
        first = first_questions(num, 2, questions)
        found = search(num, {0, 1}, range(questions), lambda one, asked: [0.5] * len(asked), first)
        assert found.num_answers == most_answers(num, 2, questions, first)
        assert found.num_answers <= num * questions


class TestCandidates:
    def test_every_member_every_main_member_every_rule(self):
        made = make_candidates(2)
        assert [one.members for one in made[:2]] == [(0,), (1,)]
        assert len(made) == 2 + 2 * len(RULES)
        assert {one.members for one in made[2:]} == {(0, 1), (1, 0)}
        assert made[2].show(["a", "b"]) == "a + b: span"
        assert made[2].config == AdaFuseConfig()
        assert (made[0].show(["a", "b"]), made[0].config) == ("a alone", None)

    def test_three_members_and_their_pairs(self):
        made = make_candidates(3, {"word 3:1": RULES["word 3:1"]})
        assert [one.members for one in made[:3]] == [(0,), (1,), (2,)]
        assert {one.members for one in made[3:]} == {
            (0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1), (0, 1, 2), (1, 0, 2), (2, 0, 1)
        }  # fmt: skip
        assert made[-1].config.model_weights == (3, 1, 1)

    def test_rules_by_name(self):
        found = rules_named(["unite", "word 3:1", "robust"])
        assert found == {"unite": {"method": "unite"}, "word 3:1": RULES["word 3:1"], "robust": PRESETS["robust"]}
        assert rules_named(["rules"]) == RULES
        assert list(rules_named(["all"])) == ["robust", *STRATEGIES]
        assert [one.rule for one in make_candidates(2, found)[2:]] == ["unite", "word 3:1", "robust"] * 2
        with pytest.raises(ValueError, match=r"`--methods` must be all, rules, or of \[.+\], but has \['unit'\]"):
            rules_named(["unit", "unite"])

    def test_of_rules_with_the_same_settings_the_first_is_tried(self):
        made = make_candidates(2, rules_named(["adafuse", "rules", "unite"]))
        assert len(made) == 2 + 2 * len(RULES)
        assert "adafuse" in {one.rule for one in made} and not {"span", "unite"} & {one.rule for one in made}

    def test_rules_are_valid_and_unlike(self):
        configs = [one.config for one in make_candidates(3) if one.members == (0, 1, 2)]
        assert len(set(configs)) == len(configs) == len(RULES)

    @pytest.mark.parametrize(
        ("stored", "settings"),
        [
            ({"num_branches": 5}, {"num_branches": 5}),
            ({"model_weights": [2, 1], "fusion": "word", "max_words": 3}, {"fusion": "word", "model_weights": (2, 1)}),
            ({"max_words": 2, "do_sample": False}, {"max_words": 2}),
        ],
    )
    def test_settings_of_the_main_model(self, stored, settings):
        made = make_candidates(2)
        added = with_own_settings(made, [None, AdaFuseConfig.from_dict(stored)])
        assert added[:-1] == made
        assert added[-1] == Candidate((1, 0), "the model's own settings", settings)
        assert added[-1].config == AdaFuseConfig(**settings)
        assert added[-1].show("ab") == "b + a: the model's own settings"

    @pytest.mark.parametrize(
        "stored",
        [None, AdaFuseConfig(), AdaFuseConfig.robust(), AdaFuseConfig(do_sample=True, max_words=1)],
        ids=str,
    )
    def test_settings_that_are_no_candidate_of_their_own(self, stored):
        """None, those of a rule, and those of texts that are drawn."""
        assert with_own_settings(make_candidates(2), [stored, stored]) == make_candidates(2)

    def test_settings_with_weights_for_some_choices_of_members(self):
        made = make_candidates(3)
        added = with_own_settings(made, [AdaFuseConfig(model_weights=(5, 1)), None, None])[len(made) :]
        assert [one.members for one in added] == [(0, 1), (0, 2)]
        added = with_own_settings(made, [AdaFuseConfig(model_weights=(5, 1, 1)), None, None])[len(made) :]
        assert [one.members for one in added] == [(0, 1, 2)]

    def test_one_member_is_too_few(self):
        with pytest.raises(ValueError, match="The members must be 2 or more, but are 1"):
            make_candidates(1)
