"""Shows measurements as tables and as JSON values, with the machine and the versions that they were taken on."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from ... import __version__
from ...demo.tables import aligned, counted
from ...kernels.native_product import kernel_name
from .results import NO_KERNEL, OURS, Measurement
from .targets import Check, Target

# The report says that figures are not to be trusted above these bounds: the share of the processors that other programs
# keep busy, and how far the times of one contender lie apart, as a share of their median.
_MOST_LOAD = 0.25
_MOST_SPREAD = 0.2
_HEADER = ("", "seconds", "spread", "words/s", "/ ours", "passes", "tokens", "KV peak", "memory", "same text")


def format_measurement(measurement: Measurement) -> str:
    """One combination as a table with a line for each contender, and below it the figures that follow."""
    m = measurement
    rows = [_HEADER, *(_row(m, name) for name in m.contenders)]
    if len(m.greedy) > 1 and m.greedy_seconds is not None:
        total = m.greedy_seconds
        last = 1 + max(index for index, name in enumerate(m.contenders) if name in m.greedy)
        cells = ("greedy, sum", f"{total:.2f}", "", "", f"{total / m.seconds(OURS):.2f}", "", "", "", "", "")
        rows.insert(last + 1, cells)
    title = (
        f"{' + '.join(map(size_text, m.parameters))} parameters, prompt of {m.prompt_tokens:,} tokens, "
        f"batch {m.batch}, B = {m.branches}, {m.new_tokens} new tokens, {counted(len(m.texts), 'text')}"
    )
    return "\n".join([title, *aligned(rows), *_summary(m)]) + "\n"


def format_targets(targets: Sequence[Target]) -> str:
    """The table of targets."""
    rows: list[tuple[str, ...]] = [("target", "value", "wanted", "met")]
    rows += [
        (
            target.what,
            ", ".join(
                f"{_number(check.value, check)}{f' ({check.label})' * bool(check.label)}" for check in target.checks
            ),
            ", ".join(dict.fromkeys(f"{check.bound} {_number(check.limit, check)}" for check in target.checks)),
            "yes" if target.is_met else "no",
        )
        for target in targets
    ]
    return "\n".join(aligned(rows, left=4)) + "\n"


def as_json(
    measurements: Sequence[Measurement], targets: Sequence[Target], settings: dict[str, Any], load: float = math.nan
) -> dict[str, Any]:
    """Everything as JSON values: machine, versions, settings, raw samples, figures and targets. `load`: how many
    processors other programs kept busy meanwhile."""
    return {
        "machine": {name: None if value != value else value for name, value in machine(load).items()},
        "versions": {
            "hf_adafuse": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "settings": settings,
        "measurements": [measurement.to_dict() for measurement in measurements],
        "targets": [target.to_dict() for target in targets],
    }


def machine(load: float = math.nan) -> dict[str, Any]:
    """The machine that the figures were taken on. `load`: how many processors other programs kept busy meanwhile."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "kernel": kernel_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "load": load,
    }


def format_machine(load: float = math.nan) -> str:
    """The machine as a line: even ratios of times differ between processors. A second line follows where other programs
    kept more processors busy than `_MOST_LOAD` allows."""
    m = machine(load)
    busy = ""
    if m["cpus"] is not None and load > _MOST_LOAD * m["cpus"]:
        busy = (
            f"NOT TO BE TRUSTED: other programs kept {load:.1f} of {m['cpus']} processors busy in the meantime. "
            "Repeat it on a quiet machine.\n"
        )
    kernel = "own kernel" if m["kernel"] else "no kernel of our own"
    devices = [f"{m['processor']} ({m['instructions']}, {kernel}), {counted(m['threads'], 'thread')}", *m["gpus"]]
    return f"{'; '.join(devices)}; torch {torch.__version__}, transformers {transformers.__version__}\n{busy}"


def _processor() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def size_text(count: int) -> str:
    """A number of parameters in short: `"80M"`, `"1.1B"`."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            value = count / size
            return f"{value:.0f}{unit}" if value >= 10 else f"{value:.1f}".removesuffix(".0") + unit
    return str(count)


def _row(m: Measurement, name: str) -> tuple[str, ...]:
    """The line of a contender, with the cells of `_HEADER`."""
    texts = m.texts_of(name)
    memory = m.memory_peak_bytes(name)
    return (
        name if len(texts) == len(m.texts) else f"{name} ({counted(len(texts), 'text')})",
        f"{m.seconds(name):.2f}",
        f"{m.spread(name):.0%}" if len(m.of(name, texts[0])) > 1 else "",
        f"{m.words_per_second(name):.1f}",
        f"{m.seconds(name) / m.seconds(OURS, texts):.2f}",
        " + ".join(str(count) for count in m.forwards(name) if count),
        " + ".join(str(count) for count in m.tokens(name) if count),
        _bytes(m.kv_peak_bytes(name)),
        "" if memory is None else _bytes(memory),
        {True: "yes", False: "NO", None: ""}[m.same_text.get(name)],
    )


def _summary(m: Measurement) -> list[str]:
    naive = "" if m.naive_ratio is None else f"; cache-less / ours {m.naive_ratio:.1f}"
    spans = sum(text.num_rounds for text in m.texts)
    ended = sum(text.num_ended for text in m.texts)
    early = f"; {ended} of {m.batch * len(m.texts)} texts ended early" if ended else ""
    return [
        *_ratios(m),
        f"passes / own tokens {m.passes_per_own_token:.3f}; overhead {m.overhead:.1%}; "
        f"KV peak / members' own {m.kv_ratio:.3f}{naive}",
        f"agreement: {m.agreement:.0%} of {spans} spans proposed by all members, "
        f"{m.words_per_round:.2f} words per round{early}",
        f"reading the weights once a pass takes {m.bound_seconds:.2f} s at {m.bandwidth / 1e9:.1f} GB/s (a copy's), "
        f"{m.bound_seconds / m.seconds(OURS):.0%} of the time",
        *_doubts(m),
    ]


def _ratios(m: Measurement) -> list[str]:
    """A line that says what the ensemble costs, over the slowest member alone and over all members in turn; a second
    line says it without the kernel, where that was measured."""
    if m.slowest is None:
        return []
    size = size_text(m.parameters[int(m.slowest.removeprefix("greedy ")) - 1])
    return [
        f"time / {m.slowest} ({size}), the slowest member, alone {m.over_alone(contender):.3f}; / the members' own "
        f"greedy times in turn {m.over_sum(contender):.3f}{' (without the kernel)' * (contender == NO_KERNEL)}"
        for contender in m.contenders
        if contender in (OURS, NO_KERNEL)
    ]


def _doubts(m: Measurement) -> list[str]:
    """A line that says why the figures are not to be trusted, where they are not."""
    found = []
    if m.bound_seconds > m.seconds(OURS):
        found.append("the copy took longer than all passes, which read as much: other programs slowed it down")
    spreads = {name: m.spread(name) for name in m.contenders if len(m.of(name, m.texts_of(name)[0])) > 1}
    uneven = max(spreads, key=lambda name: spreads[name], default=None)
    if uneven is not None and spreads[uneven] > _MOST_SPREAD:
        found.append(f"the times of {uneven!r} differ by {spreads[uneven]:.0%} between repeats")
    return [f"NOT TO BE TRUSTED: {'; '.join(found)}. Repeat it on a quiet machine."] if found else []


def _number(value: float, check: Check) -> str:
    return f"{value:.1%}" if check.percent else f"{value:.1f}" if check.limit > 10 else f"{value:.2f}"


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
