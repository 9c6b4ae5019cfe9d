"""Which requests of this process may be under way at a server at the same time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .queries import ServerError

# Whether requests, each by what a kind of server says of it, may be under way together; of one alone nobody asks.
Rule = Callable[[Sequence[Any]], bool]


class RequestGate:
    """
    Lets requests through as far as they go together. Who has waited longest is the next one: nobody overtakes it but
    beside it.

    Args:
        go_together (`Rule`)
    """

    def __init__(self, go_together: Rule) -> None:
        self._go_together = go_together
        self._changed = threading.Condition()
        self._waiting: list[tuple[Any, object]] = []  # what they are and who, in the order of their coming
        self._inside: list[tuple[Any, object]] = []

    @contextmanager
    def passing(self, what: Any, end: float) -> Iterator[None]:
        """Wait until it goes together with all inside; raises `ServerError` where that is not before `end`."""
        me = (what, object())
        try:
            with self._changed:
                self._waiting.append(me)
                self._let_in()
                if not self._changed.wait_for(lambda: me in self._inside, end - time.monotonic()):
                    raise ServerError("other requests have kept the server busy until the deadline")
            yield
        finally:
            with self._changed:
                (self._inside if me in self._inside else self._waiting).remove(me)
                self._let_in()

    def _let_in(self) -> None:
        """Who has waited longest, where it may, and with it all that may then."""
        if self._waiting and self._may_enter(self._waiting[0]):
            for one in list(self._waiting):
                if self._may_enter(one):
                    self._waiting.remove(one)
                    self._inside.append(one)
            self._changed.notify_all()

    def _may_enter(self, one: tuple[Any, object]) -> bool:
        return not self._inside or self._go_together([what for what, _ in [*self._inside, one]])


# Several objects may ask one server; in a forked process nobody comes out again.
_TURNSTILES: dict[tuple[int, str, Rule], RequestGate] = {}


def request_gate(url: str, go_together: Rule) -> RequestGate:
    """That of a server, for all of this process that ask it by this rule, which must be hashable."""
    return _TURNSTILES.setdefault((os.getpid(), url, go_together), RequestGate(go_together))
