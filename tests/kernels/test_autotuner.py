"""The quickest of several ways is found by using them."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_adafuse.kernels import autotuner as autotuner_module
from hf_adafuse.kernels.autotuner import Autotuner, timing_allowed
from hf_adafuse.trees.pass_costs import PassCosts


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(autotuner_module.time, "perf_counter", lambda: now[0])
    return now


def taking(clock, seconds):
    """Work that takes so long by each way: a number, or one for each time; and the ways that were taken."""
    taken = []

    def work(way):
        times = seconds[way]
        clock[0] += times[taken.count(way)] if isinstance(times, list) else times
        taken.append(way)
        return way.upper()

    return work, taken


def test_all_are_tried_in_turn_and_the_quickest_is_taken(clock):
    work, _ = taking(clock, {"a": 1.1, "b": 1.0, "c": 1.2})
    race, before = Autotuner(["a", "b", "c"]), Autotuner.num_trials
    assert [race.run(work) for _ in range(15)] == list("ABCABCABCABCBBB")
    assert race.winner == "b" and Autotuner.num_trials == before + 12


def test_much_slower_ones_leave_before(clock):
    work, taken = taking(clock, {"a": 1.0, "b": 5.0, "c": 1.1, "d": 1.6})
    race = Autotuner(["a", "b", "c", "d"])
    for _ in range(14):
        race.run(work)
    assert taken == list("abcdabcdacacaa") and race.winner == "a"


def test_one_that_was_held_up_once_may_win(clock):
    work, _ = taking(clock, {"a": 1.0, "b": [9.0, 0.5, 9.0]})
    race = Autotuner(["a", "b"])
    for _ in range(4):
        race.run(work)
    assert race.winner == "b"  # the other is left behind


def test_several_threads_end_a_race():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(300):
                race, ways = Autotuner([5, 1, 3, 9, 7]), []
                wait = lambda way, ways=ways: ways.append(way) or sum(range(200 * way))  # noqa: E731
                for done in [pool.submit(race.run, wait) for _ in range(60)]:
                    done.result()
                assert race.winner is not None
                ways.clear()
                race.run(wait)
                assert ways == [race.winner]
    finally:
        sys.setswitchinterval(interval)


def test_who_has_left_does_not_come_back(clock):
    """Its trial in another thread may end after that."""
    race = Autotuner(["a", "b", "c"])
    for way, seconds in zip("abcabc", [1.0, 1.1, 9.0, 1.0, 1.1, 9.0], strict=True):
        race._add(way, seconds)
    race._add("c", 0.1)
    for way in "abab":
        race._add(way, 1.0)
    race._add("b", 0.1)
    assert race.winner == "a"


@pytest.mark.parametrize("is_shared", [False, True])
def test_nothing_is_decided_by_the_clock_where_all_must_be_the_same(is_shared, monkeypatch):
    assert timing_allowed()
    if is_shared:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    else:
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not timing_allowed()
    costs = PassCosts({1: 1.0, 64: 2.0})
    for _ in range(20):
        with costs.measured(1):
            pass
    assert costs.seconds(1) == 1.0
    monkeypatch.undo()
    assert costs.seconds(1) < 0.1


def test_passes_in_which_something_was_tried_do_not_count(clock):
    costs, race = PassCosts({1: 1.0, 64: 2.0}), Autotuner(["a", "b"])
    work, _ = taking(clock, {"a": 7.0, "b": 8.0})
    for _ in range(20):
        with costs.measured(1):
            clock[0] += 0.5
            if race.winner is None:
                race.run(work)
    assert costs.seconds(1) == pytest.approx(0.5)


def test_one_way_is_not_timed(monkeypatch):
    monkeypatch.setattr(autotuner_module.time, "perf_counter", lambda: pytest.fail("timed"))
    assert Autotuner(["a"]).run(str.upper) == "A"


def test_an_error_is_no_trial(clock):
    race, (work, _taken) = Autotuner(["a", "b"]), taking(clock, {"a": 1.0, "b": 2.0})

    def fails(way):
        raise ValueError(way)

    with pytest.raises(ValueError, match="a"):
        race.run(fails)
    assert race.run(work) == "A"
