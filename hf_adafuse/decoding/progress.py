"""What became of each prompt so far, and the error that keeps it when a member fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..members.member import MemberError
from ..outputs import AdaFuseRound
from ..trees.kv_cache import CachedIds


class AdaFuseDecodingError(RuntimeError):
    """
    A member failed in the middle of decoding: its forward pass raised, ran out of memory or gave NaN.

    Attributes:
        member (`str`): the name of the member.
        round (`int`): the number of the round, counted from 1. It is 0 while the prompts are read.
        texts (`list[str]`): per prompt, the text committed so far.
        sequences (`list[list[int]]`): per prompt, the main model's ids so far, with those of the prompt.
    """

    def __init__(
        self, member: str, reason: str, round_number: int, texts: list[str], sequences: list[list[int]]
    ) -> None:
        super().__init__(member, reason, round_number, texts, sequences)
        self.member = member
        self.round = round_number
        self.texts = texts
        self.sequences = sequences
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"{self.member} failed in round {self.round}: {self.reason}. "
            f"The text committed so far is in the error's `texts`: {self.texts!r}"
        )

    # Makes the error of a call whose member failed in a round. It is for the decoder, and not on the reference page.
    @classmethod
    def of(cls, error: MemberError, round_number: int, prompts: list[Prompt]) -> AdaFuseDecodingError:
        texts = [prompt.text for prompt in prompts]
        sequences = [prompt.ids for prompt in prompts]
        return cls(error.member.name, str(error), round_number, texts, sequences)


@dataclass(frozen=True)
class Sampling:
    """
    How the text of a prompt is drawn.

    Args:
        draws (`list[Callable]`), is_greedy (`bool`): as of [`WordSampler`].
        numbers (`RandomNumbers`): the prompt's own, from 0 to 1.
    """

    draws: Sequence[Callable[..., int]]
    numbers: Any
    is_greedy: bool = False


@dataclass
class Prompt:
    """
    One row of the batch, and what became of it.

    Args:
        index (`int`): its number in the call.
        ids (`list[int]`): the main model's ids so far as the caller sees them, padding included.
        rounds (`list[AdaFuseRound]`): the rounds so far.
        scores, logits (`list[torch.Tensor]` of shape `(vocab_size,)`): per new token, the processed scores and the
            logits before processing, where `keeps_logits`.
        states (`list[CachedIds]`): per member, its ids, keys and values when the prompt has ended and a cache is
            returned.
        finish_reason (`str`, *optional*): `"stop"` or `"length"`; `None` while the prompt is decoded.
        continues_earlier_call (`bool`): whether an earlier call has begun its text.
        max_length (`int`, *optional*): how many ids it has at the end, if nothing stops it before.
        keeps_logits (`bool`): whether the scores and logits of each committed token are kept.
        is_strict (`bool`): whether the text must follow a grammar: nothing is committed that the main model's
            processors forbid.
        sampling (`Sampling`, *optional*): how its text is drawn, where the call samples.
        asks (`str`): which stopping criteria are asked: `"all"`, `"time"` (whether the call's time is over), or
            `"text"` (all but that).
    """

    index: int
    ids: list[int]
    rounds: list[AdaFuseRound] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    states: list[CachedIds] = field(default_factory=list)
    finish_reason: str | None = None
    continues_earlier_call: bool = False
    max_length: int | None = None
    keeps_logits: bool = False
    is_strict: bool = False
    sampling: Sampling | None = None
    asks: str = "all"

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def finish(self, reason: str) -> None:
        """Decode no further. The first reason stays."""
        self.finish_reason = self.finish_reason or reason

    @property
    def text(self) -> str:
        return "".join(committed.text for committed in self.rounds)
