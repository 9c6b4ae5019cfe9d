"""AdaFuse itself (arXiv 2601.06022): of the spans that members propose, that of the lowest fused NLL is committed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..scored_spans import Choice, ScoredSpan, mean_nll
from ..scoring import fused_score
from .adaptive_spans import AdaptiveSpans, lowest_by_margin
from .strategy import check_number, check_switch


@dataclass
class AdaFuse(AdaptiveSpans):
    """
    The candidate of the lowest score is committed. A score is the weighted mean over members of sum NLL / length^a,
    with the length in the member's own tokens: with a = 1 the mean NLL per token (equations 4 and 5).

    Args:
        horizon (`bool`, *optional*, defaults to `False`): compare candidates by as many of their words as the shortest
            candidate has.
        length_exponent (`float`, *optional*, defaults to 1.0): a, from 0 to 10. 0 prefers short spans.
    """

    uses: ClassVar[tuple[str, ...]] = (*AdaptiveSpans.uses, "nll_normalization")
    horizon: bool = False
    length_exponent: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_switch("horizon", self.horizon)
        check_number("length_exponent", self.length_exponent, 0, 10)

    def choose(self, candidates: Sequence[ScoredSpan], weights: Sequence[float], main_index: int | None) -> Choice:
        possible = [index for index, span in enumerate(candidates) if span.is_possible]
        shortest = min((len(candidates[index].words) for index in possible), default=0)
        num_words = shortest if self.horizon else None
        nlls = [
            [mean_nll(span, k, self.config, num_words, self.length_exponent) for k in range(len(weights))]
            for span in candidates
        ]
        scores = [fused_score(nlls[i], weights) if i in possible else math.inf for i in range(len(candidates))]
        main_index = main_index if main_index in possible else None
        winner = lowest_by_margin(scores, main_index, self.config.switch_margin)
        notes: dict[int, str] = {}
        if winner is not None and self.config.switch_margin > 0:
            lower = [index for index, score in enumerate(scores) if score < scores[winner]]
            notes = dict.fromkeys(lower, "a lower fused NLL, but not by more than `switch_margin`")
        return Choice(winner, nlls, scores, notes=notes)
