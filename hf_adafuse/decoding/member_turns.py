"""In what order the members propose, and what each of them reads before, so that few passes are needed.

On one device the members that a round asks act in turn, the cheapest first (parameters times tokens of the prompt).
Each scores what is in the pool, then proposes. So where it agrees with another member its tokens are already there,
computed. None of it changes a result: [`SpanRound`] proposes the same without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..members.member import Member, Span
from ..members.passes import unread
from ..trees.nodes import Node
from ..trees.pass_policy import pays_side_by_side, policy_for
from .pool import Candidate, Pool
from .proposer import Proposals, Proposer
from .requests import ForwardRequest, ParallelMembers, Requests, with_sizes
from .round import WrittenText
from .speculation import AcceptanceStats, Prefetcher, propose_ahead


class MemberTurns:
    """
    The turns of the members in a round.

    Args:
        members (`list[Member]`), proposers (`list[Proposer]`), prefetchers (`list[Prefetcher]`): the main model first.
    """

    def __init__(
        self, members: Sequence[Member], proposers: Sequence[Proposer], prefetchers: Sequence[Prefetcher]
    ) -> None:
        self._members = members
        self._proposers = proposers
        self._prefetchers = prefetchers
        self._vocabularies = [member.vocabulary for member in members]
        self._devices = [member.device_key for member in members]
        self._acceptance = AcceptanceStats()  # of whoever goes first

    def propose(self, text: WrittenText, pool: Pool) -> Requests[None]:
        """Pool the proposals of the members that are asked, the cheapest member's first."""
        index = text.prompt.index
        first, *others = sorted(pool.asked, key=lambda k: self._members[k].prefill_cost(index))
        pool.first = first
        if pool.asks_one:
            proposals = yield from self._proposers[first].propose_unbranched(text.node(first))
            pool.add(first, proposals)
            return
        if self._shall_propose_in_parallel([first, *others]):
            yield ParallelMembers([self._take_turn(k, text, pool, []) for k in (first, *others)])
            return
        expected = [self._prefetchers[k].greedy_text(text.node(k)) for k in others]
        later_ids = [self._vocabularies[first].encode(one).ids for one in expected if one]
        proposals, sizes = yield from with_sizes(self._take_turn(first, text, pool, later_ids))
        chains = yield from self._propose_ahead(first, others, text, proposals, sizes)
        for k in others:
            encode = self._vocabularies[k].encode
            later_ids = [[token for one in chain for token in encode(one).ids] for chain in chains]
            yield from self._take_turn(k, text, pool, later_ids)

    def note_winner(self, pool: Pool, winner: Candidate) -> None:
        """Record whether the first member's best candidate has won. How far ahead it will propose follows from this.
        One that is asked alone does not propose ahead."""
        if not pool.asks_one:
            self._acceptance.add(pool.margins[pool.first][-1], winner is pool.best_of(pool.first))

    def _shall_propose_in_parallel(self, order: list[int]) -> bool:
        """Whether the members shall propose at the same time: where they can, and less waiting is worth more passes."""
        if len(set(self._devices)) == 1:
            return False
        seconds: dict[Any, list[float]] = {}
        for k in order:
            seconds.setdefault(self._devices[k], []).append(self._members[k].costs.seconds(1))
        return pays_side_by_side(list(seconds.values()), policy_for(self._members[order[0]].device))

    def _take_turn(
        self, member_index: int, text: WrittenText, pool: Pool, later_ids: list[list[int]]
    ) -> Requests[Proposals]:
        """
        A member first reads what the score of the candidates in the pool needs, in one pass. Then it proposes: where it
        agrees with a candidate, its tokens are read already. `later_ids` are the member's ids of texts that may come
        into the pool later, in this round or in a later one.
        """
        member = self._members[member_index]
        prompt_index = text.prompt.index
        end = text.node(member_index)
        spans, later = self._spans_and_later_nodes(member_index, text, pool, later_ids)
        needed = member.needed_to_score(prompt_index, spans) or unread([end])
        useful = member.mark_ends(prompt_index, spans) + later
        if needed:
            first = unread(self._prefetchers[member_index].add_first_nodes(end))
            yield ForwardRequest(member_index, [*needed, *(node for node in first if node not in needed)], useful)
        proposals = yield from self._proposers[member_index].propose(end, useful)
        pool.add(member_index, proposals)
        return proposals

    def _spans_and_later_nodes(
        self, member_index: int, text: WrittenText, pool: Pool, later_ids: list[list[int]]
    ) -> tuple[list[Span], list[Node]]:
        """The candidates that a member can score before its own turn, and the nodes of texts that may come later."""
        spans = [
            text.span(member_index, pool, candidate)
            for candidate in pool.ranked()
            if candidate.reaches_caller and text.fits(member_index, pool, candidate)
        ]
        prefetcher, end = self._prefetchers[member_index], text.node(member_index)
        return spans, [node for ids in later_ids for node in prefetcher.add_later_nodes(end, ids)]

    def _propose_ahead(
        self, first: int, others: list[int], text: WrittenText, proposals: Proposals, sizes: list[int]
    ) -> Requests[list[list[str]]]:
        """What the first member would propose in the next rounds: the others read it together with this round. It is
        empty in a batch, where other prompts fill the passes, and after a turn without a pass, where the first member
        is ahead already."""
        length = len(text.prompt.ids) + len(text.ids(0))
        max_length = text.prompt.max_length

        def is_last(chain: list[str]) -> bool:
            new = sum(len(self._vocabularies[0].encode(one).ids) for one in chain)
            return max_length is not None and length + new >= max_length

        is_alone = self._members[first].num_active == 1
        if not (others and sizes and is_alone and self._proposers[first].can_propose_ahead):
            return []
        proposer, end = self._proposers[first], text.node(first)
        members = [self._members[k] for k in others]
        chains = yield from propose_ahead(proposer, end, proposals, sizes, members, self._acceptance, is_last)
        return chains
