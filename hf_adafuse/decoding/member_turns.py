"""In what order the members propose, and what each of them reads before, so that few passes are needed.

Members act in turn, cheapest first: each scores what is in the pool, then proposes, so that where it agrees with
another its tokens are already there, computed. None of it changes a result: [`SpanRound`] proposes the same without it.
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
from .requests import ForwardRequest, Requests, SideBySide, with_sizes
from .round import Cursor
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

    def propose(self, cursor: Cursor, pool: Pool) -> Requests[None]:
        """Pool every member's proposals, the cheapest member's first."""
        index = cursor.prompt.index
        first, *others = sorted(range(len(self._members)), key=lambda k: self._members[k].prefill_cost(index))
        pool.first = first
        if self._work_together([first, *others]):
            yield SideBySide([self._take_turn(k, cursor, pool, []) for k in (first, *others)])
            return
        texts = [self._prefetchers[k].greedy_text(cursor.node(k)) for k in others]
        drafts = [self._vocabularies[first].encode(text).ids for text in texts if text]
        proposals, sizes = yield from with_sizes(self._take_turn(first, cursor, pool, drafts))
        ahead = yield from self._propose_ahead(first, others, cursor, proposals, sizes)
        for k in others:
            drafts = [[token for text in texts for token in self._vocabularies[k].encode(text).ids] for texts in ahead]
            yield from self._take_turn(k, cursor, pool, drafts)

    def note_winner(self, pool: Pool, winner: Candidate) -> None:
        """Record whether the first member's best candidate has won. How far ahead it will propose follows from this."""
        self._acceptance.add(pool.margins[pool.first][-1], winner is pool.best_of(pool.first))

    def _work_together(self, order: list[int]) -> bool:
        """Whether the members shall propose at the same time: where they can, and less waiting is worth more passes."""
        if len(set(self._devices)) == 1:
            return False
        seconds: dict[Any, list[float]] = {}
        for k in order:
            seconds.setdefault(self._devices[k], []).append(self._members[k].costs.seconds(1))
        return pays_side_by_side(list(seconds.values()), policy_for(self._members[order[0]].device))

    def _take_turn(self, member_index: int, cursor: Cursor, pool: Pool, drafts: list[list[int]]) -> Requests[Proposals]:
        """
        A member reads what the score of the candidates in the pool needs, in one pass; then it proposes: what it
        agrees with is read already. Drafts may come into the pool in a later round.
        """
        member, prompt_index, end = self._members[member_index], cursor.prompt.index, cursor.node(member_index)
        spans, later = self._table(member_index, cursor, pool, drafts)
        needed = member.needed_to_score(prompt_index, spans) or unread([end])
        useful = member.mark_ends(prompt_index, spans) + later
        if needed:
            first = unread(self._prefetchers[member_index].add_first_nodes(end))
            yield ForwardRequest(member_index, [*needed, *(node for node in first if node not in needed)], useful)
        proposals = yield from self._proposers[member_index].propose(end, useful)
        pool.add(member_index, proposals)
        return proposals

    def _table(
        self, member_index: int, cursor: Cursor, pool: Pool, drafts: list[list[int]]
    ) -> tuple[list[Span], list[Node]]:
        """What a member can score before its own turn, and the nodes of what may come into the pool later."""
        spans = [
            cursor.span(member_index, pool, candidate)
            for candidate in pool.ranked()
            if candidate.reaches_caller and cursor.fits(member_index, pool, candidate)
        ]
        prefetcher, end = self._prefetchers[member_index], cursor.node(member_index)
        return spans, [node for ids in drafts for node in prefetcher.add_draft(end, ids)]

    def _propose_ahead(
        self, first: int, others: list[int], cursor: Cursor, proposals: Proposals, sizes: list[int]
    ) -> Requests[list[list[str]]]:
        """What the first member would propose in the next rounds: read by the others together with this one. Not in a
        batch, where other prompts fill the passes; not after a turn without a pass, for it is ahead already."""
        length, max_length = len(cursor.prompt.ids) + len(cursor.ids(0)), cursor.prompt.max_length

        def is_last(texts: list[str]) -> bool:
            new = sum(len(self._vocabularies[0].encode(text).ids) for text in texts)
            return max_length is not None and length + new >= max_length

        is_alone = self._members[first].num_active == 1
        if not (others and sizes and is_alone and self._proposers[first].can_propose_ahead):
            return []
        readers = [self._members[k] for k in others]
        proposer, end = self._proposers[first], cursor.node(first)
        chains = yield from propose_ahead(proposer, end, proposals, sizes, readers, self._acceptance, is_last)
        return chains
