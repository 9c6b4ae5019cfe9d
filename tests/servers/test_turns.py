"""The deadline of a request holds whatever it waits for; the two kinds of vLLM's requests take turns."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from support.stand_in import serving

from hf_adafuse.servers.daemon_threads import begin
from hf_adafuse.servers.queries import BadAnswer, Query, ServerError
from hf_adafuse.servers.transport import Connection, RequestGate, RetryPolicy
from hf_adafuse.servers.vllm import VllmApi


def of_one_kind(kinds):
    return len(set(kinds)) == 1


def soon(seconds=60.0):
    return time.monotonic() + seconds


@pytest.mark.parametrize(
    ("beginning", "bit"),
    [(b"HTTP/1.1 200 OK\r\n", b"X: b\r\n"), (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b" ")],
    ids=["headers", "content"],
)
def test_the_deadline_holds_for_what_comes_byte_by_byte(beginning, bit):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def trickle():
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(beginning)
                for _ in range(1200):  # for a minute
                    connection.sendall(bit)
                    time.sleep(0.05)

        threading.Thread(target=trickle, daemon=True).start()
        url, start = f"http://127.0.0.1:{server.getsockname()[1]}", time.monotonic()
        with pytest.raises(ServerError, match=r"still answering; the deadline of 0\.5 s is over"):
            Connection(url, retry_policy=RetryPolicy(deadline=0.5)).post("/", {}, lambda answer, name: answer)
        assert time.monotonic() - start < 30


def test_waiting_for_the_other_kind_counts_towards_the_deadline():
    class Hanging:
        asked, is_over = threading.Event(), threading.Event()

        def answer(self, path, body, headers):
            self.asked.set()
            self.is_over.wait(60)
            return 200, {}

    with serving(Hanging()) as url:
        slow, quick = (
            VllmApi(Connection(url, retry_policy=RetryPolicy(deadline=seconds)), "m") for seconds in (60.0, 0.5)
        )
        first = begin(lambda: slow.ask([Query((5, 6), (7,), 0)], 2))
        assert Hanging.asked.wait(30)
        start = time.monotonic()
        try:
            with pytest.raises(ServerError, match="other requests have kept the server busy until the deadline"):
                quick.ask([Query((5, 6))], 2)
            assert time.monotonic() - start < 30 and not first.done()
        finally:
            Hanging.is_over.set()


def test_the_kinds_take_turns():
    request_gate, is_over = RequestGate(of_one_kind), threading.Event()

    def plain():
        while not is_over.is_set():
            with request_gate.passing(False, soon()):
                time.sleep(0.02)

    others = [begin(plain) for _ in range(4)]
    time.sleep(0.05)
    try:
        for _ in range(5):
            with request_gate.passing(True, soon()):
                assert {kind for kind, _ in request_gate._inside} == {True}
    finally:
        is_over.set()
    assert [other.result(60) for other in others] == [None] * 4
    assert not request_gate._inside and not request_gate._waiting


def test_who_gives_up_waiting_is_in_nobodys_way():
    request_gate = RequestGate(of_one_kind)
    with request_gate.passing(False, soon()):
        with pytest.raises(ServerError, match="until the deadline"), request_gate.passing(True, soon(0.05)):
            pass
        with request_gate.passing(False, soon(0.05)):
            pass
    assert not request_gate._inside and not request_gate._waiting


def test_pauses_are_nobodys_turn(monkeypatch):
    """Whoever has got a wrong answer does not keep others out until the next attempt."""
    goes_on = threading.Event()
    paused = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: seconds and goes_on.wait(60))
    monkeypatch.setattr("hf_adafuse.servers.transport.time", paused)

    class Plain:
        def answer(self, path, body, headers):
            return 200, {}

    request_gate, seen = RequestGate(of_one_kind), threading.Event()

    def read(answer, name):
        seen.set()
        raise BadAnswer("no")

    def post():
        turn = lambda end: request_gate.passing(False, end)  # noqa: E731
        return Connection(url, retry_policy=RetryPolicy(retries=1)).post("/", {}, read, turn=turn)

    with serving(Plain()) as url:
        first = begin(post)
        assert seen.wait(30)
        with request_gate.passing(True, soon()):
            assert not first.done()
        goes_on.set()
        with pytest.raises(ServerError, match="cannot be right"):
            first.result(60)
