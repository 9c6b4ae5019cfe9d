"""What goes into a pass, whose pass is next, what pays ahead: on made-up curves of costs and opaque nodes."""

from __future__ import annotations

import random

import pytest
import torch

from hf_adafuse.trees.pass_costs import PassCosts
from hf_adafuse.trees.pass_policy import (
    AcceleratorPolicy,
    PassLimits,
    Policy,
    PromptNeeds,
    next_member,
    pays_ahead,
    plan_pass,
    policy_for,
    room_in_tree,
    urgency,
    worthwhile_size,
)

CONSTANTS = dict(
    worthwhile_ratio=1.8,
    prefetched_tokens=8,
    most_held_nodes=14,
    tokens_per_held_node=12,
    batch_extra=1,
    urgency_power=2,
    padded_pass_tokens=32,
    padded_width=4,
    keeping_share=0.4,
    passes_to_propose=2.0,
    agreement=0.5,
)


@pytest.fixture(autouse=True)
def _constants(monkeypatch, look_ahead):
    """The expectations below are derived from these, whatever the policy is tuned to (`speculation` sets some too)."""
    for name, value in CONSTANTS.items():
        assert hasattr(Policy, name)
        monkeypatch.setattr(Policy, name, value)


def curve(points):
    return PassCosts(points, is_measured=False)


FLAT = curve({1: 1.0})
STEEP = curve({1: 1.0, 2: 2.0, 4: 8.0, 8: 64.0})
RISING = curve({1: 1.0, 65: 17.0})  # a quarter more for each token after the first
PADDED = PassLimits(Policy, is_padded=True)


class Accelerator(AcceleratorPolicy):
    prefetched_tokens, most_held_nodes, batch_extra = 8, 14, 3


def nodes(number):
    return [object() for _ in range(number)]


def never():
    raise AssertionError("was asked for likely nodes")


# How far a pass is filled up


@pytest.mark.parametrize(
    ("costs", "num_needed", "expected"),
    [
        (FLAT, 1, 8),
        (FLAT, 8, 8),
        (FLAT, 9, 9),  # larger than what is ever filled up
        (STEEP, 1, 1),  # 2 > 1.8
        (STEEP, 2, 2),  # three tokens cost 5 > 3.6
        (RISING, 1, 4),  # 1.75 <= 1.8 < 2
        (RISING, 3, 7),  # 1.5 * 1.8 = 2.7, between 2.5 and 2.75
        (RISING, 4, 8),  # 1.75 * 1.8 = 3.15 would do for 9
        (curve({1: 1.0, 2: 2.0, 4: 1.5}), 1, 8),  # over the hump
    ],
)
def test_worthwhile_size(costs, num_needed, expected):
    assert worthwhile_size(num_needed, costs, Policy) == expected


def test_a_pass_at_the_bound_is_still_worth_it(monkeypatch):
    monkeypatch.setattr(Policy, "worthwhile_ratio", 2.0)
    assert worthwhile_size(1, RISING, Policy) == 5  # it costs 2


@pytest.mark.parametrize(
    ("num_held", "prefix_length", "expected"),
    [
        (0, 0, 14),
        (14, 0, 0),
        (20, 0, -6),
        (3, 179, 11),  # 179 // 12 = 14, no more than there is anyway
        (3, 180, 12),
    ],
)
def test_room_in_tree(num_held, prefix_length, expected):
    assert room_in_tree(num_held, prefix_length, Policy) == expected


def test_an_accelerator_has_constants_of_its_own():
    assert policy_for(torch.device("cpu")) is Policy and policy_for(torch.device("cuda", 1)) is AcceleratorPolicy
    assert worthwhile_size(3, FLAT, AcceleratorPolicy) == AcceleratorPolicy.prefetched_tokens > 8
    assert room_in_tree(10, 0, AcceleratorPolicy) == AcceleratorPolicy.most_held_nodes - 10 > 4
    needs = {0: PromptNeeds([], likely=lambda: nodes(99))}
    limits = PassLimits(AcceleratorPolicy)
    assert len(plan_pass(needs, FLAT, limits)[0]) == AcceleratorPolicy.prefetched_tokens


