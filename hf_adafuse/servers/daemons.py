"""Calls in threads that nobody waits for when the process ends: what is asked of a server may take until its deadline.
Knows functions; no server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def begin(call: Callable[[], R]) -> Future[R]:
    """Begin a call in a thread of its own; the future has what it returns or raises."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def map_at_once(function: Callable[[T], R], items: Iterable[T], most: int) -> list[R]:
    """What a function gives for each item, in their order, `most` of them at a time; the first error is raised."""
    waiting = list(items)
    if len(waiting) < 2:
        return [function(item) for item in waiting]
    turns = threading.Semaphore(most)

    def call(item: T) -> R:
        with turns:
            return function(item)

    futures = [begin(lambda item=item: call(item)) for item in waiting]  # type: ignore[misc]
    return [future.result() for future in futures]
