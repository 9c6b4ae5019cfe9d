"""Draws measurements: what an ensemble costs, against prompt length and batch. Needs matplotlib (the `plots` extra)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .report import size_text
from .results import OURS, Measurement

_COLORS = ("#1f6fb4", "#d1663a", "#4b9a5b", "#8a63b0")
_GRAY = "#8c8c8c"
_INK = "#303030"


def check_matplotlib(wanted: str = "`--plot`", otherwise: str = "") -> None:
    """
    Check before anything is measured that a picture can be drawn.

    Args:
        wanted (`str`, *optional*): what needs it.
        otherwise (`str`, *optional*): what else to do than to install it, like `", or pass --no-plot"`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"The package `matplotlib` must be installed for {wanted}, but is not. "
            f'Install it with `pip install "hf_adafuse[plots]"`{otherwise}.'
        ) from error


def save_plot(measurements: Sequence[Measurement], path: str | Path) -> None:
    """
    Draw the measurements whose members have the sizes of the first one, and write a PNG.

    Left: our time over the own greedy time of the slowest member, against the prompt's length, at the smallest batch.
    Right: words per second over those of the smallest batch, against the batch size, for the shortest prompts. Both
    have one line for each number of branches.
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
    shown = [m for m in measurements if m.batch == batch and m.alone_ratio is not None]
    lines = {}
    for branches in sorted({m.branches for m in shown}):
        lines[f"B = {branches}"] = {m.prompt_tokens: m.alone_ratio or 0.0 for m in shown if m.branches == branches}
    _draw_lines(axes, lines, "{:.2f}")
    axes.axhline(1.0, color=_GRAY, linewidth=1, linestyle=(0, (4, 3)), zorder=1, label="the slowest member alone")
    axes.set_ylim(0, 1.2 * max([1.0, *(m.alone_ratio or 0.0 for m in shown)]))
    label = f"time / the slowest member alone (batch {batch})"
    _finish(axes, "prompt (tokens)", label, sorted({m.prompt_tokens for m in shown}))


def _draw_batches(axes: Any, measurements: Sequence[Measurement]) -> None:
    tokens = min(m.prompt_tokens for m in measurements)
    shown = [m for m in measurements if m.prompt_tokens == tokens]
    smallest = min(m.batch for m in shown)
    lines = {}
    for branches in sorted({m.branches for m in shown}):
        rates = {m.batch: m.words_per_second(OURS) for m in shown if m.branches == branches}
        if smallest in rates:
            name = f"B = {branches} ({rates[smallest]:.1f} words/s at batch {smallest})"
            lines[name] = {batch: rate / rates[smallest] for batch, rate in rates.items()}
    _draw_lines(axes, lines, "{:.1f}x", unlabelled=smallest)
    axes.set_ylim(0, 1.2 * max([1.0, *(gain for line in lines.values() for gain in line.values())]))
    label = f"words/s over batch {smallest} (prompt of {tokens} tokens)"
    _finish(axes, "batch", label, sorted({m.batch for m in shown}))


def _draw_lines(axes: Any, lines: dict[str, dict[int, float]], form: str, unlabelled: int | None = None) -> None:
    """Draw one line for each name. Numbers stand above the highest point at each x, and below the other points."""
    for index, (name, points) in enumerate(lines.items()):
        color = _COLORS[index % len(_COLORS)]
        xs = sorted(points)
        axes.plot(xs, [points[x] for x in xs], "o-", markersize=5, linewidth=1.8, color=color, label=name, zorder=3)
        for x in xs:
            is_highest = points[x] >= max(line.get(x, 0.0) for line in lines.values())
            place = {"xytext": (0, 7 if is_highest else -15), "textcoords": "offset points", "ha": "center"}
            if x != unlabelled:
                axes.annotate(form.format(points[x]), (x, points[x]), fontsize=8, color=color, **place)


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
