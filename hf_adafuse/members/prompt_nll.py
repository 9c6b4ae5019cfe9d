"""How well a member knows a prompt: its NLL, by which it can be trusted."""

from __future__ import annotations

import itertools
import math

from .examples import answer_spans
from .vocabulary import Vocabulary


def prompt_nll(vocabulary: Vocabulary, ids: list[int], log_probs: list[float], weighting: str) -> float:
    """
    The NLL of a prompt's text in nats per byte, without special tokens, or of the answers in it; NaN where there is no
    such text.

    Args:
        vocabulary (`Vocabulary`), ids (`list[int]`): the member's, all of the prompt.
        log_probs (`list[float]`): of its last ids (nats).
        weighting (`str`): `"prompt"`; `"examples"`: of the tokens that write the answers of its examples; `"question"`:
            of what comes after its last empty line, or of all where it has none.
    """
    pieces = [vocabulary.piece(token) for token in ids]
    ends = list(itertools.accumulate(map(len, pieces)))
    text = b"".join(pieces)
    start = text.rstrip().rfind(b"\n\n") + 2 if weighting == "question" and b"\n\n" in text.rstrip() else 0
    spans = answer_spans(text) if weighting == "examples" else [(start, ends[-1])]
    first = len(ids) - len(log_probs)
    read = [
        (value, len(piece))
        for value, piece, end in zip(log_probs, pieces[first:], ends[first:], strict=True)
        if piece and not math.isnan(value) and any(end > start and end - len(piece) < stop for start, stop in spans)
    ]
    num_bytes = sum(size for _, size in read)
    return -math.fsum(value for value, _ in read) / num_bytes if num_bytes else math.nan
