"""Adds up what answers have cost: seconds, forward passes and words."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Cost:
    """
    The cost of some answers.

    Args:
        seconds (`float`): the time for all answers.
        passes (`float`), words (`float`): the forward passes and the words of those calls that have come to their end.
    """

    seconds: float = 0.0
    passes: float = 0.0
    words: float = 0.0


class CallOfMany:
    """
    A call that gives many answers, one after another. Each is written as soon as it is there, with the seconds since
    the answer before. The last one is written when the call is over, with the passes and words of all. So a killed call
    leaves no words whose passes nobody knows.

    Args:
        number (`int`): the number of answers.
        write (`Callable`): `write(row, (text, rounds, cost))` writes an answer, with its cost as plain JSON values.
    """

    def __init__(self, number: int, write: Callable[[int, tuple[str, Any, dict[str, float]]], None]) -> None:
        self._num_left = number
        self._write = write
        self._start = time.perf_counter()
        self._num_words = 0

    def tell(self, row: int, text: str, rounds: Any) -> None:
        """Take an answer: the row of its prompt, its text, and its rounds."""
        self._num_left -= 1
        self._num_words += len(text.split())
        if self._num_left:
            self._write(row, (text, rounds, asdict(Cost(self._seconds()))))
        else:
            self._last = (row, text, rounds)

    def end(self, passes: int) -> None:
        """End the call, which took `passes` forward passes."""
        row, text, rounds = self._last
        self._write(row, (text, rounds, asdict(Cost(self._seconds(), passes, self._num_words))))

    def _seconds(self) -> float:
        """The time since this was last called."""
        before = self._start
        self._start = time.perf_counter()
        return self._start - before


def total(costs: Iterable[Mapping[str, float]]) -> Cost:
    """The sum of costs, each as plain JSON values."""
    kept = list(costs)
    return Cost(*(math.fsum(cost[name] for cost in kept) for name in ("seconds", "passes", "words")))


def cost_rows(ensembles: Mapping[str, Cost], members: Iterable[Cost]) -> list[tuple[str, ...]]:
    """
    The rows of a table: for each ensemble its seconds, their ratio to the members' own, and its forward passes per
    word.

    Args:
        ensembles (`dict[str, Cost]`): the cost of each ensemble, by its name.
        members (`list[Cost]`): the cost of each member alone over the same questions.
    """
    own = math.fsum(cost.seconds for cost in members)
    rows: list[tuple[str, ...]] = [("who", "seconds", "/ members' own", "passes / word")]
    for name, cost in ensembles.items():
        ratio = f"{cost.seconds / own:.2f}" if own else "-"
        rows.append((name, f"{cost.seconds:.1f}", ratio, f"{cost.passes / cost.words:.2f}" if cost.words else "-"))
    return rows
