"""What passes cost, and how far the first member proposes ahead of the round. Knows costs and wins; no text or tree.

The first member may propose a later round before this one is settled, as if its best candidate had won. The others
then read both rounds in one pass. If another candidate wins, that work was in vain. Neither changes a result.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Further ahead the trees grow large.
MAX_ROUNDS = 2
# A pass of a few tokens that costs up to this many passes of one token is worth filling: break-even, as measured.
_FLAT = 1.8
_NUM_BUCKETS = 4


class PassTimes:
    """
    What a member's forward passes cost, in seconds, as measured so far: of one token, and of a few.

    Args:
        is_flat (`bool`): whether they are taken to cost the same until both have been measured.
    """

    def __init__(self, is_flat: bool) -> None:
        self._totals = {True: (0.0, 0), False: (0.0, 0)}
        self._is_flat = is_flat

    @contextmanager
    def measured(self, num_tokens: int) -> Iterator[None]:
        """Time one pass."""
        start = time.perf_counter()
        yield
        seconds, count = self._totals[num_tokens > 1]
        self._totals[num_tokens > 1] = seconds + time.perf_counter() - start, count + 1

    def mean(self, num_tokens: int) -> float:
        """Of a pass with that many tokens; of any pass when none such was measured, 0 when none was."""
        if _is_shared():
            return 1.0 if num_tokens <= 1 else 1.5
        for is_several in (num_tokens > 1, num_tokens <= 1):
            seconds, count = self._totals[is_several]
            if count:
                return seconds / count
        return 0.0

    @property
    def is_flat(self) -> bool:
        """Whether a pass of one token is worth filling up to a few."""
        if _is_shared() or min(count for _, count in self._totals.values()) < 3:
            return self._is_flat
        return self.mean(2) < _FLAT * self.mean(1)


class WinRecord:
    """How often a member's best candidate has won, by the margin at which its last word began."""

    def __init__(self) -> None:
        self._wins = {bucket: [1.0, 2.0] for bucket in range(_NUM_BUCKETS)}  # wins, rounds: at first as good as a coin

    def add(self, margin: float, has_won: bool) -> None:
        """One round's outcome."""
        record = self._wins[_bucket(margin)]
        record[0] += has_won
        record[1] += 1

    def odds(self, margin: float) -> float:
        """That the best candidate wins, given the margin of its last word."""
        wins, rounds = self._wins[_bucket(margin)]
        return wins / rounds


def pays(odds: float, turn_cost: float, saved: float) -> bool:
    """
    Whether the first member should propose one more round ahead.

    Args:
        odds (`float`): that all rounds up to it go as the first member would have them.
        turn_cost (`float`): what its turn costs: lost when they do not.
        saved (`float`): what the other members' reading of what it proposes costs: saved when they do.
    """
    return odds * saved > (1 - odds) * turn_cost


def _is_shared() -> bool:
    """Whether several processes share the models: their clocks differ, and all must run the same passes."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _bucket(margin: float) -> int:
    return min(int(margin * _NUM_BUCKETS), _NUM_BUCKETS - 1)
