"""Draws the tables and figures of the paper. Needs matplotlib (the `plots` extra)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from ...cli.job_settings import write_whole
from ...decoding.strategies.registry import has_adaptive_spans
from ...demo.paired import Mean
from ...outputs import AdaFuseRound
from ...rounds.trace_html import COLOURS
from ...rounds.trace_text import ranking, show_candidate
from ..evaluation.candidates import Contestant
from .clock import Timing
from .report import METRIC_NAMES, Report
from .rounds import Parting
from .scores import SHARES
from .values import TASKS

_GREY = "#8c8c8c"
_SHADES = ("#c6dbef", "#6baed6", "#2171b5", "#08306b")  # for rounds of 1, 2, 3 and more words
_MOST_ROWS = 14
_MOST_CANDIDATES = 6
_MOST_LETTERS = 32
_LEAST_POINTS = 10
# By figure, the field of the settings over which it has lines, and what the axis is called.
_FIELDS = {
    "fig4": ("num_branches", "branches B"),
    "fig6": ("margin_threshold", "margin threshold tau"),
    "fig7": ("num_branches", "branches B"),
}


def save_scores(report: Report, path: Path) -> None:
    """Draw scores with their standard errors, and beside them the lengths of the rounds, and write a PNG. A panel that
    would be empty is left out; where all would be, nothing is written."""
    name = report.experiment.name
    contents: dict[Callable[[Any, Report], None], Any] = {
        _draw_lines: name in _FIELDS and _lines(report),
        _draw_bars: name not in ("fig6", "fig7") and _bar_rows(report),
        _draw_shares: _share_rows(report),
    }
    panels = [panel for panel, content in contents.items() if content]
    if not panels:
        return
    widths = [1.6 if panel is _draw_bars and len(report.tasks) > 2 else 1.0 for panel in panels]
    figure, axes = _figure(1, len(panels), (4.6 * sum(widths), 4.2), widths)
    for ax, panel in zip(axes, panels, strict=True):
        panel(ax, report)
    _save(figure, report.experiment.title, path)


def save_times(title: str, labels: Mapping[Contestant, str], timings: Mapping[Contestant, Timing], path: Path) -> None:
    """Draw the time of each candidate over the members' own time in turn, and write a PNG."""
    figure, (ax,) = _figure(1, 1, (7.2, 1.4 + 0.42 * len(timings)))
    names = [labels[candidate] for candidate in timings]
    means = [timing.ratio for timing in timings.values()]
    is_ours = [has_adaptive_spans(candidate.settings.get("method", "adafuse")) for candidate in timings]
    colours = [_GREY if one.is_alone else COLOURS[0 if ours else 1] for one, ours in zip(timings, is_ours, strict=True)]
    ax.barh(names, [one.value for one in means], xerr=_errors(means), color=colours, height=0.6, capsize=3)
    for row, timing in enumerate(timings.values()):
        end = timing.ratio.value + _errors([timing.ratio])[0]
        text = ax.text(end, row, f"  {timing.ratio.value:.2f}  ({timing.seconds.value:.3g} s)", va="center", fontsize=8)
        # The box keeps the text readable over the line at 1.
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    ax.axvline(1.0, color="black", linewidth=1, linestyle="--")
    ax.invert_yaxis()
    ax.margins(x=0.3)
    _label(ax, "", "time / sum of the members' own (in brackets: seconds per prompt)", "")
    _save(figure, title, path)


def save_parting(title: str, labels: tuple[str, str], parting: Parting, path: Path) -> None:
    """Draw the candidates of the two rounds in which two ways of decoding part, and write a PNG. The lowest score
    wins."""
    figure, axes = _figure(1, 2, (11, 3.2))
    for ax, label, rounds, text in zip(axes, labels, parting.rounds, parting.texts, strict=True):
        if rounds:
            _draw_candidates(ax, rounds[-1])
        answer = _plain(text.strip())
        _label(ax, f"{label}, round {len(rounds)} (answer: {answer})", "fused score (NLL; the lowest wins)", "")
    _save(figure, f"{title}\n{_plain(parting.question.rpartition(chr(10))[2], 110)}", path)


