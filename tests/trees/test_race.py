"""The quickest of several ways is found by using them."""

from __future__ import annotations

import pytest

from hf_adafuse.trees import race as race_module
from hf_adafuse.trees.race import Race


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(race_module.time, "perf_counter", lambda: now[0])
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
    work, taken = taking(clock, {"a": 1.1, "b": 1.0, "c": 1.2})
    race = Race(["a", "b", "c"])
    assert [race.run(work) for _ in range(12)] == list("ABCABCABC") + ["B"] * 3
    assert race.winner == "b"


def test_much_slower_ones_leave_before(clock):
    work, taken = taking(clock, {"a": 1.0, "b": 5.0, "c": 1.1, "d": 1.3})
    race = Race(["a", "b", "c", "d"])
    for _ in range(12):
        race.run(work)
    assert taken == [*list("abcdabcd"), "a", "c", "a", "a"] and race.winner == "a"


def test_one_that_was_held_up_once_may_win(clock):
    work, taken = taking(clock, {"a": 1.0, "b": [9.0, 0.5, 9.0]})
    race = Race(["a", "b"])
    for _ in range(4):
        race.run(work)
    assert race.winner == "b"  # the other is left behind


def test_one_way_is_not_timed(monkeypatch):
    monkeypatch.setattr(race_module.time, "perf_counter", lambda: pytest.fail("timed"))
    assert Race(["a"]).run(str.upper) == "A"


def test_an_error_is_no_trial(clock):
    race, (work, _taken) = Race(["a", "b"]), taking(clock, {"a": 1.0, "b": 2.0})

    def fails(way):
        raise ValueError(way)

    with pytest.raises(ValueError, match="a"):
        race.run(fails)
    assert race.run(work) == "A"
