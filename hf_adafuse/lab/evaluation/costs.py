"""What answers have cost: seconds, forward passes, words. As plain numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Cost:
    """
    Of some answers.

    Args:
        seconds (`float`): in all.
        passes (`float`), words (`float`): of calls that have come to their end.
    """

    seconds: float = 0.0
    passes: float = 0.0
    words: float = 0.0


class CallOfMany:
    """
    A call that gives many answers, one after another. Each is written as soon as it is there, with the seconds since
    the one before; the last one when the call is over, with the passes and words of all: killed, it leaves no words
    whose passes nobody knows.

    Args:
        number (`int`): of the answers.
        write (`Callable`): `write(row, answer)`, of a text, its rounds and its cost as plain JSON values.
    """

    def __init__(self, number: int, write: Callable[[int, tuple[str, Any, dict[str, float]]], None]) -> None:
        self._num_left = number
        self._write = write
        self._start = time.perf_counter()
        self._num_words = 0

    def tell(self, row: int, text: str, rounds: Any) -> None:
        """An answer is there."""
        self._num_left -= 1
        self._num_words += len(text.split())
        if self._num_left:
            self._write(row, (text, rounds, asdict(Cost(self._seconds()))))
        else:
            self._last = row, text, rounds

    def end(self, passes: int) -> None:
        """The call is over, and took so many passes."""
        row, text, rounds = self._last
        self._write(row, (text, rounds, asdict(Cost(self._seconds(), passes, self._num_words))))

    def _seconds(self) -> float:
        """Since this was last asked."""
        before, self._start = self._start, time.perf_counter()
        return self._start - before


def total(costs: Iterable[Mapping[str, float]]) -> Cost:
    """The sum of what was written with answers."""
    kept = list(costs)
    return Cost(*(math.fsum(cost[name] for cost in kept) for name in ("seconds", "passes", "words")))


def cost_rows(ensembles: Mapping[str, Cost], members: Iterable[Cost]) -> list[tuple[str, ...]]:
    """
    A table: per ensemble its seconds, these over the sum of its members', and forward passes per word.

    Args:
        ensembles (`dict`): by name.
        members (`list[Cost]`): of each member alone over the same questions.
    """
    own = math.fsum(cost.seconds for cost in members)
    rows: list[tuple[str, ...]] = [("who", "seconds", "/ members' own", "passes / word")]
    for name, cost in ensembles.items():
        ratio = f"{cost.seconds / own:.2f}" if own else "-"
        rows.append((name, f"{cost.seconds:.1f}", ratio, f"{cost.passes / cost.words:.2f}" if cost.words else "-"))
    return rows
