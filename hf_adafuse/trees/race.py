"""Which of several ways to do the same is the quickest on this machine, found by doing real work with each of them.
Knows nothing of what is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

W = TypeVar("W")
R = TypeVar("R")

# Each way is tried so often. Those leave before that took so many times as long as the quickest in so many trials.
_NUM_TRIALS, _MUCH_LONGER, _FEWEST_TRIALS = 3, 1.25, 2


class Race(Generic[W]):
    """
    Ways that are tried in turn, until one is known to be the quickest.

    Args:
        ways (`Sequence`): at least one. What a way takes is the least of its times: others were held up.
    """

    def __init__(self, ways: Sequence[W]) -> None:
        self._seconds: dict[W, list[float]] = {way: [] for way in ways}
        self.winner: W | None = ways[0] if len(ways) == 1 else None

    def run(self, work: Callable[[W], R]) -> R:
        """What `work(way)` returns, by the quickest way or by the one whose turn it is to be tried."""
        if self.winner is not None:
            return work(self.winner)
        way = min(self._seconds, key=lambda one: len(self._seconds[one]))
        start = time.perf_counter()
        result = work(way)
        self._add(way, time.perf_counter() - start)
        return result

    def _add(self, way: W, seconds: float) -> None:
        known = {other: list(times) for other, times in self._seconds.items()}  # another thread may add to them too
        known.setdefault(way, []).append(seconds)
        num_trials = min(map(len, known.values()))
        least = {other: min(times, default=0.0) for other, times in known.items()}
        if num_trials >= _FEWEST_TRIALS and num_trials == max(map(len, known.values())):
            bound = _MUCH_LONGER * min(least.values())
            known = {other: times for other, times in known.items() if least[other] <= bound}
            if num_trials >= _NUM_TRIALS or len(known) == 1:
                self.winner = min(known, key=least.__getitem__)
        self._seconds = known