# A prompt alone


def test_alone_a_pass_is_filled_with_what_is_useful_then_with_what_is_likely():
    needed, useful, likely = nodes(2), nodes(3), nodes(20)
    planned = plan_pass({5: PromptNeeds(needed, useful, lambda: likely)}, FLAT, PassLimits(Policy))
    assert planned == {5: needed + useful + likely[:6]}  # 8 - 2 likely ones


def test_alone_a_pass_of_one_that_is_not_worth_filling_holds_what_is_needed():
    needed = nodes(1)
    assert plan_pass({0: PromptNeeds(needed, nodes(3), never)}, STEEP, PassLimits(Policy)) == {0: needed}


def test_alone_a_slowly_rising_curve_leaves_some_room():
    needed, likely = nodes(1), nodes(20)
    planned = plan_pass({0: PromptNeeds(needed, likely=lambda: likely)}, RISING, PassLimits(Policy))
    assert planned == {0: needed + likely[:3]}  # four cost 1.75


@pytest.mark.parametrize(
    ("num_held", "prefix_length", "expected"),
    [(0, 0, 10), (9, 0, 5), (12, 0, 2), (12, 300, 10)],  # 300 // 12 - 12 = 13 is more than there is
)
def test_alone_room_in_the_tree_bounds_what_comes_along(num_held, prefix_length, expected):
    needed, useful, likely = nodes(1), nodes(2), nodes(7)
    prompt = PromptNeeds(needed, useful, lambda: likely, num_held, prefix_length)
    assert plan_pass({0: prompt}, FLAT, PassLimits(Policy)) == {0: (needed + useful + likely)[:expected]}


@pytest.mark.parametrize("num_held", [11, 14, 40])
def test_alone_without_room_what_is_needed_is_run_and_nobody_asks_what_is_likely(num_held):
    needed = nodes(3)
    prompt = PromptNeeds(needed, nodes(2), never, num_held)
    assert plan_pass({0: prompt}, FLAT, PassLimits(Policy)) == {0: needed}


def test_each_node_goes_once():
    needed, useful, likely = nodes(2), nodes(2), nodes(2)
    twice = PromptNeeds(needed, [needed[1], *useful, useful[0]], lambda: [useful[1], *likely, needed[0]])
    assert plan_pass({0: twice}, FLAT, PassLimits(Policy)) == {0: needed + useful + likely}


# A batch


def test_in_a_batch_each_prompt_has_a_little_more_than_it_needs_whatever_it_costs():
    needed, useful, likely = nodes(2), nodes(1), nodes(9)
    needs = {
        3: PromptNeeds(needed, likely=lambda: likely),
        4: PromptNeeds(needed, useful),
        5: PromptNeeds([], likely=lambda: likely),
        6: PromptNeeds([], useful),
    }
    # 8 // 4, but one more than needed
    expected = {3: [*needed, likely[0]], 4: [*needed, *useful], 5: likely[:2], 6: useful}
    assert plan_pass(needs, STEEP, PassLimits(Policy)) == expected
    more = {3: [*needed, *likely[:3]], 4: [*needed, *useful], 5: likely[:3], 6: useful}
    assert plan_pass(needs, STEEP, PassLimits(Accelerator)) == more


def test_two_prompts_have_four_nodes_each_however_full_their_trees_are():
    likely = nodes(9)
    needs = {row: PromptNeeds(nodes(1), likely=lambda: likely, num_held=50) for row in range(2)}
    assert plan_pass(needs, FLAT, PassLimits(Policy)) == {row: [*needs[row].needed, *likely[:3]] for row in range(2)}


