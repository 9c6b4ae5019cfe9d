"""The rounds of a text, laid out to be read as plain text. Strings and numbers only: knows no model."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from ..outputs import AdaFuseCandidate, AdaFuseRound, count_words

END = "<end>"
_FOLDERS = re.compile(r"\((?=[^()]*\)$)[^()]*[/\\]")


def bracketed(text: str) -> str:
    """A committed span on one line, without its outer spaces: `[is generally a]`."""
    return f"[{on_one_line(text).strip(' ')}]"


def format_trace(rounds: Sequence[AdaFuseRound], names: Sequence[str], stats: dict[str, Any] | None = None) -> str:
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
        stats (`dict`, *optional*): of the output, where it had no other prompt; adds the forward passes.
    """
    blocks = ["Members  " + "  ".join(f"{k}: {name}" for k, name in enumerate(names))]
    blocks += [format_round(number, committed) for number, committed in enumerate(rounds, start=1)]
    ending = [summary(rounds)]
    if stats is not None:
        passes = (f"{k}: {member['forward_passes']}" for k, member in enumerate(stats["members"]))
        ending.append("Forward passes  " + "  ".join(passes))
    wins = (f"{k}: {number}" for k, number in enumerate(count_wins(rounds, len(names))))
    ending.append("Winners proposed by  " + "  ".join(wins))
    return "\n\n".join([*blocks, "\n".join(ending)]) + "\n"


def summary(rounds: Sequence[AdaFuseRound]) -> str:
    """`12 rounds, 1.83 words per round`; the end of the text counts as a word."""
    counts = count_words([rounds])
    return f"{_count(counts['rounds'], 'round')}, {counts['words_per_round']:.2f} words per round"


def count_wins(rounds: Sequence[AdaFuseRound], num_members: int) -> list[int]:
    """Per member, the rounds that it won; one that several members won alike counts for each."""
    winners = [winning_members(committed) for committed in rounds]
    return [sum(member in proposers for proposers in winners) for member in range(num_members)]


def winning_members(committed: AdaFuseRound) -> list[int]:
    """The members that proposed what was committed; none where the method wrote it itself."""
    if committed.winner is not None:
        return committed.candidates[committed.winner].proposers
    return [] if committed.proposer is None else [committed.proposer]


def short_name(name: str) -> str:
    """A member's name without the folders before it: `assistant 1 (models/qwen3)` as `assistant 1 (qwen3)`."""
    return _FOLDERS.sub("(", name)


def format_round(number: int, committed: AdaFuseRound) -> str:
    """One round: what was committed, its candidates, the margins."""
    span = bracketed(committed.text) + (f" {END}" if committed.ends else "")
    counts = f"{_count(len(committed.words), 'word')}, {_count(committed.num_tokens, 'token')}"
    lines = [f"Round {number}  {span}  {counts}"]
    if committed.winner is None:
        lines.append("    every candidate was ruled out: the main model's greedy word was taken")
    if not committed.is_whole:
        lines.append("    generation stopped inside the winner")
    lines += _format_table(committed)
    if any(committed.margins):
        lines.append(f"    margins  {show_margins(committed)}")
    return "\n".join(lines)


def _format_table(committed: AdaFuseRound) -> list[str]:
    candidates = committed.candidates
    ranks = ranking(committed)
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
    note = f"dropped: {candidate.dropped}" if candidate.dropped else ""
    if candidate.lossy and not note:
        note = f"not exact for {' '.join(map(str, candidate.lossy))}"
    scores = map(show_nll, [*candidate.nlls, candidate.score])
    return [show_candidate(candidate), show_proposers(candidate), *scores, note]


def show_candidate(candidate: AdaFuseCandidate) -> str:
    """`" Lima."`, with `<end>` after it where the text ends."""
    text = f'"{on_one_line(candidate.text)}"' if candidate.text else ""
    return f"{text} {END if candidate.ends else ''}".strip(" ")


def show_proposers(candidate: AdaFuseCandidate) -> str:
    """`0 1`, or `-` where the method wrote it itself."""
    return " ".join(map(str, candidate.proposers)) or "-"


def show_nll(nll: float | None) -> str:
    """`0.412`, or `-` for one that was not scored."""
    return "-" if nll is None else f"{nll:.3f}"


def show_margins(committed: AdaFuseRound) -> str:
    """`0: 0.81 0.74  1: 0.15`: per member, the margins that it read."""
    read = enumerate(committed.margins)
    return "  ".join(f"{k}: {' '.join(f'{margin:.2f}' for margin in margins)}" for k, margins in read if margins)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ranking(committed: AdaFuseRound) -> list[int]:
    """The indices of the candidates: the winner, then the others from the lowest fused score on."""
    scores = [candidate.score for candidate in committed.candidates]
    return sorted(range(len(scores)), key=lambda rank: (rank != committed.winner, scores[rank]))


def on_one_line(text: str) -> str:
    """The text with newlines and other control characters as escapes."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _padded(cell: str, width: int) -> str:
    return cell + " " * (width - _width(cell))


def _width(text: str) -> int:
    """In columns of a terminal."""
    marks = sum(unicodedata.combining(char) > 0 for char in text)
    return len(text) - marks + sum(unicodedata.east_asian_width(char) in "WF" for char in text)
