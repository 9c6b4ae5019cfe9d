"""Which parts of a regular expression xgrammar leaves out when it makes a grammar of it. Called by
`schema_keywords`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_PART = re.compile(
    r"\\u\{[0-9A-Fa-f]+\}|\\u[0-9A-Fa-f]{4}|\\x[0-9A-Fa-f]{2}|\\.|\[\^?(?:\\.|[^\]\\])*\]"
    r"|\(\?<?[=!]|\(\?<\w+>|\(\?:|\{\d+(?:,\d*)?\}|.",
    re.DOTALL,
)
_MAY_BE_LEFT_OUT = re.compile(r"[?*]|\{0")
# The letters behind a backslash that mean to the library what they mean elsewhere, or that it refuses by itself.
_KNOWN = frozenset("bBcdDfnpPrsStuvwWx")
# Of these it takes some for letters in a class of characters.
_KNOWN_IN_CLASS = _KNOWN - set("BpP")
# What stands in a JSON string only behind a backslash, and other characters.
_ESCAPED = '"\\\n\t\r\v\f'
_PLAIN = "".join(map(chr, range(32, 127))).replace('"', "").replace("\\", "") + "é"


def why_unenforced(pattern: str) -> str:
    """
    Why a string by the grammar of a pattern may not match it, or be no JSON; empty where neither is known.

    Example:
        `"^(?!a).$"` gives `"looks around"`; of `"^[a-z]+$"` there is nothing to say.
    """
    parts = _PART.findall(pattern)
    if reason := why_not_followed(pattern):
        return reason
    is_ascii = all(" " <= char <= "~" for char in pattern)
    if any(_writes_raw(parts, index, is_ascii) for index in range(len(parts))):
        return "writes quotes, backslashes or control characters without a backslash"
    return ""


def why_not_followed(pattern: str) -> str:
    """
    Why a text by the grammar of a pattern may not match it; empty where nothing of that is known.

    Example:
        `"a$b"` gives `"has an anchor inside"`.
    """
    parts = _PART.findall(pattern)
    if any(re.match(r"\(\?<?[=!]", part) for part in parts):
        return "looks around"
    for part in parts:
        known = _KNOWN_IN_CLASS if part.startswith("[") else _KNOWN
        if unknown := next((escape for escape in _letters(part) if escape[1] not in known), None):
            return f"has the escape {unknown}, which the grammar takes for a letter"
    if any(re.fullmatch(r"\\0|\\x00|\\u0000|\\u\{0+\}", part) for part in parts):
        return "has the character NUL, which the grammar leaves out"
    # `$` is tested as `^` on the reversed pattern, in which groups open where they closed.
    mirrored = [{"(": ")", ")": "("}.get("(" if part.startswith("(") else part, part) for part in reversed(parts)]
    if _is_inside(parts, "^") or _is_inside(mirrored, "$"):
        return "has an anchor inside"
    return ""


def without_line_breaks(pattern: str) -> str:
    """The pattern in which `.` is any character but a line break, as elsewhere: the library takes it for any."""
    return "".join("[^\\n]" if part == "." else part for part in _PART.findall(pattern))


def _letters(part: str) -> list[str]:
    """The escapes of letters in a part, a class of characters maybe."""
    return re.findall(r"\\[A-Za-z]", part.replace("\\\\", ""))


def _is_inside(parts: Sequence[str], anchor: str) -> bool:
    """Whether an anchor may stand behind something."""
    is_first = True
    outer: list[bool] = []  # of the groups around a part: whether they may stand first
    for part in parts:
        if part.startswith("("):
            outer.append(is_first)
        elif part == ")":
            outer = outer[:-1]
            is_first = False
        elif part == "|":
            is_first = outer[-1] if outer else True
        elif part == anchor:
            if not is_first:
                return True
        else:
            is_first = False
    return False


def _writes_raw(parts: Sequence[str], index: int, is_ascii: bool) -> bool:
    """
    Whether a part writes a character that JSON escapes. The library keeps these out of patterns of ASCII that have
    another way; it knows none of that where a pattern has other characters.
    """
    part = parts[index]
    onward = parts[index + 1] if index + 1 < len(parts) else ""
    if part.startswith("(") or part in (")", "|", "^", "$", "?", "*", "+") or re.fullmatch(r"\{\d.*\}", part):
        return False
    if not is_ascii:
        return _matches(part, '"\\')
    return (
        _matches(part, _ESCAPED)
        and not _matches(part, _PLAIN)
        and "|" not in parts
        and not _MAY_BE_LEFT_OUT.match(onward)
    )


def _matches(part: str, characters: str) -> bool:
    try:
        return re.search(part, characters) is not None
    except re.error:  # of another dialect
        return False
