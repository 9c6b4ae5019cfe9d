"""The rounds of a text, laid out to be read as plain text."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from ..outputs import AdaFuseCandidate, AdaFuseRound, count_words

END_MARK = "<end>"
_FOLDERS = re.compile(r"\((?=[^()]*\)$)[^()]*[/\\]")


def bracketed(text: str) -> str:
    """A committed span on one line, without its outer spaces: `[is generally a]`."""
    return f"[{on_one_line(text).strip(' ')}]"


def format_trace(rounds: Sequence[AdaFuseRound], names: Sequence[str], stats: dict[str, Any] | None = None) -> str:
    """
    A table per round: its candidates, best first, who proposed them, their NLL under each member, and the quantity by
    which the winner was found. Of words that are compared one by one it is shown for each, until the candidate lost.
    Below: the margins, and how sure the members are of each word committed.

        Round 2  [is generally a]  3 words, 3 tokens, weights 0.50 0.50, the lowest fused NLL wins
            candidate            by   nll 0  nll 1  fused NLL
          > " is generally a"    0 1  0.412  0.630  0.521
            " is generally the"  1    0.731  0.604  0.668
            margins  0: 0.81 0.74 0.32  1: 0.93 0.88 0.15
            confidence  0.82 0.66 0.31

    Args:
        rounds (`list[AdaFuseRound]`): the rounds of one prompt.
        names (`list[str]`): the members' names, the main model's first.
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
    span = bracketed(committed.text) + (f" {END_MARK}" if committed.ends else "")
    counts = f"{_count(len(committed.words), 'word')}, {_count(committed.num_tokens, 'token')}"
    weights = f", weights {' '.join(f'{weight:.2f}' for weight in committed.weights)}" if committed.weights else ""
    lines = [f"Round {number}  {span}  {counts}{weights}{show_rule(committed)}"]
    if committed.winner is None:
        lines.append("    every candidate was ruled out: the main model's greedy word was taken")
    if not committed.is_whole:
        lines.append("    generation stopped inside the winner")
    lines += _format_table(committed)
    if any(committed.margins):
        lines.append(f"    margins  {show_margins(committed)}")
    if any(value is not None for value in committed.confidences):
        lines.append(f"    confidence  {show_confidences(committed.confidences)}")
    return "\n".join(lines)


def _format_table(committed: AdaFuseRound) -> list[str]:
    candidates = committed.candidates
    ranks = ranking(committed)
    header = ["candidate", "by", *[f"nll {k}" for k in range(len(committed.margins))], committed.criterion, ""]
    rows = [header, *[_cells(candidates[rank]) for rank in ranks]]
    marks = [" ", *[">" if rank == committed.winner else " " for rank in ranks]]
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    lines = []
    for mark, row in zip(marks, rows, strict=True):
        text, proposers, *numbers, note = map(_padded, row, widths)
        numbers = [*(number.strip().rjust(len(number)) for number in numbers[:-1]), numbers[-1]]
        lines.append(f"  {mark} {'  '.join([text, proposers, *numbers, note])}".rstrip())
    return lines


def _cells(candidate: AdaFuseCandidate) -> list[str]:
    note = f"dropped: {candidate.dropped}" if candidate.dropped else ""
    lossy = f"not exact for {' '.join(map(str, candidate.lossy))}" if candidate.lossy and not note else ""
    rated = f"rated {' '.join(map(show_nll, candidate.ratings))}" if candidate.ratings else ""
    note = ", ".join(part for part in (note, rated, candidate.note, lossy) if part)
    nlls = map(show_nll, candidate.nlls)
    return [show_candidate(candidate), show_proposers(candidate), *nlls, show_values(candidate.decided_by), note]


def show_rule(committed: AdaFuseRound) -> str:
    """`, the lowest fused NLL wins`; nothing where there was one candidate."""
    if len(committed.candidates) < 2:
        return ""
    return f", the {'highest' if committed.highest_wins else 'lowest'} {committed.criterion} wins"


def show_values(values: Sequence[float]) -> str:
    """`0.521`, or `0.93 0.62` of words that were compared one by one; `-` of a candidate that was not compared."""
    return " ".join(f"{value:.3f}" for value in values) or "-"


def decision(committed: AdaFuseRound) -> tuple[float, float | None] | None:
    """
    The value of the winner and that of the candidate that it beat last, by the round's criterion; `None` twice over
    where nothing was compared.
    """
    if committed.winner is None or not committed.candidates[committed.winner].decided_by:
        return None
    mine = committed.candidates[committed.winner].decided_by
    others = [one.decided_by for rank, one in enumerate(committed.candidates) if rank != committed.winner]
    # Who lost last was compared with the winner's word at that place; before it their words were the same.
    last = max((len(values) for values in others if values), default=0)
    level = min(last, len(mine)) - 1
    if level < 0:
        return mine[-1], None
    found = [values[level] for values in others if len(values) > level]
    return mine[level], (max(found) if committed.highest_wins else min(found))


def show_candidate(candidate: AdaFuseCandidate) -> str:
    """`" Lima."`, with `<end>` after it where the text ends."""
    text = f'"{on_one_line(candidate.text)}"' if candidate.text else ""
    return f"{text} {END_MARK if candidate.ends else ''}".strip(" ")


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


def show_confidences(values: Sequence[float | None]) -> str:
    """`0.82 0.66`: of each word committed; `-` of one that no member has scored."""
    return " ".join("-" if value is None else f"{value:.2f}" for value in values)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ranking(committed: AdaFuseRound) -> list[int]:
    """The indices of the candidates: the winner, then the others by how long they were compared, the best first."""

    def order(rank: int) -> tuple[bool, int, float]:
        values = committed.candidates[rank].decided_by
        last = values[-1] if values else math.inf
        return rank != committed.winner, -len(values), -last if committed.highest_wins else last

    return sorted(range(len(committed.candidates)), key=order)


def on_one_line(text: str) -> str:
    """The text with newlines and other control characters as escapes."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _padded(cell: str, width: int) -> str:
    return cell + " " * (width - _width(cell))


def _width(text: str) -> int:
    """In columns of a terminal."""
    marks = sum(unicodedata.combining(char) > 0 for char in text)
    return len(text) - marks + sum(unicodedata.east_asian_width(char) in "WF" for char in text)
