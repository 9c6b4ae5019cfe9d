"""What a method over tokens is: what comes next, from the members' distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...members.distributions import Distribution
from ..scoring import TIE_TOLERANCE
from .strategy import Strategy


@dataclass(frozen=True)
class NextToken:
    """
    A text that may come next.

    Args:
        data (`bytes`, *optional*): it; `None`: the text ends.
        ids (`list[int]`): in the main model's tokens; empty where the text ends.
        score (`float`): minus the logarithm of its fused probability: the lowest wins.
        log_probs (`list[float]`): per member, what went into that; `None` of a member that had no vote.
    """

    data: bytes | None
    ids: Sequence[int]
    score: float
    log_probs: Sequence[float | None]


@dataclass
class TokenStrategy(Strategy):
    """
    A method in whose rounds each member gives its distribution of what comes next, and one text is committed.

    Args: none; a method has its own.

    Attributes:
        is_retokenized (`bool`): whether an assistant sees the text since its last word begun as its tokenizer has it
            whole, not token by token as it was committed.
    """

    round_kind = "token"
    criterion, highest_wins = "fused probability", True
    is_retokenized = False  # without an annotation: this is no option

    def asks(self, main: Distribution) -> bool:
        """Whether the other members are asked, by what the main model would say."""
        return True

    def choose(self, members: Sequence[Distribution | None], weights: Sequence[float]) -> list[NextToken]:
        """
        What may come next, best first; what the main model cannot say is passed over.

        Args:
            members (`list[Distribution]`): the main model first; `None` of one that was not asked, or cannot write the
                text so far.
            weights (`list[float]`): positive.
        """
        raise NotImplementedError


def ranked(candidates: Sequence[NextToken], most: int = 10) -> list[NextToken]:
    """The best ones, lowest score first; of those that tie with the lowest left, the first comes first."""
    left = [candidate for candidate in candidates if candidate.score < math.inf]
    left = sorted(left, key=lambda candidate: candidate.score)
    order = {id(candidate): index for index, candidate in enumerate(candidates)}
    best: list[NextToken] = []
    while left and len(best) < most:
        tied = [one for one in left if one.score <= left[0].score + TIE_TOLERANCE]
        first = min(tied, key=lambda one: order[id(one)])
        best.append(first)
        left.remove(first)
    return best


def log_mean(log_probs: Sequence[float | None], weights: Sequence[float]) -> float:
    """The logarithm of the weighted mean probability over the members that have a vote."""
    pairs = [(value, weight) for value, weight in zip(log_probs, weights, strict=True) if value is not None]
    mean = math.fsum(weight * math.exp(value) for value, weight in pairs) / math.fsum(weight for _, weight in pairs)
    return math.log(mean) if mean else -math.inf
