"""SweetSpan: spans of a fixed number of words, chosen by filtered perplexity. No public code; see the docstring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..scored_spans import Choice, ScoredSpan
from ..scoring import fused_score
from .strategy import SpanStrategy, check_number, lowest


@dataclass
class SweetSpan(SpanStrategy):
    """
    Each round every member proposes `num_words` greedy words; P[j, c] = exp(mean NLL of candidate c under member j).
    Of each candidate's perplexities, where the largest is more than `filter_ratio` times the smallest, both are left
    out, or the largest alone where there are but two. The lowest weighted mean of what is left wins.

    Sources: the paper's abstract for the first and the last step; the filter is the one left unused in AdaFuse's
    released code, whose default is 10 (not verified against the paper).

    Args:
        num_words (`int`, *optional*, defaults to 4): the most words of a span.
        filter_ratio (`float`, *optional*, defaults to 10.0): how many times the smallest perplexity the largest
            may be before they are left out. `None`: none is left out.
    """

    criterion = "fused perplexity"
    num_words: int = 4
    filter_ratio: float | None = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.filter_ratio is not None:
            check_number("filter_ratio", self.filter_ratio, 1)

    def choose(self, candidates: Sequence[ScoredSpan], weights: Sequence[float], main_index: int | None) -> Choice:
        nlls = self.nlls(candidates, len(weights))
        return lowest(candidates, nlls, [self._score(of_one, weights) for of_one in nlls])

    def _score(self, nlls: Sequence[float | None], weights: Sequence[float]) -> float:
        pairs = zip(nlls, weights, strict=True)
        scored = sorted((math.exp(min(nll, 700.0)), weight) for nll, weight in pairs if nll is not None)
        if len(scored) > 1 and self.filter_ratio is not None and scored[-1][0] > self.filter_ratio * scored[0][0]:
            scored = scored[1:-1] or scored[:-1]
        return fused_score([perplexity for perplexity, _ in scored], [weight for _, weight in scored])
