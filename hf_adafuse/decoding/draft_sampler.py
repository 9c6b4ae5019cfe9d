"""Drafts of a member, drawn token by token.

Each draft has random numbers of its own, which follow from the prompt's: how far another one went, and in which order
members took their turns, changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from ..trees.nodes import Node
from .proposer import NextToken


class DraftSampler:
    """
    Draws the drafts of one member.

    Args:
        member_index (`int`)
        draw (`Callable`): `draw(node, numbers, None)`: a token after a node that has been read, by random numbers.
        numbers (`Callable`): `numbers(prompt_index)`: the random numbers of a prompt.
    """

    def __init__(self, member_index: int, draw: Callable[..., int], numbers: Callable[[int], Any]) -> None:
        self._member_index = member_index
        self._draw = draw
        self._numbers = numbers
        self._counts: Counter[int] = Counter()  # of the drafts of each prompt

    def __call__(self, prompt_index: int) -> NextToken:
        """What draws the tokens of a new draft: after each node one, however often it is asked."""
        numbers: Iterator[float] = self._numbers(prompt_index).branch(self._member_index, self._counts[prompt_index])
        self._counts[prompt_index] += 1
        drawn: dict[Node, int] = {}

        def next_token(node: Node) -> int:
            if node not in drawn:
                drawn[node] = self._draw(node, numbers, None)
            return drawn[node]

        return next_token
