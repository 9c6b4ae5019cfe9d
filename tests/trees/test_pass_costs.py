"""The curve of what passes cost: a stated prior, scaled by what has been measured, on a clock of our own."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from hf_adafuse.trees import pass_costs
from hf_adafuse.trees.pass_costs import ACCELERATOR_PRIOR, CPU_PRIOR, PassCosts, costs_of


@pytest.fixture
def measure(monkeypatch):
    """Runs passes that take so many seconds each."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(pass_costs, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def run(costs, num_tokens, seconds, times=1):
        for _ in range(times):
            with costs.measured(num_tokens):
                clock.now += seconds

    return run


def seconds(costs, *sizes):
    return [costs.seconds(size) for size in sizes]


# The prior


def test_between_its_points_the_prior_is_a_line():
    costs = PassCosts({1: 1.0, 2: 2.0, 10: 6.0})
    assert seconds(costs, 1, 2, 4, 6, 10) == [1.0, 2.0, 3.0, 4.0, 6.0]


def test_outside_its_points_the_prior_is_level():
    assert seconds(PassCosts({4: 3.0, 8: 5.0}), 0, 1, 3, 8, 9, 64) == [3.0, 3.0, 3.0, 5.0, 5.0, 5.0]


def test_the_points_of_a_prior_may_come_in_any_order():
    assert seconds(PassCosts({10: 6.0, 2: 2.0, 1: 1.0}), 1, 2, 6) == [1.0, 2.0, 4.0]


def test_more_tokens_than_the_last_size_cost_as_much_as_that():
    costs = PassCosts({1: 1.0, 512: 512.0})
    assert seconds(costs, 64, 65, 1000) == [64.0, 64.0, 64.0]


# Measuring


def test_what_is_measured_replaces_the_prior(measure):
    costs = PassCosts({1: 1.0})
    measure(costs, 1, 5.0, times=4)
    assert costs.seconds(1) == 5.0


def test_the_cost_of_a_size_is_the_mean(measure):
    costs = PassCosts({1: 1.0})
    for taken in (2.0, 4.0, 8.0, 2.0):
        measure(costs, 1, taken)
    assert costs.seconds(1) == pytest.approx(4.0)


def test_one_measured_size_scales_the_whole_prior(measure):
    costs = PassCosts({1: 1.0, 2: 2.0, 8: 4.0})
    measure(costs, 2, 6.0, times=4)  # three times the prior
    assert seconds(costs, 1, 2, 5, 8, 64) == pytest.approx([3.0, 6.0, 9.0, 12.0, 12.0])


def test_between_two_measured_sizes_the_scale_is_a_line(measure):
    costs = PassCosts({1: 1.0, 9: 9.0})
    measure(costs, 2, 4.0, times=4)  # twice the prior
    measure(costs, 8, 64.0, times=4)  # eight times
    # Between: 2 + 6 * (n - 2) / 6 times n; outside the nearer one counts.
    assert seconds(costs, 1, 2, 4, 5, 8, 9) == pytest.approx([2.0, 4.0, 16.0, 25.0, 64.0, 72.0])


def test_a_pass_counts_for_the_next_larger_size(measure):
    costs = PassCosts({1: 1.0})
    measure(costs, 5, 3.0, times=4)  # for 8
    measure(costs, 9, 5.0, times=4)  # for 16
    assert seconds(costs, 8, 16) == [3.0, 5.0]
    assert costs.seconds(12) == 4.0


@pytest.mark.parametrize(("times", "expected"), [(2, 1.0), (3, 5.0)])
def test_fewer_than_three_measurements_are_not_trusted(measure, times, expected):
    costs = PassCosts({1: 1.0})
    measure(costs, 64, 1.0, times=4 - times)  # the curve is drawn anew after four passes; this size is as by the prior
    measure(costs, 1, 5.0, times=times)
    assert costs.seconds(1) == expected