def test_in_a_batch_a_prompt_that_needs_more_than_its_share_has_all_of_it():
    needs = {0: PromptNeeds(nodes(50)), 1: PromptNeeds(nodes(4), nodes(2))}
    expected = {0: needs[0].needed, 1: [*needs[1].needed, needs[1].useful[0]]}
    assert plan_pass(needs, FLAT, PassLimits(Policy)) == expected


# Where shorter rows are filled up


def test_padded_rows_are_filled_up_to_the_widest():
    likely = nodes(9)
    needs = {0: PromptNeeds(nodes(6), nodes(1), never), 1: PromptNeeds(nodes(2), likely=lambda: likely)}
    expected = {0: needs[0].needed, 1: [*needs[1].needed, *likely[:4]]}
    assert plan_pass(needs, FLAT, PADDED) == expected


def test_padded_rows_are_at_least_as_wide_as_their_share():
    likely = nodes(9)
    needs = {row: PromptNeeds(nodes(1), likely=lambda: likely) for row in range(2)}
    assert plan_pass(needs, STEEP, PADDED) == {row: [*needs[row].needed, *likely[:3]] for row in range(2)}  # 8 // 2


@pytest.mark.parametrize(
    ("num_prompts", "expected"),
    # 32 tokens a pass, but four for each at least; a prompt alone is no reason to pad.
    [(1, 40), (2, 16), (3, 10), (8, 4), (16, 4)],
)
@pytest.mark.parametrize("can_prefetch", [True, False])
def test_what_exceeds_a_padded_pass_on_cpu_waits(num_prompts, expected, can_prefetch):
    needs = {row: PromptNeeds(nodes(40 if row == 0 else 1)) for row in range(num_prompts)}
    planned = plan_pass(needs, FLAT, PassLimits(Policy, can_prefetch, is_padded=True))
    assert planned == {row: prompt.needed[:expected] for row, prompt in needs.items()}


@pytest.mark.parametrize("limits", [PassLimits(Accelerator, is_padded=True), PassLimits(Policy)])
def test_nothing_waits_on_an_accelerator_or_without_padding(limits):
    needs = {0: PromptNeeds(nodes(40)), 1: PromptNeeds(nodes(1))}
    assert plan_pass(needs, FLAT, limits) == {row: prompt.needed for row, prompt in needs.items()}


def test_what_waited_goes_in_the_next_passes():
    waiting, passes = {0: nodes(37), 1: nodes(20)}, []
    while any(waiting.values()):
        planned = plan_pass({row: PromptNeeds(left) for row, left in waiting.items()}, FLAT, PADDED)
        passes.append([len(planned[row]) for row in range(2)])
        waiting = {row: [node for node in left if node not in planned[row]] for row, left in waiting.items()}
    assert passes == [[20, 20], [17, 0]]


@pytest.mark.parametrize(
    ("needed", "expected"),
    [
        ([40, 40, 40, 40], [40, 40, 40, 40]),  # nothing is padded
        ([40, 30, 20, 1], [20, 20, 20, 1]),  # half of them need no more
        ([40, 30, 1, 1], [8, 8, 1, 1]),  # 32 / 4
        ([40, 30, 20], [30, 30, 20]),
        ([40, 0, 0], [40, 0, 0]),  # only one waits
    ],
)
def test_what_half_of_the_prompts_need_goes_in_one_pass(needed, expected):
    needs = {row: PromptNeeds(nodes(number)) for row, number in enumerate(needed)}
    planned = plan_pass(needs, FLAT, PassLimits(Policy, can_prefetch=False, is_padded=True))
    assert [len(of_row) for of_row in planned.values()] == expected


# In general


@pytest.mark.parametrize("limits", [PassLimits(Policy, False), PassLimits(Accelerator, False)])
@pytest.mark.parametrize("num_prompts", [1, 3])
def test_a_backend_that_cannot_prefetch_runs_what_is_needed(num_prompts, limits):
    needs = {row: PromptNeeds(nodes(2), nodes(2), never) for row in range(num_prompts)}
    assert plan_pass(needs, FLAT, limits) == {row: prompt.needed for row, prompt in needs.items()}


