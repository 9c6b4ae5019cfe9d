"""Serves the requests of many prompts: what they need of the same member at the same time goes through it in one pass,
and members that can work at the same time do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from ..members.member import Member
from ..members.passes import Pass
from ..servers.daemon_threads import begin as begin_in_thread
from ..servers.daemon_threads import server_wait
from ..trees.nodes import Node
from ..trees.pass_policy import next_member, policy_for, urgency
from .requests import ForwardRequest, ParallelMembers, Requests


@dataclass(eq=False)
class _Task:
    """
    A generator of requests of one prompt: the prompt's own, or a part of it that runs beside others.

    Args:
        prompt_index (`int`): the prompt.
        requests (`Requests`): the generator.
        parent (`_Task`, *optional*): the task that waits for this one's result, where this one is a part.
        number (`int`): which part of `parent` it is.
        results (`list`): the results of the parts for which this task waits itself.
        num_open (`int`): how many of these parts have not ended.
    """

    prompt_index: int
    requests: Requests[Any]
    parent: _Task | None = None
    number: int = 0
    results: list[Any] = field(default_factory=list)
    num_open: int = 0


_Waiting = dict[int, tuple[ForwardRequest, _Task]]  # by prompt


class Scheduler:
    """
    Runs generators of requests to their ends.

    Args:
        members (`list[Member]`): the members.
        likely (`list[Callable]`): per member, `likely(prompt_index)` gives the nodes that the prompt may need when the
            member is asked next.
        refill (`Callable`): called before each pass with the prompts that have advanced since the last one: those among
            them that are finished leave. Returns the generators of the prompts that take their places, by index.
        num_left (`Callable`, *optional*): `num_left(prompt_index)` gives how many tokens the prompt may still get, or
            `None` where there is no limit.
        begin_waiting (`Callable`, *optional*): called when `steps` goes on after a yield. Returns the generators of the
            prompts that were added meanwhile, by index.
        is_in_turns (`bool`, *optional*, defaults to `False`): whether a member goes on until no prompt waits for it.
            Each member then makes as many passes as its longest text has tokens. Otherwise prompts that wait for less
            begin with the next member, and the others follow in passes of their own.

    Attributes:
        prompts_in_pass (`list[int]`): the prompts of the pass that is run, or that has failed.
    """

    def __init__(
        self,
        members: Sequence[Member],
        likely: Sequence[Callable[[int], list[Node]]],
        refill: Callable[[Iterable[int]], Mapping[int, Requests[None]]],
        num_left: Callable[[int], int | None] = lambda prompt_index: None,
        begin_waiting: Callable[[], Mapping[int, Requests[None]]] = dict,
        is_in_turns: bool = False,
    ) -> None:
        self._members = members
        self._likely = likely
        self._refill = refill
        self._num_left = num_left
        self._begin_waiting = begin_waiting
        self._is_in_turns = is_in_turns
        self._waiting: list[_Waiting] = [{} for _ in members]
        self._running: dict[Future[Any], tuple[int, Pass, _Waiting]] = {}
        self._devices = [member.device_key for member in members]
        self._last: dict[Any, int] = {}  # per device, whose pass was the last one
        self._left_out: list[int] = []  # further prompts of which `refill` is told next
        self.prompts_in_pass: list[int] = []

    def run(self, prompts: Mapping[int, Requests[None]]) -> None:
        """As of `steps`, to the end."""
        for _ in self.steps(prompts):
            pass

    def steps(self, prompts: Mapping[int, Requests[None]]) -> Iterator[None]:
        """
        Run them all, and those that come while they run; yields before each pass. What has come until it goes on takes
        part in that pass.

        Args:
            prompts (`dict[int, Requests]`): by its index, the generator of each prompt.

        Raises:
            MemberError: a forward pass failed.
        """
        try:
            yield from self._steps(prompts)
        except BaseException:  # also Ctrl-C: the servers are asked nothing more
            for future in self._running:
                future.cancel()
            raise

    def _steps(self, prompts: Mapping[int, Requests[None]]) -> Iterator[None]:
        ready = _tasks(prompts)
        while True:
            for task in ready:
                self._advance(task)
            advanced = [*self._left_out, *(task.prompt_index for task in ready)]
            self._left_out = []
            ready = _tasks(self._refill(advanced))
            if ready:
                continue
            if not self._running and not any(self._waiting):
                return
            yield
            added = _tasks(self._begin_waiting())
            for task in added:
                self._advance(task)
            self._left_out += [task.prompt_index for task in added]  # one may have no room for a single token
            ready = self._serve() if self._running or any(self._waiting) else []

    def leave_out(self, prompt_index: int) -> bool:
        """
        Stop running a prompt. Called between two passes; `refill` is told of the prompt before the next one.

        Returns:
            whether the prompt was stopped; `False` while a server reads for it.
        """
        if any(prompt_index in waiting for _, _, waiting in self._running.values()):
            return False
        for waiting in self._waiting:
            waiting.pop(prompt_index, None)
        self._left_out.append(prompt_index)
        return True

    def _advance(self, task: _Task) -> None:
        """
        Let a task go on until it waits.

        A task with parts waits until all of them have ended. The part that ends last resumes it: parts run one after
        another here, so exactly one of them finds `num_open` at 0.
        """
        while True:
            try:
                request = task.requests.send(task.results or None)
            except StopIteration as stop:
                parent = task.parent
                if parent is None:
                    return
                parent.results[task.number] = stop.value
                parent.num_open -= 1
                if parent.num_open > 0:
                    return
                task = parent
                continue
            task.results = []
            if isinstance(request, ParallelMembers):
                task.num_open = len(request.parts)
                task.results = [None] * len(request.parts)
                for number, part in enumerate(request.parts):
                    self._advance(_Task(task.prompt_index, part, task, number))
            else:
                self._waiting[request.member_index][task.prompt_index] = request, task
            return

    def _serve(self) -> list[_Task]:
        """Begin the passes that can be begun, and finish some; returns the tasks that need wait no longer."""
        for member_index, member in enumerate(self._members):
            # One pass of each at a time: what becomes ready meanwhile goes in the next, in fewer requests.
            is_free = all(index != member_index for index, _, _ in self._running.values())
            if member.runs_elsewhere and self._waiting[member_index] and is_free:
                self._begin_in_thread(member_index)
        local_members = self._next_local_members()
        if len(local_members) == 1:
            (member_index,) = local_members
            begun, waiting = self._begin(member_index)
            ready = self._finish(member_index, begun, waiting, begun.work)
        else:
            # Members on several devices: none of their trees is touched until all have done.
            futures = [self._begin_in_thread(member_index) for member_index in local_members]
            if futures:
                wait(futures)
            else:
                with server_wait():
                    wait(self._running, return_when=FIRST_COMPLETED)
            ready = []
        for future in [future for future in self._running if future.done()]:
            ready += self._finish(*self._running.pop(future), future.result)
        return ready

    def _next_local_members(self) -> list[int]:
        """The members on this machine whose turn it is: one for each device."""
        found = []
        for device in dict.fromkeys(self._devices):
            at = [k for k, other in enumerate(self._devices) if other == device and not self._members[k].runs_elsewhere]
            if not any(self._waiting[k] for k in at):
                continue
            current = at.index(self._last.get(device, at[0]))
            policy = policy_for(self._members[at[0]].device)
            waiting = [sum(urgency(self._num_left(prompt), policy) for prompt in self._waiting[k]) for k in at]
            share = 0.0 if self._is_in_turns else policy.keeping_share
            self._last[device] = at[next_member(waiting, current, share)]
            found.append(self._last[device])
        return found

    def _begin(self, member_index: int) -> tuple[Pass, _Waiting]:
        waiting, self._waiting[member_index] = self._waiting[member_index], {}
        needs = {prompt: (read.nodes, list(read.useful)) for prompt, (read, _) in waiting.items()}
        return self._members[member_index].begin_pass(needs, self._likely[member_index]), waiting

    def _begin_in_thread(self, member_index: int) -> Future[Any]:
        begun, waiting = self._begin(member_index)
        future = begin_in_thread(begun.work)
        self._running[future] = member_index, begun, waiting
        return future

    def _finish(self, member_index: int, begun: Pass, waiting: _Waiting, result: Callable[[], Any]) -> list[_Task]:
        """What a pass gave goes to those that waited; who needs more waits on."""
        self.prompts_in_pass = list(waiting)
        read = set(begun.finish(result))
        ready = []
        for prompt_index, (request, task) in waiting.items():
            request.nodes = [node for node in request.nodes if node not in read]
            if request.nodes:
                self._waiting[member_index][prompt_index] = request, task
            else:
                ready.append(task)
        return ready


def _tasks(prompts: Mapping[int, Requests[None]]) -> list[_Task]:
    return [_Task(prompt_index, requests) for prompt_index, requests in prompts.items()]


def nothing_likely(prompt_index: int) -> list[Node]:
    """What a member is likely to need next, where nobody knows."""
    return []