def test_the_curve_is_drawn_after_every_fourth_pass(measure):
    costs, seen = PassCosts({1: 1.0}), []
    for taken in (5.0,) * 4 + (13.0,) * 4:
        measure(costs, 1, taken)
        seen.append(costs.seconds(1))
    assert seen == pytest.approx([1.0] * 3 + [5.0] * 4 + [9.0])


def test_passes_larger_than_all_sizes_do_not_count(measure):
    costs = PassCosts({1: 1.0})
    measure(costs, 65, 50.0, times=8)
    assert seconds(costs, 1, 64, 65) == [1.0, 1.0, 1.0]


def test_old_measurements_fade(measure):
    costs = PassCosts({1: 1.0})
    measure(costs, 1, 2.0, times=32)
    measure(costs, 1, 34.0, times=4)
    # Each of the last four takes away 1 / 32 of what is missing of 34.
    assert costs.seconds(1) == pytest.approx(34 - 32 * (31 / 32) ** 4)


def test_a_pass_that_fails_does_not_count(measure):
    costs = PassCosts({1: 1.0})
    for _ in range(8):
        with pytest.raises(MemoryError), costs.measured(1):
            raise MemoryError
    measure(costs, 1, 5.0, times=3)
    assert costs.seconds(1) == 1.0
    measure(costs, 1, 5.0)
    assert costs.seconds(1) == 5.0


def test_without_measuring_the_prior_is_all_there_is(measure):
    costs = PassCosts({1: 1.0, 2: 2.0}, is_measured=False)
    measure(costs, 1, 5.0, times=8)
    assert seconds(costs, 1, 2) == [1.0, 2.0]


def test_where_processes_share_a_model_the_prior_is_all_there_is(measure, monkeypatch):
    costs = PassCosts({1: 1.0, 2: 2.0})
    measure(costs, 1, 5.0, times=4)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert seconds(costs, 1, 2) == [1.0, 2.0]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    assert seconds(costs, 1, 2) == [5.0, 10.0]


# The costs of a model

CPU, META, CUDA = torch.device("cpu"), torch.device("meta"), torch.device("cuda")


def model(num_bytes=4000):
    return torch.nn.Linear(num_bytes // 4, 1, bias=False)


def test_a_model_has_one_object_for_each_device():
    first, second = model(), model()
    costs = costs_of(first, CPU)
    assert costs_of(first, torch.device("cpu")) is costs
    assert costs_of(second, CPU) is not costs
    assert costs_of(first, META) is not costs
    assert costs_of(first, torch.device("cuda", 0)) is not costs_of(first, torch.device("cuda", 1))


def test_the_costs_of_a_model_die_with_it():
    owner = model()
    reference = weakref.ref(costs_of(owner, CPU))
    assert reference() is not None
    del owner
    gc.collect()
    assert reference() is None


def test_on_cpu_the_prior_is_the_measured_curve_times_the_reading_of_the_weights():
    costs = costs_of(model(4000), CPU)
    one = 4000 / 1e10  # bytes, bytes per second
    assert [costs.seconds(size) / one for size in CPU_PRIOR] == pytest.approx(list(CPU_PRIOR.values()))
    assert costs.seconds(1) == pytest.approx(one)


@pytest.mark.parametrize("device", [META, CUDA, torch.device("cuda", 1)], ids=str)
def test_on_an_accelerator_many_tokens_cost_like_one(device):
    costs = costs_of(model(4000), device)
    assert seconds(costs, 1, 8, 64) == pytest.approx([4000 / 1e12] * 3)
    assert ACCELERATOR_PRIOR[1] == ACCELERATOR_PRIOR[64] == 1.0


def test_the_weights_are_counted_in_bytes():
    half = torch.nn.Linear(1000, 1, bias=False, dtype=torch.float16)
    assert costs_of(half, CPU).seconds(1) == pytest.approx(2000 / 1e10)