def test_likely_nodes_are_not_asked_for_where_the_pass_is_full():
    prompt = PromptNeeds(nodes(8), likely=never)  # 8 are needed: none of the likely ones would go
    assert plan_pass({0: prompt}, FLAT, PassLimits(Policy)) == {0: prompt.needed}


@pytest.mark.parametrize("seed", range(100))
def test_what_is_needed_comes_first_and_nothing_comes_twice(seed):
    rng = random.Random(seed)
    needs = {}
    for row in rng.sample(range(40), rng.randint(1, 20)):
        pool = nodes(30)
        useful, likely = rng.choices(pool, k=5), rng.choices(pool, k=5)
        needed = rng.sample(pool, rng.randint(0, 30))
        needs[row] = PromptNeeds(needed, useful, lambda likely=likely: likely, rng.randint(0, 20), rng.randint(0, 400))
    limits = PassLimits(
        can_prefetch=rng.random() < 0.8, is_padded=rng.random() < 0.5, policy=rng.choice([Policy, Accelerator])
    )
    planned = plan_pass(needs, rng.choice([FLAT, STEEP, RISING]), limits)
    lengths = sorted(len(prompt.needed) for prompt in needs.values() if prompt.needed) or [0]
    of_half = lengths[(len(lengths) - 1) // 2]
    most = max(4, 32 // len(needs), of_half) if limits.is_padded and limits.policy is Policy else 30
    assert planned.keys() == needs.keys()
    for row, prompt in needs.items():
        first = prompt.needed[:most]
        assert planned[row][: len(first)] == first
        assert len(set(planned[row])) == len(planned[row])
        assert set(planned[row]) <= {*prompt.needed, *prompt.useful, *prompt.likely()}


# Whose pass is next


@pytest.mark.parametrize(("num_left", "expected"), [(None, 1), (5, 25), (1, 1), (0, 1), (-3, 1)])
def test_urgency(num_left, expected):
    assert urgency(num_left, Policy) == expected


@pytest.mark.parametrize(
    ("num_waiting", "current", "expected"),
    [
        ([3, 4], 0, 0),  # 3 > 0.4 * 7
        ([2, 3], 0, 1),  # 2 is just 0.4 * 5
        ([2, 3], 1, 1),
        ([3, 1, 3], 1, 0),  # the first of the most wanted
        ([0, 0, 1], 0, 2),
        ([0, 1], 1, 1),
        ([0, 0], 1, 0),  # nobody waits for it
    ],
)
def test_next_member(num_waiting, current, expected):
    assert next_member(num_waiting, current, keeping_share=0.4) == expected


# What pays ahead


@pytest.mark.parametrize(
    ("win_probability", "turn_cost", "saved", "expected"),
    [
        (0.5, 1.0, 1.0, False),  # nothing is won
        (0.5, 1.0, 1.25, True),
        (0.5, 1.25, 1.0, False),
        (0.75, 3.0, 1.0, False),  # 0.75 - 0.25 * 3
        (0.75, 2.0, 1.0, True),
        (1.0, 100.0, 0.5, True),  # nothing can be lost
        (1.0, 100.0, 0.0, False),
        (0.0, 0.0, 100.0, False),
    ],
)
def test_pays_ahead(win_probability, turn_cost, saved, expected):
    assert pays_ahead(win_probability, turn_cost, saved) is expected


def test_the_constants_are_those_of_the_policy():
    names = {name for name in vars(Policy) if not name.startswith("_")}
    elsewhere = {"most_shared_columns", "max_rounds_ahead", "least_shared_tokens", "longest_draft", "least_right"}
    elsewhere |= {"least_static_columns", "is_filled_up", "most_prompt_tokens"}
    assert names - set(CONSTANTS) == elsewhere
