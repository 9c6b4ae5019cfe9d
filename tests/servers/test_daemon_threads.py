"""Calls in threads: in order, so many at a time, with their errors; none holds the process up at its end."""

from __future__ import annotations

import _thread
import signal
import subprocess
import sys
import threading
import time

import pytest
from support.waiting import until

from hf_adafuse.servers.daemon_threads import begin, map_at_once


def test_results_come_in_the_order_of_the_items_and_so_many_at_a_time():
    inside, most, lock = set(), [], threading.Lock()

    def call(item):
        with lock:
            inside.add(item)
            most.append(len(inside))
        time.sleep(0.001 * (item % 3))
        with lock:
            inside.remove(item)
        return item * item

    assert map_at_once(call, range(40), 4) == [item * item for item in range(40)]
    assert 1 < max(most) <= 4
    assert map_at_once(call, [], 4) == [] and map_at_once(call, iter([3]), 4) == [9]


@pytest.mark.parametrize("items", [[0], [1, 0, 2]])
def test_the_first_error_is_raised(items):
    with pytest.raises(ZeroDivisionError):
        map_at_once(lambda item: 1 / item, items, 2)
    future = begin(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        future.result()


def test_nothing_more_is_begun_after_an_error():
    begun = []

    def call(item):
        begun.append(item)
        time.sleep(0.01)
        return 1 / item

    with pytest.raises(ZeroDivisionError):
        map_at_once(call, [1, 0, *range(2, 100)], 2)
    time.sleep(0.1)
    assert len(begun) < 10


def test_nothing_more_is_begun_after_an_interrupt():
    begun = []

    def call(item):
        begun.append(item)
        if item == 2:
            _thread.interrupt_main()
        time.sleep(0.01)

    # A shell's background jobs ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            map_at_once(call, range(100), 2)
    finally:
        signal.signal(signal.SIGINT, before)
    time.sleep(0.1)
    assert len(begun) < 10


def test_nothing_more_is_begun_for_a_call_that_is_cancelled():
    """However deep in it: in its own threads, and in the threads of these."""
    asked, is_asking, ends = [], threading.Event(), []

    def ask(item):
        asked.append(item)
        is_asking.set()
        begin(lambda: time.sleep(0.01)).result()

    def work():
        try:
            map_at_once(lambda item: map_at_once(ask, [item, -item], 2), range(1, 100), 2)
        finally:
            ends.append(True)

    future = begin(work)
    is_asking.wait(60)
    future.cancel()
    until(lambda: ends)  # its own thread ends too
    assert len(asked) < 40


def test_the_process_does_not_wait_for_them():
    code = "import time; from hf_adafuse.servers.daemon_threads import begin; begin(lambda: time.sleep(60))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=40)
