"""Sets rows of text in columns, and nouns behind numbers, for what the demo and the lab print."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """A number with its noun: `"1 question"`, `"2 questions"`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def aligned(rows: Sequence[tuple[str, ...]], left: int = 1) -> list[str]:
    """The rows as lines, with their cells in columns. The first `left` columns are flush left, the others are flush
    right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
