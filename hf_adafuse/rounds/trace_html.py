"""The rounds of a text as HTML for notebooks.

Every style is inline and every colour a transparent tint, so that it reads on light and dark pages, and where style
sheets are removed. Who proposed a span is told by colour and by number, never by colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..outputs import AdaFuseRound
from .trace_text import (
    END_MARK,
    decision,
    format_round,
    on_one_line,
    ranking,
    show_candidate,
    show_confidences,
    show_margins,
    show_nll,
    show_proposers,
    show_values,
    summary,
    winning_members,
)

# Okabe and Ito's colours, which colour-blind readers can tell apart, in an order that sets the first ones far apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
MAX_PROMPTS = 20
_HEAT = "#D55E00"  # the bar under a word of which nobody is sure
_NOBODY = "#808080"  # what no member has proposed

_UNCERTAIN = "text-decoration:underline dotted 2px;text-underline-offset:3px"
_END = "opacity:.75"
_NUMBERS = "font-size:70%;opacity:.75;margin-left:1px;user-select:none;-webkit-user-select:none"
_CELL = "text-align:left;vertical-align:top;padding:6px 16px 5px 0"
_HEADINGS = (
    "round",
    "committed",
    "proposed by",
    "decided by",
    "winner",
    "next",
    "weights",
    "margins",
    "confidence",
    "candidates",
)


def format_html(prompts: Sequence[Sequence[AdaFuseRound]], names: Sequence[str], threshold: float | None = None) -> str:
    """
    Per prompt its text, each span in the colours of the members that proposed it, and a table of its rounds.

    Args:
        prompts (`list[list[AdaFuseRound]]`): per prompt, its rounds; shown are the first `MAX_PROMPTS`.
        names (`list[str]`): the members' names, the main model's first.
        threshold (`float`, *optional*): the margin below which a word was uncertain; `None`: no word was.
    """
    confidences = [value for rounds in prompts[:MAX_PROMPTS] for committed in rounds for value in committed.confidences]
    parts = [_legend(names, threshold, any(value is not None for value in confidences))]
    for number, rounds in enumerate(prompts[:MAX_PROMPTS], start=1):
        if len(prompts) > 1:
            parts.append(f'<div style="margin-top:12px"><b>Prompt {number}</b></div>')
        spans = "".join(_span(committed, names, threshold) for committed in rounds)
        parts.append(f'<div style="white-space:pre-wrap;line-height:2.1;margin:6px 0">{spans}</div>')
        parts.append(_table(rounds, threshold, is_open=len(prompts) == 1))
    if len(prompts) > MAX_PROMPTS:
        parts.append(f"<div>{len(prompts) - MAX_PROMPTS} more prompts are not shown; take them one by one.</div>")
    return f"<div>{''.join(parts)}</div>"


def html_page(title: str, body: str) -> str:
    """A whole page around the HTML of rounds, light or dark as the reader's system is."""
    style = "body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem}"
    head = f'<meta charset="utf-8"><meta name="color-scheme" content="light dark"><title>{escape(title)}</title>'
    return f"<!doctype html>\n<html><head>{head}<style>{style}</style></head><body>{body}</body></html>\n"


def _legend(names: Sequence[str], threshold: float | None, has_confidences: bool) -> str:
    entries = [f"{_chip([member])} {escape(name)}" for member, name in enumerate(names)]
    if threshold is not None:
        entries.append(f"{_styled('uncertain word', _UNCERTAIN)} (margin below {threshold:g})")
    if has_confidences:
        bar = _styled("unsure", "".join(_heat([0.0])))
        entries.append(f"{bar}: the stronger the bar, the less sure the members are of the word")
    entries.append("point at a span for its candidates")
    return f'<div style="font-size:90%">{" &emsp; ".join(entries)}</div>'


def _chip(members: Sequence[int]) -> str:
    return f'<span style="{_colours(members)};padding:4px 6px 2px">{" ".join(map(str, members)) or "-"}</span>'


def _colours(members: Sequence[int]) -> str:
    """A tint of the first member's colour under a bar with the colours of all."""
    colours = [COLOURS[member % len(COLOURS)] for member in members] or [_NOBODY]
    share = 100 / len(colours)
    stops = [f"{colour} {place * share:.0f}% {(place + 1) * share:.0f}%" for place, colour in enumerate(colours)]
    bar = f"linear-gradient(90deg,{','.join(stops)}) top/100% 3px no-repeat"
    return f"background:{bar},{colours[0]}40;padding:4px 0 2px"


