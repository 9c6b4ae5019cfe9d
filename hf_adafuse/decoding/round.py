"""One round: each member proposes, all score, one candidate is chosen and appended (arXiv 2601.06022, Algorithm 1).

Start reading here. [`write`] is the loop of the algorithm, and [`Round.run`] is one round. Every text is made by them:

| kind of round | what members propose | module |
|---|---|---|
| [`SpanRound`] | spans of words, or whole answers | `span_round` |
| [`TokenRound`] | the next token | `token_round` |
| [`VerifiedRound`] | tokens that the main model drafts and the others verify, or the next one | `verified_round` |
| [`SampledRound`] | the next word of one member, drawn at random | `sampled_round` |
| [`CertaintyGate`] | what the main model is certain of; else the round that it wraps is run | `certainty_gate` |

A call without settings runs a [`CommittedSpanRound`], which is a [`SpanRound`]. A [`CertaintyGate`] wraps it, and does
nothing of its own unless the method or `certainty_gate` asks for it. [`CertaintyGate`], [`VerifiedRound`] and
[`SampledRound`] override [`Round.run`].

A round does not know what becomes of its candidate. The [`WrittenText`] does: [`CommittedText`] is the text of a prompt
that the caller gets, [`TokenText`] is the same text where tokens are fused, and [`JointAnswer`] is an answer that the
members write together before any of it is committed. `round_factory` makes the rounds that a method names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..members.member import Member, Span
from ..trees.nodes import Node
from .pool import Candidate, Pool
from .progress import Prompt
from .requests import Requests


class WrittenText(ABC):
    """
    A text that grows by the winners of rounds, and where it ends for each member.

    Args:
        members (`list[Member]`): the main model first.
        prompt (`Prompt`): what the text answers.
    """

    def __init__(self, members: Sequence[Member], prompt: Prompt) -> None:
        self.members = members
        self.prompt = prompt

    @abstractmethod
    def goes_on(self) -> bool:
        """Whether a further round may be run."""

    @abstractmethod
    def append(self, pool: Pool) -> None:
        """Take the winner of a round; `pool` has it, and what the round says of it."""

    @abstractmethod
    def close(self) -> None:
        """Finish the text: no further round comes."""

    @abstractmethod
    def ids(self, member_index: int) -> list[int]:
        """A member's own ids of the text that is not yet in its prefix."""

    @abstractmethod
    def node(self, member_index: int) -> Node:
        """The end of the text in a member's tree."""

    def span(self, member_index: int, pool: Pool, candidate: Candidate) -> Span:
        """A candidate in a member's tokens, below its prefix. What comes before the candidate is not scored again."""
        ids = self.ids(member_index)
        return Span([*ids, *pool.encode_for(member_index, candidate)], candidate.ends, len(ids))

    def fits(self, member_index: int, pool: Pool, candidate: Candidate) -> bool:
        """Whether a candidate fits into a member's context."""
        member = self.members[member_index]
        return len(pool.encode_for(member_index, candidate)) <= member.room_after(self.node(member_index))

    def outgrown(self, pool: Pool, candidate: Candidate) -> Member | None:
        """The first member into whose context a candidate does not fit."""
        full = [member for k, member in enumerate(self.members) if not self.fits(k, pool, candidate)]
        return full[0] if full else None

    def drop_unfit(self, pool: Pool) -> None:
        """Note of candidates that could not reach the caller, or do not fit into a context, why they are dropped."""
        for candidate in pool.ranked():
            member = self.outgrown(pool, candidate)
            if not candidate.reaches_caller:
                candidate.dropped = f"the tokenizer of {self.members[0].name} cannot represent it"
            elif member is not None:
                candidate.dropped = outgrows(member)


W = TypeVar("W", bound=WrittenText)


@dataclass(eq=False)
class Round(ABC, Generic[W]):
    """
    A kind of round. Kinds differ in the three steps. [`Round.run`] runs one round each time it is called.

    Args:
        members (`list[Member]`): the main model first.
    """

    members: Sequence[Member]

    def run(self, text: W) -> Requests[Pool]:
        """Run one round. Returns its pool, whose `winner` is `None` where nothing may come."""
        pool = Pool([member.vocabulary for member in self.members])
        yield from self.propose(text, pool)
        yield from self.score(text, pool)
        pool.winner = yield from self.choose(text, pool)
        return pool

    @abstractmethod
    def propose(self, text: W, pool: Pool) -> Requests[None]:
        """Put candidates into the pool. Equal texts are one candidate (section 3.2)."""

    @abstractmethod
    def score(self, text: W, pool: Pool) -> Requests[None]:
        """Give the candidates that could be appended their log-probabilities under the members (section 3.4)."""

    @abstractmethod
    def choose(self, text: W, pool: Pool) -> Requests[Candidate | None]:
        """The candidate that comes next; `None` where none may."""


def write(kind: Round[W], text: W) -> Requests[None]:
    """The loop of the algorithm: run rounds of this kind until the text goes no further."""
    while text.goes_on():
        pool = yield from kind.run(text)
        text.append(pool)
    text.close()


def outgrows(member: Member) -> str:
    """Why a candidate is dropped that does not fit into a member's context."""
    return f"it outgrows {member.limit} of {member.name}"
