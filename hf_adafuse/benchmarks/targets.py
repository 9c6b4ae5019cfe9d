"""The project's targets: which combinations each needs, its value, its limit, met or not. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .results import Measurement
from .workload import Combination

BATCH, LARGE_BATCH = 8, 16


@dataclass(frozen=True)
class Check:
    """One number with its limit, an upper one (`"<="`) or a lower one (`">="`)."""

    label: str
    value: float
    bound: str
    limit: float
    percent: bool = False

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit if self.bound == "<=" else self.value >= self.limit


@dataclass(frozen=True)
class Target:
    """One line of the table; met when all its checks are."""

    what: str
    checks: list[Check]

    @property
    def is_met(self) -> bool:
        return all(check.is_met for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"is_met": self.is_met}


def plan(
    parameters: tuple[int, ...], uneven: tuple[int, ...], short: int, middle: int, long: int
) -> dict[str, Combination]:
    """The combinations that the targets need, by name: members of `parameters` and `uneven` ones, prompts of so many
    tokens."""

    def make(tokens: int, batch: int, branches: int, *against: str, sizes: tuple[int, ...] = parameters) -> Combination:
        return Combination(sizes, tokens, batch, branches, against)

    return {
        "short 1": make(short, 1, 1, "greedy"),
        "short 3": make(short, 1, 3, "greedy"),
        "long 1": make(long, 1, 1, "greedy"),
        "long 3": make(long, 1, 3, "greedy"),
        "uneven": make(short, 1, 1, "greedy", sizes=uneven),
        "batch 1": make(short, BATCH, 1),
        "batch 3": make(short, BATCH, 3),
        "large batch": make(short, LARGE_BATCH, 3),
        "middle 3": make(middle, 1, 3, "naive"),
    }


def evaluate(measured: Mapping[str, Measurement]) -> list[Target]:
    """The nine targets, from the measurements of a plan by their names."""

    def at_most(label: str, value: float, limit: float, percent: bool = False) -> Check:
        return Check(label, value, "<=", limit, percent)

    def both(limit: float, figure: Callable[[int], float], bound: str = "<=") -> list[Check]:
        return [Check(f"B = {branches}", figure(branches), bound, limit) for branches in (1, 3)]

    def ratio(name: str) -> float:
        value = measured[name].ratio
        assert value is not None, f"{name} was measured without greedy"
        return value

    def faster(branches: int) -> float:
        one, eight = measured[f"short {branches}"], measured[f"batch {branches}"]
        return eight.words_per_second("ours") / one.words_per_second("ours")

    naive = measured["middle 3"]
    sizes = [label for label, m in measured.items() if m.branches == 3]
    worst = max(sizes, key=lambda label: measured[label].kv_ratio)
    return [
        Target("B = 1, short prompt: time / members' own", [at_most("", ratio("short 1"), 0.75)]),
        Target("B = 3, short prompt: time / members' own", [at_most("", ratio("short 3"), 1.05)]),
        Target(
            f"the same at {measured['long 1'].prompt_tokens:,} tokens / above",
            both(1.1, lambda b: ratio(f"long {b}") / ratio(f"short {b}")),
        ),
        Target("uneven members, B = 1: time / their own", [at_most("", ratio("uneven"), 0.65)]),
        Target("passes / own tokens", both(0.85, lambda b: measured[f"short {b}"].passes_per_own_token)),
        Target(f"batch {BATCH}: words/s over batch 1", both(3.5, faster, ">=")),
        Target(
            "our own overhead, B = 3",
            [
                at_most("batch 1", measured["short 3"].overhead, 0.05, percent=True),
                at_most(f"batch {LARGE_BATCH}", measured["large batch"].overhead, 0.08, percent=True),
            ],
        ),
        Target(
            "KV memory / members' own, B = 3",
            [at_most(f"worst: {_shape(measured[worst])}", measured[worst].kv_ratio, 1.15)],
        ),
        Target(
            f"cache-less / ours, B = 3, {naive.prompt_tokens} tokens",
            [Check("", naive.naive_ratio or 0.0, ">=", 15.0)],
        ),
    ]


def _shape(measurement: Measurement) -> str:
    return f"{measurement.prompt_tokens} tokens, batch {measurement.batch}"
