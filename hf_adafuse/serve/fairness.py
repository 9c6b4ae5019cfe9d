"""Queues in which clients take turns: a client with many requests does not hold up another's single one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """
    A queue in which clients take turns: one item of each client leaves, then the next one of each. The items of one
    client leave in the order in which they came. A new client's turn comes after the turns of those that wait.

    Example:

    ```python
    >>> from hf_adafuse.serve.fairness import FairQueue

    >>> queue = FairQueue()
    >>> for client, thing in [("a", 1), ("a", 2), ("a", 3), ("b", 4)]:
    ...     queue.add(client, thing)
    >>> [queue.pop() for _ in range(4)]
    [1, 4, 2, 3]

    ```
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[T]] = {}  # in the order of their turns

    def add(self, client: str, thing: T) -> None:
        self._queues.setdefault(client, deque()).append(thing)

    def pop(self) -> T:
        """
        Remove and return the next item.

        Raises:
            IndexError: there is none.
        """
        if not self._queues:
            raise IndexError("pop from an empty queue")
        client = next(iter(self._queues))
        queue = self._queues.pop(client)
        thing = queue.popleft()
        if queue:
            self._queues[client] = queue
        return thing

    def remove(self, client: str, thing: T) -> None:
        self._queues[client].remove(thing)
        if not self._queues[client]:
            del self._queues[client]

    def clear(self) -> None:
        self._queues.clear()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[T]:
        return (thing for queue in self._queues.values() for thing in queue)


class FairPool:
    """
    Worker threads that clients use in turns.

    Args:
        number (`int`): how many threads there are.
        name (`str`): what the names of the threads begin with.
    """

    def __init__(self, number: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(number, name)
        self._lock = threading.Lock()
        self._queue: FairQueue[tuple[Future[Any], Callable[[], Any]]] = FairQueue()

    def submit(self, client: str, work: Callable[[], T]) -> Future[T]:
        """Run `work` when it is this client's turn. The future holds its result."""
        future: Future[T] = Future()
        with self._lock:
            self._queue.add(client, (future, work))
        self._pool.submit(self._work)
        return future

    def close(self) -> None:
        """Cancel the work that has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            left = [future for future, _ in self._queue]
            self._queue.clear()
        for future in left:
            future.cancel()

    def _work(self) -> None:
        with self._lock:
            if not len(self._queue):  # it has been closed
                return
            future, work = self._queue.pop()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