def _draw_candidates(ax: Any, committed: AdaFuseRound) -> None:
    ranks = [rank for rank in ranking(committed) if math.isfinite(committed.candidates[rank].score)][:_MOST_CANDIDATES]
    found = [committed.candidates[rank] for rank in ranks]
    colours = [COLOURS[0] if rank == committed.winner else _GREY for rank in ranks]
    rows = range(len(found))
    ax.barh(rows, [one.score for one in found], color=colours, height=0.6)
    ax.set_yticks(rows, [_plain(show_candidate(one)) for one in found])
    for row, one in enumerate(found):
        ax.text(one.score, row, f" {one.score:.2f}", va="center", fontsize=8)
    ax.invert_yaxis()
    ax.margins(x=0.15)


def _draw_bars(ax: Any, report: Report) -> None:
    """Draw a group of bars for each task, with a bar for each of `_bar_rows`."""
    asked = [report.of_task(task) for task in report.tasks]
    rows = _bar_rows(report)
    width = 0.8 / len(rows)
    for index, candidate in enumerate(rows):
        means = [found[candidate].mean for found in asked]
        places = [group - 0.4 + (index + 0.5) * width for group in range(len(means))]
        colour = _colour(index, len(rows), candidate)
        options = {"capsize": 2, "error_kw": {"linewidth": 1}}
        values = [one.value for one in means]
        ax.bar(
            places, values, 0.92 * width, yerr=_errors(means), color=colour, label=report.label(candidate), **options
        )
    ax.set_xticks(range(len(asked)), [TASKS[task] for task in report.tasks])
    _label(ax, _about(report), "", "points")
    ax.set_ylim(0, max(ax.get_ylim()[1], 1.0))  # also where nothing is right
    _legend(ax)


def _bar_rows(report: Report) -> list[Contestant]:
    """The candidates with bars: those that have answered all tasks. In figure 4, which has lines for the others, those
    of its difference."""
    rows = report.experiment.candidates
    if report.experiment.name == "fig4":
        rows = [one for contrast in report.experiment.contrasts for one in (*contrast.others, contrast.candidate)]
    return [one for one in rows if report.tasks and all(one in report.of_task(task) for task in report.tasks)]


def _draw_lines(ax: Any, report: Report) -> None:
    """Draw each of `_lines`."""
    lines = _lines(report)
    for index, (name, points) in enumerate(lines.items()):
        xs = [x for x, _ in points]
        means = [one for _, one in points]
        shift = 0.012 * (max(xs) - min(xs)) * (index - (len(lines) - 1) / 2)  # so that error bars stand apart
        options = {"marker": "o", "markersize": 5, "capsize": 3, "linewidth": 1.6, "elinewidth": 1}
        colour = COLOURS[index % len(COLOURS)]
        moved = [x + shift for x in xs]
        values = [one.value for one in means]
        ax.errorbar(moved, values, _errors(means), color=colour, label=name, **options)
        ax.set_xticks(xs, [f"{x:g}" for x in xs])
    _label(ax, _about(report), _FIELDS[report.experiment.name][1], "points")
    _widen(ax)
    _legend(ax, least=1)


def _lines(report: Report) -> dict[str, list[tuple[float, Mean]]]:
    """By its name, the points of a line for each kind of exploration and each task that all candidates were asked: the
    value of the field in `_FIELDS`, and the score."""
    field, _ = _FIELDS[report.experiment.name]
    lines: dict[str, list[tuple[float, Mean]]] = {}
    for (task, candidate), scores in report.scores.items():
        kind = candidate.settings.get("exploration", "diverse")
        name = TASKS[task] + (f", {kind}" if report.experiment.name == "fig7" else "")
        if len(report.of_task(task)) == len(report.experiment.candidates):
            lines.setdefault(name, []).append((getattr(candidate.config, field), scores.mean))
    return lines


