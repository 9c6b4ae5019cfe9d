"""The worked examples in a prompt, by its text alone: where their answers are. Knows no model or token.

The last line of a few-shot prompt, `Answer:`, is its cue, if it ends in a colon or a newline: the answers of the
examples follow where earlier lines begin with it.
"""

from __future__ import annotations

_ENDS = (b":", "\uff1a".encode(), b"\n")  # the second is the colon of Chinese and Japanese


def answer_spans(text: bytes) -> list[tuple[int, int]]:
    """
    Where the answers of a prompt's examples begin and end, in bytes.

    An answer is the rest of a line that begins with the prompt's last line, where that ends in a colon (else it may be
    any text, half written). Where a prompt ends with a newline, as chats do, the answers are the lines after those that
    are like its last one.
    """
    start = text.rstrip(b"\n").rfind(b"\n") + 1
    cue = text[start:]
    spans: list[tuple[int, int]] = []
    if not cue.rstrip(b" ").endswith(_ENDS):
        return spans
    at = 0 if text.startswith(cue) else _next_line(text, cue, 0)
    while cue.strip() and 0 <= at < start:
        begin = at + len(cue)
        end = text.find(b"\n", begin)
        if end > begin:
            spans.append((begin, end))
        at = _next_line(text, cue, max(at, begin - 1))
    return spans


def _next_line(text: bytes, cue: bytes, start: int) -> int:
    """Where the next line begins that begins with the cue, from the newline before it on; -1 where none does."""
    found = text.find(b"\n" + cue, start)
    return found + 1 if found >= 0 else -1
