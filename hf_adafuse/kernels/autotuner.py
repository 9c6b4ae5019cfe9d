"""Which of several ways to do the same is the quickest on this machine, found by doing real work with each of them; and
whether anything may be decided by the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, TypeVar

import torch

W = TypeVar("W")
R = TypeVar("R")

# Each way is tried `_NUM_TRIALS` times. One that took more than `_MUCH_LONGER` times as long as the quickest in the
# first `_FIRST_TRIALS` is tried no further.
_NUM_TRIALS = 4
_FIRST_TRIALS = 2
_MUCH_LONGER = 1.5


class Autotuner(Generic[W]):
    """
    Ways that are tried in turn, until one is known to be the quickest.

    Args:
        ways (`Sequence`): at least one. What a way takes is the least of its times: in others it was held up.

    Attributes:
        winner: the quickest way, once it is known.
        num_trials (`int`): of all choices in this process.
    """

    num_trials: ClassVar[int] = 0

    def __init__(self, ways: Sequence[W]) -> None:
        self._seconds: dict[W, list[float]] = {way: [] for way in ways}
        self.winner: W | None = ways[0] if len(ways) == 1 else None

    def run(self, work: Callable[[W], R]) -> R:
        """What `work(way)` returns, by the quickest way or by the one whose turn it is to be tried."""
        if self.winner is not None:
            return work(self.winner)
        seconds = self._seconds  # another thread may put another in its place
        way = min(seconds, key=lambda one: len(seconds[one]))
        start = time.perf_counter()
        result = work(way)
        self._add(way, time.perf_counter() - start)
        return result

    def _add(self, way: W, seconds: float) -> None:
        Autotuner.num_trials += 1
        known = self._seconds
        if way not in known or self.winner is not None:  # another thread has ended it meanwhile
            return
        known[way].append(seconds)
        num_trials = min(map(len, known.values()))
        if num_trials >= _FIRST_TRIALS:
            least = {other: min(times) for other, times in known.items()}
            bound = _MUCH_LONGER * min(least.values())
            self._seconds = {other: known[other] for other in known if least[other] <= bound}
            if num_trials >= _NUM_TRIALS or len(self._seconds) == 1:
                self.winner = min(least, key=least.__getitem__)


def timing_allowed() -> bool:
    """Whether anything may be decided by the clock: not where several processes share a model, for all must decide
    alike, nor where torch is to be deterministic (`torch.use_deterministic_algorithms`)."""
    is_shared = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not is_shared and not torch.are_deterministic_algorithms_enabled()
