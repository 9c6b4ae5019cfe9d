"""How far the first member proposes ahead of the round. Knows costs and wins; no text, token or tree.

The first member may propose a later round before this one is settled, as if its best candidate had won. The others
then read both rounds in one pass. If another candidate wins, that work was in vain. Neither changes a result.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

# Further ahead the odds are poor and the trees large.
_MAX_ROUNDS = 4


class PassTimes:
    """What a member's forward passes cost, in seconds, as measured so far: of one token, and of a few."""

    def __init__(self) -> None:
        self._totals = {True: (0.0, 0), False: (0.0, 0)}

    @contextmanager
    def measured(self, num_tokens: int) -> Iterator[None]:
        """Time one pass."""
        start = time.perf_counter()
        yield
        seconds, count = self._totals[num_tokens > 1]
        self._totals[num_tokens > 1] = seconds + time.perf_counter() - start, count + 1

    def mean(self, num_tokens: int) -> float | None:
        """Of a pass with that many tokens; `None` when none was measured."""
        seconds, count = self._totals[num_tokens > 1]
        return seconds / count if count else None


class LookAhead:
    """Whether proposing ahead has paid so far: how often the first member's best candidate won, and what turns cost."""

    def __init__(self) -> None:
        self._wins, self._rounds = 1.0, 2.0  # until more is known, as good as a coin

    def record(self, has_won: bool) -> None:
        """One round's outcome: whether it went as the first member would have had it."""
        self._wins, self._rounds = self._wins + has_won, self._rounds + 1

    def num_rounds(self, turn_cost: float, saved: float) -> int:
        """
        How many rounds to propose ahead.

        Args:
            turn_cost (`float`): what the first member's turn costs: lost when another candidate wins.
            saved (`float`): what the other members' reading of what it proposes costs: saved for a round ahead.
        """
        odds = self._wins / self._rounds
        rounds, reached = 0, odds
        while rounds < _MAX_ROUNDS and reached * saved > (1 - reached) * turn_cost:
            rounds, reached = rounds + 1, reached * odds
        return rounds
