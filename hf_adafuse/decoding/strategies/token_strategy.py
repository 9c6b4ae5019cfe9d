"""What a method over tokens is: it says what comes next, given the members' next-token distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...members.distributions import Distribution
from ..scoring import TIE_TOLERANCE
from .strategy import RoundKind, Strategy


@dataclass(frozen=True)
class NextToken:
    """
    A text that may come next.

    Args:
        data (`bytes`, *optional*): the text in UTF-8, like `b" Paris"`. `None`: the text ends here.
        ids (`list[int]`): the text in the main model's tokens. It is empty where the text ends.
        score (`float`): minus the natural logarithm of the text's fused probability. The lowest score wins.
        log_probs (`list[float]`): per member, the log-probability (nats) that went into the score. `None` stands for a
            member that had no vote.
    """

    data: bytes | None
    ids: Sequence[int]
    score: float
    log_probs: Sequence[float | None]


@dataclass
class TokenStrategy(Strategy):
    """
    A method in whose rounds each member gives its distribution of what comes next, and one text is committed.

    The keyword arguments of a subclass are the options of the method.

    Attributes:
        is_retokenized (`bool`): how an assistant with another tokenizer reads the text since the last word began.
            `True`: encoded anew as one text after each token. `False`: token by token, as it was committed.
    """

    round_kind = RoundKind.TOKEN
    criterion, highest_wins = "fused probability", True
    is_retokenized = False  # without an annotation: this is no option

    def asks(self, main: Distribution) -> bool:
        """
        Whether the other members are asked for their distributions in this round.

        Args:
            main (`Distribution`): the main model's next-token distribution.
        """
        return True

    def choose(self, members: Sequence[Distribution | None], weights: Sequence[float]) -> list[NextToken]:
        """
        What may come next, best first. The first text that the main model can write is committed.

        Args:
            members (`list[Distribution]`): each member's next-token distribution, the main model's first. `None` stands
                for a member that was not asked, or whose tokens cannot write the text so far.
            weights (`list[float]`): how much each member counts. They are positive, and their sum need not be 1.
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
