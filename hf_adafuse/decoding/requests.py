"""How decoding asks for forward passes.

Rounds are generators. Where a round needs the log-probabilities of nodes it yields a [`ForwardRequest`], and it goes on
when the nodes have been computed. The scheduler collects the requests of many prompts for one pass.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..trees.nodes import Node

T = TypeVar("T")


@dataclass
class ForwardRequest:
    """
    A request for forward passes of one member.

    Args:
        member_index (`int`): the number of the member.
        nodes (`list[Node]`): the nodes that must be computed before the generator goes on, each once.
        useful (`list[Node]`, *optional*): nodes that the round names although it does not need them yet. See
            [`PromptNeeds`].
    """

    member_index: int
    nodes: list[Node]
    useful: Sequence[Node] = ()


@dataclass
class ParallelMembers:
    """
    Requests of different members that may be served at the same time. What they return comes back as a list.

    Args:
        parts (`list[Requests]`): each of one member.
    """

    parts: Sequence[Requests[Any]]


# Yields requests, and returns a `T` in the end.
Requests = Generator[ForwardRequest | ParallelMembers, Any, T]


def run_on_each_member(parts: Sequence[Requests[T]], device_keys: Iterable[Any]) -> Requests[list[T]]:
    """
    Run one generator of requests for each member, at the same time where the members work on several devices, else in
    turn. Returns what each of them returns.

    Args:
        parts (`list[Requests]`): one of each member.
        device_keys (`list`): the members' `device_key`.
    """
    if len(set(device_keys)) > 1:
        results: list[T] = yield ParallelMembers(parts)
        return results
    found = []
    for part in parts:
        found.append((yield from part))
    return found


def merge_requests(member_index: int, requests: Sequence[Requests[T]]) -> Requests[list[T]]:
    """
    Merge several generators of requests of one member into one: they wait for the same passes, and a node for which
    several of them ask is computed once. Returns what each of them returns.

    Args:
        member_index (`int`): the number of the member.
        requests (`list[Requests]`): the requests.
    """
    found: dict[int, T] = {}
    waiting = dict(enumerate(requests))
    while waiting:
        reads: list[ForwardRequest] = []
        for index, request in list(waiting.items()):
            try:
                reads.append(_read_of(next(request)))
            except StopIteration as stop:
                found[index] = stop.value
                del waiting[index]
        if reads:
            nodes = dict.fromkeys(node for read in reads for node in read.nodes)
            yield ForwardRequest(member_index, list(nodes), reads[0].useful)
    return [found[index] for index in range(len(requests))]


def with_sizes(requests: Requests[T]) -> Requests[tuple[T, list[int]]]:
    """The same, and how many nodes each request had."""
    sizes: list[int] = []
    try:
        request = next(requests)
        while True:
            sizes.append(len(_read_of(request).nodes))
            yield request
            request = next(requests)
    except StopIteration as stop:
        return stop.value, sizes


def _read_of(request: ForwardRequest | ParallelMembers) -> ForwardRequest:
    """A request of one member, by those who make no other."""
    assert isinstance(request, ForwardRequest)
    return request