def _span(committed: AdaFuseRound, names: Sequence[str], threshold: float | None) -> str:
    """What a round committed, in its place in the text."""
    members = winning_members(committed)
    is_end_alone = committed.ends and not committed.text
    space = " " if is_end_alone else _split_space(committed.text)[0]
    tip = escape(_tip(committed, names)).replace("\n", "&#10;")
    numbers = f'<sub style="{_NUMBERS}">{" ".join(map(str, members))}</sub>'
    words = _marked_words(committed, threshold)
    return f'{escape(space)}<span title="{tip}" style="{_colours(members)}">{words}</span>{numbers}'


def _marked_words(committed: AdaFuseRound, threshold: float | None) -> str:
    """The words committed without the space before them, the uncertain ones underlined, a bar under each: the less sure
    the members are of it, the stronger."""
    margins = [] if committed.proposer is None else committed.margins[committed.proposer]
    is_uncertain = [threshold is not None and margin < threshold for margin in margins]
    is_uncertain += [False] * (len(committed.words) + 1 - len(margins))
    shown = []
    for index, word in enumerate(committed.words):
        space, bare = _split_space(word)
        styles = [_UNCERTAIN] * is_uncertain[index] + _heat(committed.confidences[index : index + 1])
        shown.append(f"{escape(space) if index else ''}{_styled(bare, ';'.join(styles))}")
    if committed.ends:
        style = f"{_END};{_UNCERTAIN}" if is_uncertain[len(shown)] else _END
        shown.append(f"{' ' if shown else ''}{_styled(END_MARK, style)}")
    return "".join(shown)


def _heat(confidences: Sequence[float | None]) -> list[str]:
    """The style of a word of this confidence; none where there is none, or nothing to see."""
    return [
        f"box-shadow:inset 0 -.3em {_HEAT}{round(255 * (1 - value)):02x}"
        for value in confidences
        if value is not None and value < 0.995
    ]


def _styled(text: str, style: str) -> str:
    return f'<span style="{style}">{escape(text)}</span>' if style else escape(text)


def _split_space(text: str) -> tuple[str, str]:
    bare = text.lstrip()
    return text[: len(text) - len(bare)], bare


def _tip(committed: AdaFuseRound, names: Sequence[str]) -> str:
    """The candidates for a tooltip. Numbers first: its letters have different widths."""
    which = "highest" if committed.highest_wins else "lowest"
    lines = [f"{committed.criterion}, the {which} wins (NLL under {', '.join(names)})"]
    for rank in ranking(committed):
        candidate = committed.candidates[rank]
        mark = "\N{BLACK RIGHT-POINTING SMALL TRIANGLE}" if rank == committed.winner else "\N{FIGURE SPACE}"
        nlls = ", ".join(map(show_nll, candidate.nlls))
        by = show_proposers(candidate)
        lines.append(f"{mark} {show_values(candidate.decided_by)} ({nlls}) {show_candidate(candidate)} by {by}")
    return "\n".join([*lines, f"margins  {show_margins(committed)}"])


def _table(rounds: Sequence[AdaFuseRound], threshold: float | None, is_open: bool) -> str:
    head = _row("th", _HEADINGS)
    body = "".join(_row("td", _cells(number, committed, threshold)) for number, committed in enumerate(rounds, start=1))
    table = f'<table style="border-collapse:collapse"><thead>{head}</thead><tbody>{body}</tbody></table>'
    return f"<details{' open' if is_open else ''}><summary>{summary(rounds)}</summary>{table}</details>"


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f'<{tag} style="{_CELL}">{cell}</{tag}>' for cell in cells) + "</tr>"


def _cells(number: int, committed: AdaFuseRound, threshold: float | None) -> list[str]:
    members = winning_members(committed)
    own, other = decision(committed) or (None, None)
    direction = "" if other is None else " (highest)" if committed.highest_wins else " (lowest)"
    candidates = f"<pre>{escape(format_round(number, committed))}</pre>"
    return [
        str(number),
        f'<span style="{_colours(members)};white-space:pre-wrap">{_on_one_row(committed, threshold)}</span>',
        _chip(members),
        f"{escape(committed.criterion)}{direction}",
        show_nll(own),
        show_nll(other),
        " ".join(f"{weight:.2f}" for weight in committed.weights),
        f'<span style="white-space:nowrap">{show_margins(committed).replace("  ", "<br/>")}</span>',
        show_confidences(committed.confidences),
        f"<details><summary>{len(committed.candidates)}</summary>{candidates}</details>",
    ]


def _on_one_row(committed: AdaFuseRound, threshold: float | None) -> str:
    space, _ = _split_space(committed.text)
    return on_one_line(space).strip(" ") + on_one_line(_marked_words(committed, threshold))
