"""Serves the requests of many prompts: what they need of the same member at the same time goes through it in one pass.
Knows who waits for what; neither words nor scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ..members.member import Member
from ..trees.nodes import Node
from ..trees.pass_policy import next_member
from .requests import Read, Requests


class Scheduler:
    """
    Runs generators of requests to their ends.

    Args:
        members (`list[Member]`)
        likely (`list[Callable]`): per member, the nodes that a prompt may need when the member is asked next.
        on_pause (`Callable`): told, before each pass, the prompts that have moved on since the last one.

    Attributes:
        served (`list[int]`): the prompts of the pass that is run.
    """

    def __init__(
        self,
        members: Sequence[Member],
        likely: Sequence[Callable[[int], list[Node]]],
        on_pause: Callable[[Iterable[int]], None],
    ) -> None:
        self._members, self._likely, self._on_pause = members, likely, on_pause
        self._waiting: list[dict[int, Read]] = [{} for _ in members]  # per member, by prompt
        self.served: list[int] = []

    def run(self, prompts: Mapping[int, Requests[None]]) -> None:
        """
        Run them all.

        Args:
            prompts (`dict`): by the prompt's index, what it does.

        Raises:
            MemberError: a forward pass failed.
        """
        ready, member_index = list(prompts), 0
        while True:
            for prompt_index in ready:
                request = next(prompts[prompt_index], None)
                if request is not None:
                    self._waiting[request.member_index][prompt_index] = request
            self._on_pause(ready)
            member_index = next_member(list(map(len, self._waiting)), member_index)
            if not self._waiting[member_index]:
                return
            ready = self._run_pass(member_index)

    def _run_pass(self, member_index: int) -> list[int]:
        """One pass of a member; returns the prompts that need wait no longer."""
        waiting = self._waiting[member_index]
        self.served = list(waiting)
        needs = {prompt_index: (request.nodes, list(request.useful)) for prompt_index, request in waiting.items()}
        read = set(self._members[member_index].read(needs, self._likely[member_index]))
        for request in waiting.values():
            request.nodes = [node for node in request.nodes if node not in read]
        ready = [prompt_index for prompt_index, request in waiting.items() if not request.nodes]
        for prompt_index in ready:
            del waiting[prompt_index]
        return ready
