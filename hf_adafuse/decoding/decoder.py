"""Decodes a batch of prompts: which prompts have a slot, whose passes are run when, what becomes of an error.

The algorithm is in `round`. `round_factory` makes the rounds of each prompt, by its method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import AdaFuseConfig
from ..members.member import Member, MemberError
from ..members.prompt_content import PromptEvidence
from .batch_slots import BatchSlots
from .progress import AdaFuseDecodingError, Prompt
from .requests import Requests
from .reviews import Reviews
from .round_factory import RoundFactory
from .scheduler import Scheduler, nothing_likely


@dataclass
class Decoder:
    """
    Decodes a batch of prompts with an ensemble. Prompts may differ in their length, stops, processors and sampling.
    Where drafts are sampled, all prompts are sampled as the first one is.

    Args:
        members (`list[Member]`): the members, the main model first. They have been given the prompts, and have read
            none.
        prompts (`list[Prompt]`): the rows of the batch.
        config (`AdaFuseConfig`): the settings.
        strategies (`list[Strategy]`): per prompt, an object of the method that the settings name.
        should_stop (`Callable`): `should_stop(prompt)`, called after each new token of a prompt, gives the reason to
            stop (`"stop"` or `"length"`), or `None`.
        on_commit (`Callable`): called as `on_commit(prompt, new_ids)` after each round.
        keep_cache (`bool`): whether the members' keys and values of each prompt are kept.
        prompt_evidence (`list[list[PromptEvidence]]`, *optional*): as of [`PromptWeights`].
        max_batch_size (`int`, *optional*), on_answer (`Callable`, *optional*): as of [`BatchSlots`].
        reviews (`Reviews`, *optional*): has the members rate answers, where the method asks for it. It has been given
            the prompts.
    """

    members: list[Member]
    prompts: list[Prompt]
    config: AdaFuseConfig
    strategies: list[Any]
    should_stop: Callable[[Prompt], str | None]
    on_commit: Callable[[Prompt, list[int]], None] = lambda prompt, ids: None
    keep_cache: bool = False
    prompt_evidence: Sequence[Sequence[PromptEvidence]] = ()
    max_batch_size: int | None = None
    on_answer: Callable[[int], None] | None = None
    reviews: Reviews | None = None

    def __post_init__(self) -> None:
        self._rounds = RoundFactory(
            self.members,
            self.prompts,
            self.config,
            self.strategies,
            self.should_stop,
            self.on_commit,
            self.prompt_evidence,
            self.reviews,
        )
        raters = [] if self.reviews is None else self.reviews.raters
        self._slots = BatchSlots(
            self.members, self.prompts, self.max_batch_size, self.on_answer, self.keep_cache, raters
        )
        self._scheduler = Scheduler(
            members=[*self.members, *raters],
            likely=[*self._rounds.likely_nodes, *[nothing_likely] * len(raters)],
            refill=self._refill,
            num_left=self._num_left,
            begin_waiting=self._begin_waiting,
            is_in_turns=self.strategies[0].is_whole,
        )

    def run(self) -> None:
        """As of `steps`, to the end."""
        for _ in self.steps():
            pass

    def steps(self) -> Iterator[None]:
        """
        Every prompt runs its own rounds; those that finish leave the batch, and waiting ones come into it. Yields
        before each pass: there prompts may be added and left out.

        Raises:
            AdaFuseDecodingError: a member failed.
        """
        try:
            yield from self._scheduler.steps(self._refill())
        except MemberError as error:
            in_pass = [] if self._slots.is_prefilling else self._scheduler.prompts_in_pass
            number = max((len(self.prompts[index].rounds) + 1 for index in in_pass), default=0)
            raise AdaFuseDecodingError.of(error, number, self.prompts) from error.__cause__

    def add(self, prompt: Prompt, strategy: Any) -> None:
        """A further prompt, which all members have been given; it waits for a slot. `strategy` is its method."""
        self.prompts.append(prompt)
        self._rounds.add(strategy)
        self._slots.add(prompt)

    def leave_out(self, prompt: Prompt) -> bool:
        """Between two passes: a prompt is decoded no further. Whether it could be done now; see [`Scheduler`]."""
        if not self._scheduler.leave_out(prompt.index):
            return False
        prompt.finish("stop")
        return True

    def _num_left(self, prompt_index: int) -> int | None:
        """How many ids a prompt may get yet, where the call limits them."""
        prompt = self.prompts[prompt_index]
        return None if prompt.max_length is None else prompt.max_length - len(prompt.ids)

    def _refill(self, advanced: Iterable[int] = ()) -> dict[int, Requests[None]]:
        """Of these prompts, those that are finished leave. Returns the rounds of those that take their slots."""
        self._slots.leave(advanced)
        return self._begin_waiting()

    def _begin_waiting(self) -> dict[int, Requests[None]]:
        """The rounds of prompts that have found a slot."""
        return {prompt.index: self._rounds.rounds_of(prompt) for prompt in self._slots.fill()}
