"""The project's targets for speed and memory: what each measures, its limit, and whether it is met."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .results import OURS, Measurement
from .workload import Combination

BATCH = 8
LARGE_BATCH = 16
UNEVEN = "uneven"  # the name of a combination
UNEVEN_PARAMETERS = (20_000_000, 160_000_000)
# How many long prompts are measured, one at a time. Members agree more on one text than on another, which changes
# times.
_NUM_LONG = 4


@dataclass(frozen=True)
class Check:
    """
    One number with its limit.

    Attributes:
        label (`str`): what the number is of, like `"B = 3"`; empty where its target has one number.
        value (`float`): the measured number.
        bound (`str`): `"<="` for an upper limit, `">="` for a lower one.
        limit (`float`): the limit.
        percent (`bool`): whether the number is shown in per cent.
    """

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
    """One line of the table. It is met when all its checks are."""

    what: str
    checks: list[Check]

    @property
    def is_met(self) -> bool:
        return all(check.is_met for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """The target as plain JSON values."""
        return asdict(self) | {"is_met": self.is_met}


def plan(
    parameters: tuple[int, ...], uneven: tuple[int, ...], short: int, middle: int, long: int
) -> dict[str, Combination]:
    """
    The combinations that the targets need, by name.

    Args:
        parameters (`tuple[int]`): the sizes of the members, in parameters, for all targets but one.
        uneven (`tuple[int]`): the sizes of the members of that target, which differ. Empty: it is left out.
        short, middle, long (`int`): the lengths of the prompts, in tokens of the main model.
    """

    def make(
        tokens: int,
        batch: int,
        branches: int,
        *against: str,
        sizes: tuple[int, ...] = parameters,
        num_prompts: int = 1,
    ) -> Combination:
        return Combination(sizes, tokens, batch, branches, against, num_prompts)

    sized_apart = {UNEVEN: make(short, 1, 1, "greedy", sizes=uneven, num_prompts=BATCH)} if uneven else {}
    return {
        "short 1": make(short, 1, 1, "greedy", num_prompts=BATCH),
        "short 3": make(short, 1, 3, "greedy", num_prompts=BATCH),
        "middle 1": make(middle, 1, 1, "greedy"),
        "middle 3": make(middle, 1, 3, "greedy", "naive"),
        "long 1": make(long, 1, 1, "greedy", num_prompts=_NUM_LONG),
        "long 3": make(long, 1, 3, "greedy", num_prompts=_NUM_LONG),
        "batch 1": make(short, BATCH, 1, "greedy"),
        "batch 3": make(short, BATCH, 3, "greedy"),
        "large batch": make(short, LARGE_BATCH, 3, "greedy"),
        **sized_apart,
    }


def evaluate(measured: Mapping[str, Measurement]) -> list[Target]:
    """The targets: nine, and one fewer without uneven members. `measured`: the measurements of the combinations of
    [`plan`], by their names."""

    def ratio(name: str) -> float:
        return measured[name].over_sum(OURS) or math.nan

    def both(figure: Callable[[int], float], bound: str, limit: float) -> list[Check]:
        return [Check(f"B = {branches}", figure(branches), bound, limit) for branches in (1, 3)]

    def rate(name: str) -> float:
        return measured[name].words_per_second(OURS)

    middle = measured["middle 3"]
    long = measured["long 1"].prompt_tokens
    worst = max((m for m in measured.values() if m.branches == 3), key=lambda m: m.kv_ratio)
    overheads = [
        Check("batch 1", measured["short 3"].overhead, "<=", 0.05, percent=True),
        Check(f"batch {LARGE_BATCH}", measured["large batch"].overhead, "<=", 0.08, percent=True),
    ]
    shape = f"worst: {worst.prompt_tokens:,} tokens, batch {worst.batch}"
    against_naive = middle.naive_ratio or math.nan
    uneven = [
        Target("uneven members, B = 1: time / their own", [Check("", ratio(name), "<=", 0.65)])
        for name in measured
        if name == UNEVEN
    ]
    return [
        Target("B = 1, short prompt: time / members' own", [Check("", ratio("short 1"), "<=", 0.75)]),
        Target("B = 3, short prompt: time / members' own", [Check("", ratio("short 3"), "<=", 1.05)]),
        Target(f"at {long:,} tokens / above", both(lambda b: ratio(f"long {b}") / ratio(f"short {b}"), "<=", 1.1)),
        *uneven,
        Target("passes / own tokens", both(lambda b: measured[f"short {b}"].passes_per_own_token, "<=", 0.85)),
        Target(
            f"batch {BATCH}: words/s over batch 1", both(lambda b: rate(f"batch {b}") / rate(f"short {b}"), ">=", 3.5)
        ),
        Target("our own overhead, B = 3", overheads),
        Target("KV memory at the peak / members' own, B = 3", [Check(shape, worst.kv_ratio, "<=", 1.15)]),
        Target(f"cache-less / ours, B = 3, {middle.prompt_tokens:,} tokens", [Check("", against_naive, ">=", 15.0)]),
    ]
