"""Pictures of rounds: how long they are, who wins them, how sure the members were, what the text cost. Needs the
`plots` extra (matplotlib). Shows nothing by itself: it returns the axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from .outputs import AdaFuseRound
from .rounds.round_lists import AdaFuseRoundsBatch
from .rounds.trace_html import COLOURS
from .rounds.trace_text import on_one_line, winning_members

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "overview", "plot_margins", "plot_scores", "plot_wins", "plot_words"]

_GREY = "#777777"
_BINS = [step / 10 for step in range(11)]
_ROUNDING = 1e-6  # nats by which an NLL may be below 0
_MAX_LABELS = 40  # spans written along the axis; more would cover one another


def plot_words(rounds: Any, ax: Axes | None = None) -> Axes:
    """
    How many words a round committed; the end of the text counts as a word.

    Args:
        rounds (`AdaFuseRoundsBatch` or `AdaFuseRounds`): `output.rounds`, or one prompt's part of it.
        ax (`matplotlib.axes.Axes`, *optional*): where to draw; a new figure by default.

    Returns:
        `matplotlib.axes.Axes`: what was drawn on.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is no round.
    """
    batch = _batch(rounds)
    ax = _axes(ax)
    sizes = [len(committed.words) + committed.ends for committed in _all(batch)]
    shown = range(min(sizes), max(sizes) + 1)
    counts = [sizes.count(size) for size in shown]
    bars = ax.bar(shown, counts, color=_GREY)
    ax.bar_label(bars, [f"{100 * count / len(sizes):.0f} %" for count in counts])
    ax.set_xticks(shown)
    ax.margins(y=0.15)
    _label(ax, f"{sum(sizes) / len(sizes):.2f} words per round", "words committed in a round", "rounds")
    _count_axis(ax.yaxis)
    return ax


def plot_wins(rounds: Any, ax: Axes | None = None) -> Axes:
    """
    Who proposed what was committed: alone, or together with others. Arguments as for [`plot_words`].
    """
    batch = _batch(rounds)
    ax = _axes(ax)
    winners = [winning_members(committed) for committed in _all(batch)]
    names = [f"{k}: {name}" for k, name in enumerate(batch.names)]
    alone = [winners.count([k]) for k in range(len(names))]
    together = [sum(k in proposers for proposers in winners) - alone[k] for k in range(len(names))]
    colours = [COLOURS[k % len(COLOURS)] for k in range(len(names))]
    ax.barh(names, alone, color=colours)
    ax.barh(names, together, left=alone, color=colours, alpha=0.35, hatch="//", edgecolor="white")
    for row, (first, second) in enumerate(zip(alone, together, strict=True)):
        ax.text(first + second, row, f" {first} + {second}", va="center")
    ax.invert_yaxis()
    ax.margins(x=0.15)
    _label(ax, f"Who wins: {len(winners)} rounds", "rounds won: alone (solid) + with others (hatched)", "")
    _count_axis(ax.xaxis)
    return ax


def plot_margins(rounds: Any, ax: Axes | None = None) -> Axes:
    """
    How sure each member was at the starts of the words it walked; left of the line it branched. Arguments as for
    [`plot_words`].
    """
    batch = _batch(rounds)
    ax = _axes(ax)
    margins = [[m for committed in _all(batch) for m in committed.margins[k]] for k in range(len(batch.names))]
    colours = [COLOURS[k % len(COLOURS)] for k in range(len(margins))]
    ax.hist(margins, _BINS, color=colours, label=[f"{k}: {name}" for k, name in enumerate(batch.names)])
    if batch.threshold is not None:
        ax.axvline(batch.threshold, color="black", linewidth=1, linestyle="--")
        ax.annotate(
            f" tau = {batch.threshold:g}", (batch.threshold, 1), xycoords=("data", "axes fraction"), va="top", ha="left"
        )
        read = [margin for values in margins for margin in values]
        share = sum(margin < batch.threshold for margin in read) / max(len(read), 1)
        title = f"{100 * share:.0f} % of words uncertain"
    else:
        title = "Margins"
    ax.set_xticks(_BINS)
    ax.legend(frameon=False, loc="best")
    _label(ax, title, "margin p(1) - p(2) at the start of a word", "words")
    return ax


def plot_scores(rounds: Any, ax: Axes | None = None) -> Axes:
    """
    The fused score of what each round committed, along the text of one prompt, and as dots those of the candidates that
    lost. Where a method votes, rates or prefers, the shares, ratings and preferences themselves are drawn, and the
    highest wins. The scale is that of square roots, and linear where there are values below 0. Arguments as for
    [`plot_words`]; of several prompts, the one with the most rounds is drawn.
    """
    batch = _batch(rounds)
    ax = _axes(ax)
    row = max(range(len(batch)), key=lambda row: len(batch[row]))
    sign = -1 if any(map(_is_negated, batch[row])) else 1
    values = [[_without_rounding(sign * one.score) for one in committed.candidates] for committed in batch[row]]
    for place, (committed, of_round) in enumerate(zip(batch[row], values, strict=True)):
        losers = [value for rank, value in enumerate(of_round) if rank != committed.winner and math.isfinite(value)]
        ax.plot([place] * len(losers), losers, "o", color=_GREY, alpha=0.6, markersize=4)
        members = winning_members(committed)
        if committed.winner is not None and members:  # a fused answer has no score
            _draw_winner(ax, place, of_round[committed.winner], members)
    spans = [on_one_line(c.text).strip(" ") + (" <end>" if c.ends else "") for c in batch[row]]
    has_labels = len(spans) <= _MAX_LABELS
    if has_labels:
        labels = [span.replace("$", r"\$") for span in spans]  # no formulas
        ax.set_xticks(range(len(spans)), labels, rotation=90 if len(spans) > 4 else 0)
    of_prompt = f" of prompt {row + 1}" if len(batch) > 1 else ""
    what = batch[row][0].criterion if sign < 0 else "Fused score"
    end = "highest" if sign < 0 else "lowest"
    title = f"{what[:1].upper()}{what[1:]}{of_prompt} (the {end} wins)"
    _label(ax, title, "" if has_labels else "round", what if sign < 0 else "NLL")
    for k, name in enumerate(batch.names):
        ax.plot([], [], color=COLOURS[k % len(COLOURS)], linewidth=4, label=f"{k}: {name}")
    ax.legend(frameon=False, loc="best", fontsize="small")
    if any(-math.inf < value < 0 for of_round in values for value in of_round):
        ax.axhline(0, color=_GREY, linewidth=1)
    else:
        ax.set_yscale("function", functions=(lambda nll: abs(nll) ** 0.5, lambda root: root**2))
        ax.set_ylim(bottom=0)
    return ax


def _is_negated(committed: AdaFuseRound) -> bool:
    """Whether the scores of a round are minus what decided it: shares of votes, ratings, preferences. Of probabilities
    the scores are minus logarithms."""
    compared = [one for one in committed.candidates if one.decided_by and math.isfinite(one.score)]
    return committed.highest_wins and bool(compared) and all(one.decided_by == [-one.score] for one in compared)


def _without_rounding(value: float) -> float:
    """0 for an NLL that rounding has put just below 0, as of a sum of probabilities above 1."""
    return 0.0 if -_ROUNDING < value < 0 else value


def _draw_winner(ax: Axes, place: int, score: float, members: list[int]) -> None:
    """A bar in the colours of the members that proposed the winner, and their numbers above it."""
    width = 0.8 / len(members)
    for index, member in enumerate(members):
        left = place - 0.4 + index * width
        colour = COLOURS[member % len(COLOURS)]
        ax.plot([left, left + width], [score] * 2, color=colour, linewidth=4, solid_capstyle="butt")
    numbers = " ".join(map(str, members))
    below = score > 0.02  # under the bar is room, but not under the axis
    offset, side = (-4, "top") if below else (4, "bottom")
    options: Any = {"textcoords": "offset points", "ha": "center", "va": side, "fontsize": "x-small"}
    ax.annotate(numbers, (place, score), (0, offset), **options)


def overview(rounds: Any) -> Figure:
    """
    All four on one figure. Arguments as for [`plot_words`].

    Returns:
        `matplotlib.figure.Figure`
    """
    batch = _batch(rounds)
    figure, axes = _pyplot().subplots(2, 2, figsize=(12, 8), layout="constrained")
    for plot, ax in zip((plot_words, plot_wins, plot_margins, plot_scores), axes.flat, strict=True):
        plot(batch, ax=ax)
    return cast("Figure", figure)


def _batch(rounds: Any) -> AdaFuseRoundsBatch:
    """The rounds as those of a batch, whatever list they came in."""
    prompts: Sequence[Any] = [rounds] if rounds and isinstance(rounds[0], AdaFuseRound) else rounds
    if not any(prompts):
        raise ValueError("`rounds` must hold at least one round, but is empty. Pass `output.rounds` of a text.")
    # A slice of `output.rounds` is a plain list, whose parts still know the names.
    known = next((one for one in (rounds, *prompts) if getattr(one, "names", None)), None)
    return AdaFuseRoundsBatch(prompts, getattr(known, "names", None), getattr(known, "threshold", None))


def _all(batch: AdaFuseRoundsBatch) -> list[AdaFuseRound]:
    return [committed for prompt in batch for committed in prompt]


def _axes(ax: Axes | None) -> Axes:
    return cast("Axes", _pyplot().subplots(layout="constrained")[1]) if ax is None else ax


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            '`hf_adafuse.plots` needs the package matplotlib. Install it with `pip install "hf_adafuse[plots]"`.'
        ) from error
    return pyplot


def _label(ax: Axes, title: str, xlabel: str, ylabel: str) -> None:
    ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
    ax.spines[["top", "right"]].set_visible(False)


def _count_axis(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))
