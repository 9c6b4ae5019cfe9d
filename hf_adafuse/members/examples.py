"""The worked examples in a prompt, by its text alone: where their answers are.

What a few-shot prompt ends with, `Answer:`, is its cue: the answers of the examples follow it in earlier lines.
"""

from __future__ import annotations

from collections.abc import Iterator

_COLONS = (b":", "\uff1a".encode())  # the second is that of Chinese and Japanese
_ARROWS = (b"=>", b"->", "\u2192".encode())

Spans = list[tuple[int, int]]


def answer_spans(text: bytes) -> Spans:
    """
    Where the answers of a prompt's examples begin and end, in bytes.

    The cue is the prompt's last line, where that ends in a colon, an arrow or a newline (else it may be any text, half
    written): an answer is the rest of an earlier line that begins with it. Where a prompt ends with a newline, as chats
    do, the answers are the lines after those that are like its last one. Where no line begins with it, the cue is the
    last line's last word, `A:` in `Q: Who wrote Faust? A:`: an answer is what follows its last place in an earlier line
    of the same first word, or in any where the cue is an arrow.
    """
    start = text.rstrip(b"\n").rfind(b"\n") + 1
    line = text[start:]
    if not line.strip() or not line.rstrip(b" ").endswith((*_COLONS, *_ARROWS, b"\n")):
        return []
    return _after_the_line(text, line, start) or _after_its_last_word(text[:start], line)


def _after_the_line(text: bytes, cue: bytes, start: int) -> Spans:
    spans: Spans = []
    at = 0 if text.startswith(cue) else _next_line(text, cue, 0)
    while 0 <= at < start:
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


def _after_its_last_word(earlier: bytes, line: bytes) -> Spans:
    head, _, word = line.rstrip(b" ").rpartition(b" ")
    if not head.strip() or line.endswith(b"\n"):
        return []
    cue, first = line[len(head) :], head.split()[0] + b" "
    return [
        (start + at + len(cue), start + len(other))
        for start, other in _lines(earlier)
        if 0 < (at := other.rfind(cue)) < len(other) - len(cue) and (other.startswith(first) or word.endswith(_ARROWS))
    ]


def _lines(text: bytes) -> Iterator[tuple[int, bytes]]:
    """Each line, without its end, after where it begins."""
    start = 0
    for line in text.split(b"\n"):
        yield start, line
        start += len(line) + 1
