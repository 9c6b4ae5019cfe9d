"""The rounds of a text, laid out to be read. Strings and numbers only: knows no model."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..outputs import AdaFuseCandidate, AdaFuseRound

_END = "<end>"


def bracketed(text: str) -> str:
    """A committed span on one line, without its outer spaces: `[is generally a]`."""
    return f"[{_on_one_line(text).strip(' ')}]"


def format_trace(rounds: Sequence[AdaFuseRound], names: Sequence[str], stats: dict[str, Any]) -> str:
    """
    A table per round: its candidates, best first, who proposed them, their NLL under each member, the fused score.

        Round 2  [is generally a]  3 words, 3 tokens
            candidate            by   nll 0  nll 1  fused
          > " is generally a"    0 1  0.412  0.630  0.521
            " is generally the"  1    0.731  0.604  0.668
            margins  0: 0.81 0.74 0.32  1: 0.93 0.88 0.15

    Args:
        rounds (`list[AdaFuseRound]`): of one prompt.
        names (`list[str]`): of the members, the main model first.
        stats (`dict`): of the output.
    """
    blocks = ["Members  " + "  ".join(f"{k}: {name}" for k, name in enumerate(names))]
    blocks += [_format_round(number, committed) for number, committed in enumerate(rounds, start=1)]
    passes = "  ".join(f"{k}: {member['forward_passes']}" for k, member in enumerate(stats["members"]))
    wins = "  ".join(f"{k}: {member['wins']}" for k, member in enumerate(stats["members"]))
    words = f"{stats['words_per_round']:.2f} words per round"
    blocks.append(f"{_count(stats['rounds'], 'round')}, {words}\nForward passes  {passes}\nWinners proposed by  {wins}")
    return "\n\n".join(blocks) + "\n"


def _format_round(number: int, committed: AdaFuseRound) -> str:
    span = bracketed(committed.text) + (f" {_END}" if committed.ends else "")
    counts = f"{_count(len(committed.words), 'word')}, {_count(committed.num_tokens, 'token')}"
    lines = [f"Round {number}  {span}  {counts}"]
    if committed.winner is None:
        lines.append("    every candidate was ruled out: the main model's greedy word was taken")
    if not committed.is_whole:
        lines.append("    generation stopped inside the winner")
    lines += _format_table(committed)
    margins = [f"{k}: {' '.join(f'{m:.2f}' for m in read)}" for k, read in enumerate(committed.margins) if read]
    if margins:
        lines.append("    margins  " + "  ".join(margins))
    return "\n".join(lines)


def _format_table(committed: AdaFuseRound) -> list[str]:
    candidates = committed.candidates
    ranks = sorted(range(len(candidates)), key=lambda rank: (rank != committed.winner, candidates[rank].score))
    header = ["candidate", "by", *[f"nll {k}" for k in range(len(committed.margins))], "fused", ""]
    rows = [header, *[_cells(candidates[rank]) for rank in ranks]]
    marks = [" ", *[">" if rank == committed.winner else " " for rank in ranks]]
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    lines = []
    for mark, row in zip(marks, rows, strict=True):
        text, proposers, *numbers, note = map(_padded, row, widths)
        numbers = [number.strip().rjust(len(number)) for number in numbers]
        lines.append(f"  {mark} {'  '.join([text, proposers, *numbers, note])}".rstrip())
    return lines


def _cells(candidate: AdaFuseCandidate) -> list[str]:
    text = f'"{_on_one_line(candidate.text)}"' if candidate.text else ""
    nlls = ["-" if nll is None else f"{nll:.3f}" for nll in candidate.nlls]
    note = f"dropped: {candidate.dropped}" if candidate.dropped else ""
    if candidate.lossy and not note:
        note = f"not exact for {' '.join(map(str, candidate.lossy))}"
    proposers = " ".join(map(str, candidate.proposers))
    return [f"{text} {_END if candidate.ends else ''}".strip(" "), proposers, *nlls, f"{candidate.score:.3f}", note]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _on_one_line(text: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _padded(cell: str, width: int) -> str:
    return cell + " " * (width - _width(cell))


def _width(text: str) -> int:
    """In columns of a terminal."""
    marks = sum(unicodedata.combining(char) > 0 for char in text)
    return len(text) - marks + sum(unicodedata.east_asian_width(char) in "WF" for char in text)
