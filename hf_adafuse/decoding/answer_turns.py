"""The order in which members write whole answers: one member all answers of the batch, then the next one.

Whoever comes later has first read the answers that are there, so that where it agrees with one its tokens are read
already. A member makes as many passes to write as its longest answer has tokens, like its own `generate()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..members.member import Member
from .long_spans import read_long
from .member_turns import MemberTurns
from .pool import Candidate, Pool
from .proposer import Proposal, Proposals, Proposer
from .requests import ParallelMembers, Requests
from .round import WrittenText
from .speculation import Prefetcher


class AnswerTurns(MemberTurns):
    """
    The turns of the members in a round of whole answers.

    Args:
        members, proposers, prefetchers: as of [`MemberTurns`].
        keeps_logits (`Callable`): `keeps_logits(member_index, prompt_index)` says whether the logits after the tokens
            of answers are needed once they have been read.
    """

    def __init__(
        self,
        members: Sequence[Member],
        proposers: Sequence[Proposer],
        prefetchers: Sequence[Prefetcher],
        keeps_logits: Callable[[int, int], bool],
    ) -> None:
        super().__init__(members, proposers, prefetchers)
        self._keeps_logits = keeps_logits

    def propose(self, text: WrittenText, pool: Pool) -> Requests[None]:
        """Pool the answer of each member that is asked, the smallest member's first: in one order for all prompts of a
        batch."""
        order = sorted(pool.asked, key=lambda k: self._members[k].num_parameters)
        pool.first = order[0]
        turns = [self._answer(k, text, pool) for k in order]
        if self._shall_propose_in_parallel(order):
            yield ParallelMembers(turns)
            return
        for turn in turns:
            yield from turn

    def note_winner(self, pool: Pool, winner: Candidate) -> None:
        """Nobody answers ahead: no round follows."""

    def _answer(self, member_index: int, text: WrittenText, pool: Pool) -> Requests[None]:
        """A member reads what the score of the answers in the pool needs, and begins its own in the same pass. No
        further nodes come along, because the only text that goes on is its own."""
        member = self._members[member_index]
        index = text.prompt.index
        end = text.node(member_index)
        spans, _ = self._spans_and_later_nodes(member_index, text, pool, [])
        first = self._prefetchers[member_index].add_first_nodes(end)
        keeps_logits = self._keeps_logits(member_index, index)
        yield from read_long(member_index, member, index, spans, first or [end], keeps_logits)
        proposals = Proposals([], [])
        if not self._is_over(member_index, text, pool):
            proposals = yield from self._proposers[member_index].propose(end)
            if self._is_over(member_index, text, pool):
                kept = [span for span in proposals.spans if span.ends or self._is_complete(member_index, text, span)]
                proposals = Proposals(kept, proposals.margins)
        pool.add(member_index, proposals)

    def _is_complete(self, member_index: int, text: WrittenText, span: Proposal) -> bool:
        ids = span.ids if self._members[member_index].has_main_tokenizer else None
        return self._proposers[member_index].stops.is_complete(text.prompt.index, span.text, ids)

    def _is_over(self, member_index: int, text: WrittenText, pool: Pool) -> bool:
        """Whether the call's time is over, and there is an answer. What the time has cut is short, and so may look
        better than the whole answers of others."""
        return bool(pool.ranked()) and self._proposers[member_index].stops.is_over(text.prompt.index)
