"""What answers have cost: seconds, forward passes, words. Numbers only; knows no model and no file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Cost:
    """
    Of some answers.

    Args:
        seconds (`float`), passes (`float`), words (`float`): in all. An answer of a batch has its share of the batch's.
    """

    seconds: float = 0.0
    passes: float = 0.0
    words: float = 0.0

    def share(self, number: int) -> dict[str, float]:
        """That of one answer of so many, as plain JSON values, but for its words, which are its own."""
        return asdict(Cost(self.seconds / number, self.passes / number))


def total(costs: Iterable[Mapping[str, float]]) -> Cost:
    """The sum of what [`Cost.share`] gave."""
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
