"""Measurements as a picture: the cost against prompt length and batch. Needs matplotlib (the `plots` extra)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .report import size_text
from .results import OURS, Measurement

_COLORS = ("#1f6fb4", "#d1663a", "#4b9a5b", "#8a63b0")
_GRAY, _INK = "#8c8c8c", "#303030"


def check_matplotlib() -> None:
    """
    Say what to install before anything is measured.

    Raises:
        ImportError: matplotlib is not here.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            '`--plot` needs the package matplotlib. Install it with `pip install "hf_adafuse[plots]"`.'
        ) from error


def save_plot(measurements: Sequence[Measurement], path: str | Path) -> None:
    """
    Draw the measurements of members of the same sizes (those of the first), and write a PNG.

    Left: time over the sum of the members' own greedy times, against the prompt's length, at the smallest batch; one
    line per number of branches. Right: words/s over those of the smallest batch, against the batch.
    """
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    first = measurements[0]
    same = [m for m in measurements if m.parameters == first.parameters]
    figure = Figure(figsize=(9.6, 4.0), layout="constrained", dpi=160)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_ratios(left, same)
    _draw_batches(right, same)
    sizes = " + ".join(map(size_text, first.parameters))
    figure.suptitle(f"AdaFuse with members of {sizes} parameters", fontsize=11, color=_INK)
    figure.savefig(path, format="png")


def _draw_ratios(axes: Any, measurements: Sequence[Measurement]) -> None:
    batch = min(m.batch for m in measurements)
    with_ratio = [m for m in measurements if m.batch == batch and m.ratio is not None]
    for branches, color in _lines(with_ratio):
        line = {m.prompt_tokens: m.ratio for m in with_ratio if m.branches == branches}
        _line(axes, line, f"B = {branches}", color, "{:.2f}")
    axes.axhline(1.0, color=_GRAY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate(
        "the members one after another",
        xy=(0.01, 1.0), xycoords=("axes fraction", "data"), xytext=(0, 3), textcoords="offset points",
        fontsize=8, color=_GRAY,
    )  # fmt: skip
    top = max([m.ratio or 0.0 for m in with_ratio], default=1.0)
    axes.set_ylim(0, 1.25 * max(1.0, top))
    _finish(
        axes, "prompt (tokens)", f"time / sum of the members' own (batch {batch})", _ticks(with_ratio, "prompt_tokens")
    )


def _draw_batches(axes: Any, measurements: Sequence[Measurement]) -> None:
    tokens = min(m.prompt_tokens for m in measurements)
    same_prompt = [m for m in measurements if m.prompt_tokens == tokens]
    smallest = min(m.batch for m in same_prompt)
    highest = 1.0
    for branches, color in _lines(same_prompt):
        rates = {m.batch: m.words_per_second(OURS) for m in same_prompt if m.branches == branches}
        if smallest in rates:
            gains = {batch: rate / rates[smallest] for batch, rate in rates.items()}
            highest = max(highest, *gains.values())
            _line(axes, gains, f"B = {branches}  ({rates[smallest]:.1f} words/s at {smallest})", color, "{:.1f}x")
    axes.set_ylim(0, 1.2 * highest)
    _finish(axes, "batch", f"words/s over batch {smallest} (prompt of {tokens} tokens)", _ticks(same_prompt, "batch"))


def _lines(measurements: Sequence[Measurement]) -> list[tuple[int, str]]:
    branches = sorted({m.branches for m in measurements})
    return [(value, _COLORS[index % len(_COLORS)]) for index, value in enumerate(branches)]


def _line(axes: Any, points: dict[int, Any], label: str, color: str, form: str) -> None:
    xs = sorted(points)
    axes.plot(xs, [points[x] for x in xs], marker="o", markersize=5, linewidth=1.8, color=color, label=label, zorder=3)
    for x in xs:
        axes.annotate(
            form.format(points[x]), (x, points[x]), xytext=(0, 7), textcoords="offset points",
            ha="center", fontsize=8, color=color,
        )  # fmt: skip


def _ticks(measurements: Sequence[Measurement], name: str) -> list[int]:
    return sorted({getattr(m, name) for m in measurements})


def _finish(axes: Any, x_label: str, y_label: str, ticks: list[int]) -> None:
    if len(ticks) > 1:
        axes.set_xscale("log")
        axes.set_xlim(ticks[0] / 1.35, ticks[-1] * 1.35)
    axes.set_xticks(ticks, labels=[f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(x_label, fontsize=9, color=_INK)
    axes.set_ylabel(y_label, fontsize=9, color=_INK)
    axes.tick_params(labelsize=8.5, colors=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8.5, loc="lower right")
