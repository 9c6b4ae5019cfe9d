"""`did_you_mean`: the end of a message about a name that there is not."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """A question that holds the known name closest to a misspelt one; where none is close, `otherwise`."""
    close = get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]}?" if close else otherwise
