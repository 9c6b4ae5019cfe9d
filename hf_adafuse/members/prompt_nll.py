"""How well a member predicts a prompt: its NLL of the whole text, or of the answers of the worked examples in it.

A few-shot prompt ends with its cue, `Answer:`. The answers of its examples follow the same cue in earlier lines.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from .vocabulary import Vocabulary


def prompt_nll(
    vocabulary: Vocabulary,
    ids: list[int],
    log_probs: list[float],
    weighting: str,
    is_known_chat: bool = False,
) -> float:
    """
    The NLL of a prompt's text in nats per byte, without special tokens, or of the answers in it; NaN where there is no
    such text.

    Args:
        vocabulary (`Vocabulary`): the member's.
        ids (`list[int]`): the member's ids of the whole prompt.
        log_probs (`list[float]`): the log-probability (nats) of each of the last ids; those of the first ids may be
            unknown, and those that are NaN are.
        weighting (`str`): which tokens of the prompt count:

            - `"prompt"`: all.
            - `"examples"` or `"examples_or_content"`: those of the answers of its worked examples. A chat has none:
              earlier answers in it are most often the ensemble's own.
            - `"question"`: those after its last empty line; all where it has no empty line.
        is_known_chat (`bool`, *optional*, defaults to `False`): whether the prompt is a chat. One with special tokens
            behind its beginning is one anyway.
    """
    return nll_at(vocabulary, ids, log_probs, counted_positions(vocabulary, ids, weighting, is_known_chat))


def counted_positions(vocabulary: Vocabulary, ids: list[int], weighting: str, is_known_chat: bool = False) -> list[int]:
    """The positions of the tokens of a prompt that count; the arguments are those of [`prompt_nll`]."""
    pieces = [vocabulary.piece(token) for token in ids]
    ends = list(itertools.accumulate(map(len, pieces)))
    text = b"".join(pieces)
    start = _question_start(text) if weighting == "question" else 0
    spans = [(start, ends[-1])]
    if asks_for_examples(weighting):
        spans = [] if is_known_chat or is_chat(pieces, ids, vocabulary.unknown_id) else answer_spans(text)
    return [
        position
        for position, (piece, end) in enumerate(zip(pieces, ends, strict=True))
        if piece and any(end > start and end - len(piece) < stop for start, stop in spans)
    ]


def nll_at(vocabulary: Vocabulary, ids: list[int], log_probs: list[float], positions: Sequence[int]) -> float:
    """
    The NLL of tokens of a prompt in nats per byte of their text; NaN where none of their log-probabilities is known.

    Args:
        vocabulary (`Vocabulary`), ids (`list[int]`), log_probs (`list[float]`): as of [`prompt_nll`]. NaN stands for a
            log-probability that is not known.
        positions (`list[int]`): the positions of the tokens.
    """
    first = len(ids) - len(log_probs)
    read = [(log_probs[at - first], len(vocabulary.piece(ids[at]))) for at in positions if at >= first]
    known = [(value, size) for value, size in read if not math.isnan(value)]
    num_bytes = sum(size for _, size in known)
    return -math.fsum(value for value, _ in known) / num_bytes if num_bytes else math.nan


def asks_for_examples(weighting: str) -> bool:
    """Whether a value of `model_weights` asks for the worked examples of prompts; chats have none."""
    return weighting in ("examples", "examples_or_content")


def _question_start(text: bytes) -> int:
    """Where the part of a prompt begins that stands behind its last empty line; 0 where it has none."""
    said = text.rstrip()
    return max((said.rfind(empty) + len(empty) for empty in (b"\n\n", b"\n\r\n") if empty in said), default=0)


def is_chat(pieces: Sequence[bytes], ids: Sequence[int], unknown_id: int | None) -> bool:
    """
    Whether a prompt has special tokens behind its beginning: chat templates put them. Special tokens have no text, and
    neither has the unknown token, which any prompt may have.

    Args:
        pieces (`list[bytes]`), ids (`list[int]`): the tokens of the prompt.
        unknown_id (`int`, *optional*): the unknown token.
    """
    behind = itertools.dropwhile(lambda token: not token[0], zip(pieces, ids, strict=True))
    return any(not piece and token != unknown_id for piece, token in behind)


_COLONS = (b":", "\uff1a".encode())  # the second is that of Chinese and Japanese
_ARROWS = (b"=>", b"->", "\u2192".encode())

Spans = list[tuple[int, int]]


def answer_spans(text: bytes) -> Spans:
    """
    Where the answers of a prompt's examples begin and end, in bytes.

    The cue is the prompt's last line, where that ends in a colon, an arrow or a newline (else it may be any text, half
    written): an answer is the rest of an earlier line that begins with it. Where a prompt ends with a newline, the
    answers are the lines after those that are like its last one. Where no line begins with it, the cue is the
    last line's last word, `A:` in `Q: Who wrote Faust? A:`: an answer is what follows its last place in an earlier line
    of the same first word, or in any where the cue is an arrow.
    """
    start = text.rstrip(b"\r\n").rfind(b"\n") + 1
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
        end -= text[end - 1 : end] == b"\r"
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
    cue = line[len(head) :]
    first = head.split()[0] + b" "
    return [
        (start + at + len(cue), start + len(other))
        for start, other in _lines(earlier)
        if 0 < (at := other.rfind(cue)) < len(other) - len(cue) and (other.startswith(first) or word.endswith(_ARROWS))
    ]


def _lines(text: bytes) -> Iterator[tuple[int, bytes]]:
    """Each line, without its end (LF or CRLF), after where it begins."""
    start = 0
    for line in text.split(b"\n"):
        yield start, line.removesuffix(b"\r")
        start += len(line) + 1
