"""Clients take turns: in the queue of the running batch, in members' thoughts, and where the queue is full."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import httpx
import pytest
from servers_of_tests import MODEL, Passes, running, service_of
from support.waiting import until

from hf_adafuse.serve.calls import Call
from hf_adafuse.serve.fairness import FairPool, FairQueue

BODY = {"model": MODEL, "prompt": "She", "max_tokens": 4}


def test_turns():
    queue = FairQueue()
    for client, thing in [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5), ("b", 6)]:
        queue.add(client, thing)
    queue.remove("c", 5)
    assert len(queue) == 5 and sorted(queue) == [1, 2, 3, 4, 6]
    assert queue.pop() == 1
    queue.add("c", 7)  # behind all that wait
    assert [queue.pop() for _ in range(5)] == [4, 2, 7, 6, 3]
    with pytest.raises(IndexError):
        queue.pop()


def test_threads_take_turns():
    pool, begun, goes_on, done = FairPool(1, "test"), threading.Event(), threading.Event(), []

    def wait():
        begun.set()
        assert goes_on.wait(30)

    waited = pool.submit("a", wait)
    assert begun.wait(30)
    asked = [pool.submit(client, lambda name=client + str(k): done.append(name)) for client in "ab" for k in range(2)]
    failed = pool.submit("c", lambda: 1 // 0)
    gone = pool.submit("c", lambda: done.append("gone"))
    assert gone.cancel()
    goes_on.set()
    assert [future.result(30) for future in [waited, *asked]] == [None] * 5
    with pytest.raises(ZeroDivisionError):
        failed.result(30)
    assert done == ["a0", "b0", "a1", "b1"]
    goes_on.clear()
    begun.clear()
    last = pool.submit("a", wait)
    assert begun.wait(30)
    never = pool.submit("a", lambda: done.append("never"))
    pool.close()
    goes_on.set()
    assert last.result(30) is None and len(done) == 4
    with pytest.raises(CancelledError):
        never.result(30)


@pytest.fixture
def ask(monkeypatch):
    """Ask as the client at an address, which a proxy on this machine names."""

    def send(url, address):
        return httpx.post(f"{url}completions", json=BODY, headers={"X-Forwarded-For": address}, timeout=60)

    return send


def test_a_client_with_many_requests_does_not_hold_up_another_one(ask, monkeypatch):
    passes, ended, on_end = Passes(monkeypatch), [], Call.on_end
    monkeypatch.setattr(Call, "on_end", lambda call, rounds: (ended.append(call.client), on_end(call, rounds)))
    with running(service_of(1, 9)) as (service, client), ThreadPoolExecutor(8) as pool:
        first = pool.submit(ask, client.base_url, "10.0.0.1")
        until(lambda: service.engine.num_running == 1)
        others = [pool.submit(ask, client.base_url, "10.0.0.1") for _ in range(5)]
        until(lambda: len(service.engine._waiting) == 5)
        others.append(pool.submit(ask, client.base_url, "10.0.0.2"))
        until(lambda: len(service.engine._waiting) == 6)
        passes.is_open = True
        assert {one.result().status_code for one in [first, *others]} == {200}
    assert ended == ["10.0.0.1", "10.0.0.1", "10.0.0.2", *["10.0.0.1"] * 4]


def test_a_client_that_fills_the_queue_does_not_shut_out_another_one(ask, monkeypatch):
    passes = Passes(monkeypatch)
    with running(service_of(1, 2)) as (service, client), ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, client.base_url, "10.0.0.1") for _ in range(3)]
        until(lambda: service.engine.num_running == 1 and len(service.engine._waiting) == 2)
        assert ask(client.base_url, "10.0.0.1").status_code == 429
        asked.append(pool.submit(ask, client.base_url, "10.0.0.2"))
        until(lambda: len(service.engine._waiting) == 3)
        assert ask(client.base_url, "10.0.0.2").status_code == 429
        passes.is_open = True
        assert {one.result().status_code for one in asked} == {200}
