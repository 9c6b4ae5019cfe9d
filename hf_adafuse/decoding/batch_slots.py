"""Which prompts are decoded at a time: one that ends leaves, and a waiting one takes its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ..members.member import Member
from ..servers.daemon_threads import begin, server_wait
from .progress import Prompt


class BatchSlots:
    """
    The places of a batch.

    Args:
        members (`list[Member]`): all have the prompts, and have read none.
        prompts (`list[Prompt]`)
        number (`int`, *optional*): how many places there are; one for each prompt by default.
        on_answer (`Callable`, *optional*): told the index of each prompt that leaves.
        keep_cache (`bool`): keep the members' keys and values of each prompt.
        helpers (`list[Member]`, *optional*): who read the prompts in another form beside them; nothing is kept of it.

    Attributes:
        is_reading (`bool`): whether prompts are being read.
    """

    def __init__(
        self,
        members: Sequence[Member],
        prompts: Sequence[Prompt],
        number: int | None,
        on_answer: Callable[[int], None] | None,
        keep_cache: bool,
        helpers: Sequence[Member] = (),
    ) -> None:
        self._helpers = helpers
        self._members = members
        self._prompts = prompts
        self._waiting = list(prompts)
        self._number = number
        self._on_answer = on_answer
        self._keep_cache = keep_cache
        self.is_reading = False

    def add(self, prompt: Prompt) -> None:
        """A further prompt waits; all members have been given it."""
        self._waiting.append(prompt)

    def fill(self) -> list[Prompt]:
        """
        Every member reads as many waiting prompts as there are free places; returns these.

        Raises:
            MemberError: a forward pass failed.
        """
        number = len(self._prompts) if self._number is None else self._number
        num_free = number - self._members[0].num_active
        admitted, self._waiting = self._waiting[:num_free], self._waiting[num_free:]
        if admitted:
            self.is_reading = True
            self._read(len(admitted))
            self.is_reading = False
        return admitted

    def _read(self, number: int) -> None:
        """Prefill the prompts of served members in background threads while local members prefill theirs."""
        readers = [*self._members, *self._helpers]
        begun = [begin(partial(member.read_prompts, number)) for member in readers if member.runs_elsewhere]
        for member in readers:
            if not member.runs_elsewhere:
                member.read_prompts(number)
        with server_wait():
            for future in begun:
                future.result()

    def leave(self, paused: Iterable[int]) -> None:
        """Of these prompts, those that are finished leave the batch."""
        finished = {index for index in paused if self._prompts[index].is_finished}
        if self._keep_cache:
            # Where words are sampled, others than the main model may have had the last ones.
            self._members[0].read_to_end({index for index in finished if self._prompts[index].sampling is not None})
        for member in self._members:
            if self._keep_cache:
                for index in sorted(finished):
                    self._prompts[index].states.append(member.state(index))
            member.drop(finished)
        for helper in self._helpers:
            helper.drop(finished)
        if self._on_answer is not None:
            for index in sorted(finished):
                self._on_answer(index)