def _draw_shares(ax: Any, report: Report) -> None:
    """Draw the shares of rounds of 1, 2, 3 and more words as stacked bars, one for each of `_share_rows`."""
    rows = _share_rows(report)
    is_of_one = len({candidate for _, candidate in rows}) == 1 and len(report.tasks) > 1
    names = [TASKS[task] if is_of_one else _row_name(report, task, candidate) for task, candidate in rows]
    lefts = [0.0] * len(rows)
    for index, size in enumerate((*SHARES, None)):
        shares = [_share(report.scores[pair].shares, size) for pair in rows]
        label = "more" if size is None else f"{size} word{'s' * (size > 1)}"
        if any(shares):
            ax.barh(range(len(rows)), shares, left=lefts, color=_SHADES[index], height=0.7, label=label)
        lefts = [left + share for left, share in zip(lefts, shares, strict=True)]
    for row, pair in enumerate(rows):
        ax.text(101, row, f"{report.scores[pair].words_per_round:.2f}", va="center", fontsize=8)
    ax.set_yticks(range(len(rows)), names)
    ax.invert_yaxis()
    ax.set_xlim(0, 112)
    title = f"words per round of {report.label(rows[0][1])}" if is_of_one else "words per round"
    _label(ax, title, "share of the rounds, %; then their mean", "")
    _legend(ax, columns=4)


def _share_rows(report: Report) -> list[tuple[str, Contestant]]:
    """The tasks and candidates that have rounds. Where these are too many, the headline candidate's alone."""
    rows = [pair for pair, scores in report.scores.items() if scores.sizes]
    return rows if len(rows) <= _MOST_ROWS else [pair for pair in rows if pair[1] == report.experiment.headline]


def _about(report: Report) -> str:
    """What the numbers are: `exact match; n = 25; with standard errors`."""
    metrics = dict.fromkeys(METRIC_NAMES[scores.metric] for scores in report.scores.values())
    numbers = sorted({scores.mean.n for scores in report.scores.values()})
    shown = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    return f"{', '.join(metrics)}; n = {shown}; with standard errors"


def _row_name(report: Report, task: str, candidate: Contestant) -> str:
    return ", ".join([TASKS[task]] * (len(report.tasks) > 1) + [report.label(candidate)])


def _share(shares: Mapping[int, float], size: int | None) -> float:
    """The share of rounds with `size` words in per cent; `None`: with any number but 1, 2 and 3."""
    if size is not None:
        return 100 * shares.get(size, 0.0)
    return 100 * sum(share for known, share in shares.items() if known not in SHARES)


def _colour(index: int, number: int, candidate: Contestant) -> str:
    """The colour of a candidate. Members alone are grey, and the last candidate is ours."""
    if candidate.is_alone:
        return ("#c7c7c7", "#9a9a9a", "#6e6e6e")[index % 3]
    return COLOURS[0] if index == number - 1 else COLOURS[1 + index % (len(COLOURS) - 1)]


def _errors(means: Sequence[Mean]) -> list[float]:
    """The standard errors, with 0 for those that are NaN."""
    return [0.0 if math.isnan(one.error) else one.error for one in means]


def _plain(text: str, most: int = _MOST_LETTERS) -> str:
    """A text on one line, cut to `most` characters, in which matplotlib sees no formula."""
    line = " ".join(text.split())
    return (line if len(line) <= most else f"{line[: most - 3]}...").replace("$", r"\$")


def _figure(
    rows: int, columns: int, size: tuple[float, float], widths: Sequence[float] | None = None
) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained", dpi=140)
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, width_ratios=widths).flat


def _save(figure: Any, title: str, path: Path) -> None:
    figure.suptitle(title, fontsize=11)
    content = BytesIO()
    figure.savefig(content, format="png")
    write_whole(path, content.getvalue())


def _label(ax: Any, title: str, xlabel: str, ylabel: str) -> None:
    ax.set_title(title, fontsize=9)
    ax.set_xlabel(xlabel, fontsize=9)
    ax.set_ylabel(ylabel, fontsize=9)
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)


def _widen(ax: Any) -> None:
    """Make the axis show at least `_LEAST_POINTS` points, and none below 0 or above 100. Otherwise a tiny difference
    would look like a large one."""
    low, high = ax.get_ylim()
    middle = (low + high) / 2
    half = max(0.6 * (high - low), _LEAST_POINTS / 2)
    low = max(middle - half, 0)
    high = min(max(middle + half, low + _LEAST_POINTS), 100)
    ax.set_ylim(min(low, high - _LEAST_POINTS), high)


def _legend(ax: Any, columns: int = 3, least: int = 2) -> None:
    """Put the legend below the axis, where it covers nothing, if it has at least `least` entries."""
    if len(ax.get_legend_handles_labels()[0]) >= least:
        ax.legend(frameon=False, fontsize=8, ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -0.14))
