"""Which prompts are decoded at a time: one that ends leaves, and a waiting one takes its slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ..members.member import Member
from ..servers.daemon_threads import begin, server_wait
from .progress import Prompt


class BatchSlots:
    """
    The slots of a batch: each holds one prompt while it is decoded.

    Args:
        members (`list[Member]`): the members. They have been given the prompts, and have read none.
        prompts (`list[Prompt]`): the rows of the batch, those that wait too.
        number (`int`, *optional*): how many slots there are. By default one for each prompt.
        on_answer (`Callable`, *optional*): called with the index of each prompt that leaves.
        keep_cache (`bool`): whether the members' keys and values of each prompt are kept.
        raters (`list[Member]`, *optional*): the members again, which rate answers. They read prompts of their
            own, as many as the members. None of their keys and values are kept.

    Attributes:
        is_prefilling (`bool`): whether the members read prompts now.
    """

    def __init__(
        self,
        members: Sequence[Member],
        prompts: Sequence[Prompt],
        number: int | None,
        on_answer: Callable[[int], None] | None,
        keep_cache: bool,
        raters: Sequence[Member] = (),
    ) -> None:
        self._raters = raters
        self._members = members
        self._prompts = prompts
        self._waiting = list(prompts)
        self._number = number
        self._on_answer = on_answer
        self._keep_cache = keep_cache
        self.is_prefilling = False

    def add(self, prompt: Prompt) -> None:
        """A further prompt waits; all members have been given it."""
        self._waiting.append(prompt)

    def fill(self) -> list[Prompt]:
        """
        Every member reads as many waiting prompts as there are free slots; returns these.

        Raises:
            MemberError: a forward pass failed.
        """
        number = len(self._prompts) if self._number is None else self._number
        num_free = number - self._members[0].num_active
        admitted, self._waiting = self._waiting[:num_free], self._waiting[num_free:]
        if admitted:
            self.is_prefilling = True
            self._read(len(admitted))
            self.is_prefilling = False
        return admitted

    def _read(self, number: int) -> None:
        """Prefill the prompts of served members in background threads while local members prefill theirs."""
        all_members = [*self._members, *self._raters]
        begun = [begin(partial(member.read_prompts, number)) for member in all_members if member.runs_elsewhere]
        try:
            for member in all_members:
                if not member.runs_elsewhere:
                    member.read_prompts(number)
            with server_wait():
                for future in begun:
                    future.result()
        except BaseException:  # also Ctrl-C: the servers are asked nothing more
            for future in begun:
                future.cancel()
            raise

    def leave(self, advanced: Iterable[int]) -> None:
        """Of these prompts, which have had a pass, those that are finished leave the batch."""
        finished = {index for index in advanced if self._prompts[index].is_finished}
        if self._keep_cache:
            # The main model may not have been asked about the last words.
            rounds = {index: self._prompts[index].rounds for index in finished}
            self._members[0].read_to_end({index: bool(of_one) and of_one[-1].ends for index, of_one in rounds.items()})
        for member in self._members:
            if self._keep_cache:
                for index in sorted(finished):
                    self._prompts[index].states.append(member.state(index))
            member.drop(finished)
        for rater in self._raters:
            rater.drop(finished)
        if self._on_answer is not None:
            for index in sorted(finished):
                self._on_answer(index)
