"""Runs calls in daemon threads: a request to a server may take minutes, and the end of the process does not wait for
it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_around_waits: ContextVar[tuple[Callable[[], None], Callable[[], None]] | None] = ContextVar(
    "while_waiting", default=None
)
# The calls for which this thread works, the outermost first.
_calls: ContextVar[tuple[Future[Any], ...]] = ContextVar("calls", default=())


@contextmanager
def while_waiting(let_go: Callable[[], Any], take_back: Callable[[], Any]) -> Iterator[None]:
    """
    Within this context a thread holds something that others need, and gives it away while it waits for a server.

    Args:
        let_go (`Callable`): called before each wait for a server.
        take_back (`Callable`): called after it. What it raises is raised where the thread has waited.
    """
    token = _around_waits.set((let_go, take_back))
    try:
        yield
    finally:
        _around_waits.reset(token)


@contextmanager
def server_wait() -> Iterator[None]:
    """Put around every wait for a server; see [`while_waiting`]."""
    found = _around_waits.get()
    if found is None:
        yield
        return
    let_go, take_back = found
    token = _around_waits.set(None)  # of a wait inside this one nobody is told
    let_go()
    try:
        yield
    finally:
        _around_waits.reset(token)
        take_back()


def begin(call: Callable[[], R]) -> Future[R]:
    """
    Begin a call in a daemon thread. The future holds what it returns or raises. Whoever waits for it no longer cancels
    it: what runs goes on to its end, and nothing more is begun for it, by `begin` or by [`map_at_once`].
    """
    future: Future[R] = Future()
    threading.Thread(target=_answer, args=(future, call, _calls.get()), daemon=True).start()
    return future


def _answer(future: Future[R], call: Callable[[], R], outer_calls: tuple[Future[Any], ...]) -> bool:
    """Call, unless this call or one of the outer calls has been cancelled. Returns whether it raised no error."""
    _calls.set((*outer_calls, future))
    try:
        if any(one.cancelled() for one in _calls.get()):
            raise CancelledError
        result = call()
    except BaseException as error:
        with suppress(InvalidStateError):  # it has been cancelled
            future.set_exception(error)
        return False
    with suppress(InvalidStateError):
        future.set_result(result)
    return True


def map_at_once(function: Callable[[T], R], items: Iterable[T], most: int) -> list[R]:
    """
    The results of a function for each item, in order, with at most `most` threads. The first error is raised. After an
    error, or where the thread that waits is interrupted, no further item is begun.
    """
    given = list(items)
    if len(given) < 2:
        return [function(item) for item in given]
    answers: list[Future[R]] = [Future() for _ in given]
    waiting: Iterator[tuple[T, Future[R]]] = iter(zip(given, answers, strict=True))
    taking = threading.Lock()
    outer_calls = _calls.get()

    def work() -> None:
        nonlocal waiting
        while True:
            with taking:
                item, answer = next(waiting, (None, None))
            if answer is None:
                return
            if not _answer(answer, lambda item=item: function(item), outer_calls):  # type: ignore[misc]
                with taking:
                    waiting = iter(())  # all before it have been taken: nobody reads what would come after it

    try:
        for _ in range(min(most, len(given))):
            threading.Thread(target=work, daemon=True).start()
        with server_wait():
            return [answer.result() for answer in answers]
    except BaseException:
        for answer in answers:
            answer.cancel()
        raise
