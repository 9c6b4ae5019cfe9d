"""`did_you_mean`: the last sentences of a message about a misspelt name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str], otherwise: str, most: int = 1) -> str:
    """
    What to do about a name that does not exist.

    Args:
        name (`str`): the name.
        known (`list[str]`): the names that exist.
        otherwise (`str`): what to do where none of them is close.
        most (`int`, *optional*, defaults to 1): the most names that are suggested.
    """
    close = get_close_matches(name, list(known), n=most)
    return f"Did you mean {' or '.join(close)}? Correct it." if close else otherwise
