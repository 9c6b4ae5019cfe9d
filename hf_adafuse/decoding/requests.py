"""How decoding asks for forward passes. Values only: knows no member, model or text.

What decodes is written as generators that stop where they need to know more: they yield a [`Read`] and go on when its
nodes have readings. Nobody here runs anything: the scheduler collects the requests of many prompts for one pass.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..trees.nodes import Node

T = TypeVar("T")


@dataclass
class Read:
    """
    A request.

    Args:
        member_index (`int`): the member that shall read.
        nodes (`list[Node]`): what must be read before the generator goes on, each once.
        useful (`list[Node]`, *optional*): what may come along in the same passes: likely to be needed soon.
    """

    member_index: int
    nodes: list[Node]
    useful: Sequence[Node] = ()


# Yields requests, and returns a `T` in the end.
Requests = Generator[Read, None, T]


def with_sizes(requests: Requests[T]) -> Requests[tuple[T, list[int]]]:
    """The same, and how many nodes each request had."""
    sizes: list[int] = []
    try:
        request = next(requests)
        while True:
            sizes.append(len(request.nodes))
            yield request
            request = next(requests)
    except StopIteration as stop:
        return stop.value, sizes
