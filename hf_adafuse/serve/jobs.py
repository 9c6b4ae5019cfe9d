"""A call that the engine decodes, and the running batch that it is decoded in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..call.plan import CallPlan
from ..call.running_batch import RunningBatch
from ..decoding.progress import Prompt

# The most calls that join one running batch. A full batch comes to an end, which frees what it has remembered.
MOST_CALLS = 256


class Job:
    """
    A call to decode. The engine's thread calls its methods between passes.

    Args:
        plan (`CallPlan`): the plan of one prompt.
        client (`str`): an identifier of the client that waits, like its address.
    """

    def __init__(self, plan: CallPlan, client: str = "") -> None:
        self.plan = plan
        self.client = client
        self.is_cancelled = False
        self._streams = copy.deepcopy(plan.streams)  # decoding uses up its random numbers

    def on_round(self, prompt: Prompt) -> None:
        """A round has been committed."""

    def on_pass(self) -> None:
        """A pass is over in which rounds were committed and the text has not ended."""

    def on_end(self, rounds: Any) -> None:
        """The text has ended."""

    def on_error(self, error: Exception) -> None:
        """The call has failed, and no more text comes."""

    def restart(self) -> None:
        """Prepare to be decoded again from the beginning."""
        self.plan = replace(self.plan, streams=copy.deepcopy(self._streams))


class JobBatch:
    """
    A running batch, and its jobs by number.

    Args:
        job (`Job`): the first job.
        is_alone (`bool`): whether no other job may join.
        on_leave (`Callable`): told a job whose text has ended.
    """

    def __init__(self, job: Job, is_alone: bool, on_leave: Callable[[Job], None]) -> None:
        self.jobs: dict[int, Job] = {0: job}
        self.is_alone = is_alone
        self._on_leave = on_leave
        self._moved_on: set[int] = set()
        self.batch = RunningBatch(job.plan, self._on_round, self._on_end)

    def takes(self, plan: CallPlan) -> bool:
        """Whether a call with this plan may join."""
        return not self.is_alone and self.batch.num_calls < MOST_CALLS and self.batch.takes(plan)

    def add(self, job: Job) -> None:
        self.jobs[self.batch.add(job.plan)] = job

    def step(self) -> None:
        """Run one pass, and tell the jobs what it has brought."""
        self.batch.step()
        for number in sorted(self._moved_on & self.jobs.keys()):
            self.jobs[number].on_pass()
        self._moved_on.clear()

    def cancel(self, job: Job) -> bool:
        """Take a job out of the batch. Returns whether it could leave: while a server reads for it, it cannot."""
        number = next(number for number, one in self.jobs.items() if one is job)
        if not self.batch.leave(number):
            return False
        del self.jobs[number]
        return True

    def _on_round(self, number: int) -> None:
        if number in self.jobs:
            self.jobs[number].on_round(self.batch.prompt(number))
            self._moved_on.add(number)

    def _on_end(self, number: int, rounds: Any) -> None:
        job = self.jobs.pop(number)
        self._on_leave(job)
        job.on_end(rounds)
