"""Numbers made of log-probabilities: margin, NLL, fused score.

How logits, tokens and the span t1 t2 t3 after the prefix y line up (the off-by-one of every NLL):

    node read     y     t1    t2    t3
    gives p of    t1    t2    t3    end of sequence
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Fused scores (nats) this close are a tie: the same computation on another device or batch differs by less.
TIE_TOLERANCE = 1e-6


def margin(log_probs: Sequence[float]) -> float:
    """p(1) - p(2) of the best log-probabilities, best first (section 3.2)."""
    second = math.exp(log_probs[1]) if len(log_probs) > 1 else 0.0
    return math.exp(log_probs[0]) - second


def span_nll(log_probs: Sequence[float], length: int | None = None, length_exponent: float = 1.0) -> float | None:
    """
    The negative log-likelihood of a span, over its length (equation 4).

    Args:
        log_probs (`list[float]`): the log-probability (nats) of each of its tokens.
        length (`int`, *optional*): its length in bytes. By default its number of tokens.
        length_exponent (`float`, *optional*, defaults to 1.0): the exponent of the length. With 1 the result is in nats
            per token, or per byte.

    Returns:
        `None` when there is no token to score; infinite when a token is forbidden.
    """
    if not log_probs:
        return None
    length = len(log_probs) if length is None else max(length, 1)
    if length_exponent == 1:
        return -math.fsum(log_probs) / length
    return -math.fsum(log_probs) * math.exp(-length_exponent * math.log(length))


def fused_score(nlls: Sequence[float | None], weights: Sequence[float]) -> float:
    """
    The weighted mean of the members' NLLs (equation 5) over the members that have one. `math.fsum` makes it the same in
    whatever order the members come. Infinite when no member can score the span.
    """
    scored = [(nll, weight) for nll, weight in zip(nlls, weights, strict=True) if nll is not None]
    if not scored:
        return math.inf
    total = math.fsum(weight for _, weight in scored)
    return math.fsum(nll * weight for nll, weight in scored) / total


def first_lowest(scores: Sequence[float]) -> int:
    """The index of the lowest score; within `TIE_TOLERANCE` of it the earlier one wins."""
    lowest = min(scores)
    return next(index for index, score in enumerate(scores) if score <= lowest + TIE_TOLERANCE)
