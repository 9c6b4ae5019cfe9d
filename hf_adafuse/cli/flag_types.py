"""The types of flags: functions that read a flag's text. argparse calls them, and shows their errors."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..members.templates import is_unicode
from ..servers.kinds import check_member_name
from ..settings.config_checks import WEIGHTINGS

_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}


def count(text: str) -> int:
    """A whole number of at least 1."""
    # Not `isdigit`: it is true of "²", which is no number to `int`.
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, but is {text!r}")
    return int(text)


def member_name(text: str) -> str:
    """A model's name. Where it is refused, the error does not show a key in it."""
    try:
        check_member_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def whole_number(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, but is {text!r}")
    return int(text)


def port(text: str) -> int:
    """A port of TCP; 0 stands for any free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 65535, but is {text!r}")
    return int(text)


def name_list(text: str) -> list[str]:
    """Names with commas between, each once."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"must be names with commas between, but is {text!r}")
    return list(dict.fromkeys(names))


def plain_text(text: str) -> str:
    """A text, taken as it is."""
    if not is_unicode(text):
        raise argparse.ArgumentTypeError(f"must be text in UTF-8, but is {text!r}")
    return text


def stop_text(text: str) -> str:
    """A stop text, in which `\\n`, `\\t` and `\\\\` are read as by [`unescaped`]."""
    if not text:
        raise argparse.ArgumentTypeError("must be a text, but is empty")
    return unescaped(plain_text(text))


def seed(text: str) -> int:
    """A seed of torch's random generator."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2**63 - 1, but is {text!r}")
    return int(text)


def weights(text: str) -> tuple[float, ...] | str:
    """Weights: numbers with commas between, like `2,1`, or the name of a weighting, like `prompt`."""
    return text if text in WEIGHTINGS else _numbers(text)


def unescaped(text: str) -> str:
    """The text with `\\n`, `\\t` and `\\\\` as a newline, a tab and a backslash: a shell passes them on as typed."""
    pieces = []
    rest = text
    while rest:
        escape = rest[:2]
        pieces.append(_ESCAPES.get(escape, rest[0]))
        rest = rest[2 if escape in _ESCAPES else 1 :]
    return "".join(pieces)


def escaped(text: str) -> str:
    """The text as [`unescaped`] reads it, on one line."""
    for escape, character in reversed(_ESCAPES.items()):
        text = text.replace(character, escape)
    return text


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be numbers with commas between, or one of {', '.join(WEIGHTINGS)}, but is {text!r}"
        ) from None


def option(text: str) -> tuple[str, Any]:
    """A name and a value, like `top_k=5`. The value is read as JSON where it is JSON, and is a text otherwise."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, but is {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
