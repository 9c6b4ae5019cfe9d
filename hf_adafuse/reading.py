"""What a member reads off the logits of one node. Knows no tree or model."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .scoring import best_tokens


class Reading:
    """
    What a member reads off the logits of one node, after its logits processors.

    Attributes:
        scores (`torch.FloatTensor` of shape `(vocab_size,)`): processed logits.
        log_total (`float`): log of the sum of their exponentials.
        top (`list[int]`), top_log_probs (`list[float]`): the best tokens, best first, and their log-probabilities.
    """

    __slots__ = ("log_total", "scores", "top", "top_log_probs")

    def __init__(self, scores: torch.Tensor, log_total: float, top: list[int], top_log_probs: list[float]) -> None:
        self.scores, self.log_total, self.top, self.top_log_probs = scores, log_total, top, top_log_probs

    def best(self, count: int, allow: Callable[[int], bool] = lambda token: True) -> list[tuple[int, float]]:
        """The `count` best tokens that are allowed and possible, with their log-probabilities."""
        vocab_size = self.scores.shape[-1]
        looked_at = min(4 * count + 16, vocab_size)
        while True:
            values, ids = best_tokens(self.scores[None], looked_at)
            pairs = zip(ids[0].tolist(), (values[0].double() - self.log_total).tolist(), strict=True)
            best = [(token, value) for token, value in pairs if value > -math.inf and allow(token)][:count]
            if len(best) == count or looked_at == vocab_size:
                return best
            looked_at = min(4 * looked_at, vocab_size)
