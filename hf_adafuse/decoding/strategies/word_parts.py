"""What part of a word a member judges, beside the other words at its place."""

from __future__ import annotations

import math
from collections.abc import Sequence

# What float32 tells from nothing, of a probability.
_LEAST = 1e-6


def distinct_log_probs(words: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> list[float]:
    """
    Per word, the log-probability (nats) of what sets it apart from the others under one member.

    In the trie of their tokens all count up to where the words first part. Further on, a token counts against the best
    one at its place, log p - max log p: nothing where nobody contests it. A word that ends where another goes on has
    the probability that the other's next token leaves.

    Args:
        words (`list[list[int]]`): the tokens of each.
        log_probs (`list[list[float]]`): those of the tokens.
    """
    values = [0.0] * len(words)
    groups = [(list(range(len(words))), 0, False)]
    while groups:
        group, depth, have_parted = groups.pop()
        branches: dict[int | None, list[int]] = {}
        for index in group:
            token = words[index][depth] if depth < len(words[index]) else None
            branches.setdefault(token, []).append(index)
        found: dict[int | None, float] = {
            token: log_probs[same[0]][depth] for token, same in branches.items() if token is not None
        }
        if None in branches:
            found[None] = math.log(max(1 - math.fsum(map(math.exp, found.values())), _LEAST))
        best = max(found.values()) if have_parted else 0.0
        for token, same in branches.items():
            for index in same:
                values[index] += found[token] - best
            if token is not None:
                groups.append((same, depth + 1, have_parted or len(branches) > 1))
    return values


def uncontested_share(weights: Sequence[float]) -> float:
    """
    The share of a word's uncontested tokens that counts: 1 with equal weights, 0 where one member has all the weight.

    In between it follows the effective number of members n = 1 / sum w^2, of weights that sum to 1:
    (n - 1) / (number of members - 1).

    Args:
        weights (`list[float]`): of the members.
    """
    effective = math.fsum(weights) ** 2 / math.fsum(weight**2 for weight in weights)
    return min((effective - 1) / (len(weights) - 1), 1.0) if len(weights) > 1 else 0.0
