"""`tests/check_serve_load.py` with small numbers: what must hold whatever the machine. `--part long` runs it."""

from __future__ import annotations

import pytest
from check_serve_load import Alone, Faults, Server, check_faults, check_load, check_memory, check_speed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server():
    with Server() as one:
        yield one


@pytest.fixture(scope="module")
def alone(server):
    return Alone(server.pair)


def test_no_request_is_lost_or_doubled_or_gets_another_text(server, alone):
    found = check_load(server, alone, 40, 8)
    assert found["lost"] == found["doubled"] == found["other texts"] == 0
    assert found["texts"] > 10  # they are not all alike


def test_one_call_of_generate_gives_the_same_texts(server, alone):
    found = check_speed(server, alone, 24, 8)
    assert found["other texts"] == 0 and all(found[name]["words/s"] > 0 for name in ("run", "whole", "streamed"))


def test_faults_are_answered_or_dropped(server, alone):
    number = 3 * len(Faults.kinds)
    found = check_faults(server, alone, number, 8)
    assert found["unclean"] == [] and found["other requests with another answer"] == 0
    assert found["answered"] + found["dropped"] == number and found["answered"] and found["dropped"]
    assert found["is idle"] and found["is alive"] and found["tracebacks"] == 0


def test_memory_does_not_grow_with_requests(server):
    """By far less than what the texts of all requests need together."""
    first, *_, last = check_memory(server, 120, 8, slices=4)["MiB"]
    assert last - first < 50
