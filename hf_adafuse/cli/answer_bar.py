"""A bar on standard error that counts answers. Knows no model."""

from __future__ import annotations

import sys
import time
from typing import Any


class AnswerBar:
    """
    Progress of a job that may go on where an earlier one stopped.

    Args:
        most (`int`): answers, at most.
        shows (`bool`): whether there is to be one; all else is counted anyway.

    Attributes:
        num_new (`int`): answers that were not known before.
        seconds (`float`): how long it took, once closed.
    """

    def __init__(self, most: int, shows: bool) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped]

        self.num_new = 0
        self.seconds = 0.0
        self._start = time.monotonic()
        self._bar: Any = tqdm(total=most, unit=" answers", disable=not shows, file=sys.stderr)
        self._done = 0

    def add(self, number: int, known: bool) -> None:
        """Count answers; those known already take no time, so the rate is without them."""
        self._done += number
        if not known:
            self.num_new += number
            self._bar.update(number)
        elif not self._bar.disable:
            self._bar.initial += number
            self._bar.n += number

    def expect(self, most: int) -> None:
        """So many answers are still to come, at most."""
        self._bar.total = self._done + most

    def say(self, text: str) -> None:
        """What is behind the numbers."""
        self._bar.set_postfix_str(text)

    def close(self) -> None:
        """No more answers."""
        self.seconds = time.monotonic() - self._start
        self._bar.close()
