"""Who proposes when, and who scores what, in one round of one prompt.

Members act in turn, cheapest first: each scores what is on the table, then proposes, so that where it agrees with
another its tokens are already there, computed. At the end the earlier members score what came after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..members.member import Member, Span
from ..members.passes import unread
from ..trees.nodes import Node
from ..trees.pass_policy import pays_side_by_side
from .pool import Candidate, Pool
from .prefetcher import Prefetcher
from .progress import Prompt
from .proposer import Proposals, Proposer
from .requests import ForwardRequest, Requests, SideBySide, of_each, with_sizes
from .selector import Scored
from .speculation import AcceptanceStats, propose_ahead


class RoundRunner:
    """
    The turns of the members.

    Args:
        members (`list[Member]`), proposers (`list[Proposer]`), prefetchers (`list[Foresight]`): the main model first.
        needs_logits (`bool`): whether candidates are given the logits of their ids.
    """

    def __init__(
        self,
        members: Sequence[Member],
        proposers: Sequence[Proposer],
        prefetchers: Sequence[Prefetcher],
        needs_logits: bool = False,
    ) -> None:
        self.members = members
        self._needs_logits = needs_logits
        self._proposers = proposers
        self._prefetchers = prefetchers
        self._vocabularies = [member.vocabulary for member in members]
        self._devices = [member.device_key for member in members]
        self.record = AcceptanceStats()  # of whoever goes first

    def propose(self, prompt: Prompt, pool: Pool) -> Requests[int]:
        """Pool every member's proposals, the cheapest member's first; returns who that is."""
        first, *others = sorted(range(len(self.members)), key=lambda k: self.members[k].prompt_cost(prompt.index))
        if self._work_together([first, *others]):
            yield SideBySide([self._take_turn(k, prompt, pool, []) for k in (first, *others)])
            return first
        texts = [self._prefetchers[k].greedy_text(prompt.index) for k in others]
        drafts = [self._vocabularies[first].encode(text).ids for text in texts if text]
        proposals, sizes = yield from with_sizes(self._take_turn(first, prompt, pool, drafts))
        ahead = yield from self._propose_ahead(first, others, prompt, proposals, sizes)
        for k in others:
            drafts = [[token for text in texts for token in self._vocabularies[k].encode(text).ids] for texts in ahead]
            yield from self._take_turn(k, prompt, pool, drafts)
        return first

    def _work_together(self, order: list[int]) -> bool:
        """Whether the members shall propose at the same time: where they can, and less waiting is worth more passes."""
        if len(set(self._devices)) == 1:
            return False
        places: dict[Any, list[float]] = {}
        for k in order:
            places.setdefault(self._devices[k], []).append(self.members[k].costs.seconds(1))
        return pays_side_by_side(list(places.values()))

    def _take_turn(self, member_index: int, prompt: Prompt, pool: Pool, drafts: list[list[int]]) -> Requests[Proposals]:
        """
        A member reads what the score of the candidates on the table needs, in one pass; then it proposes: what it
        agrees with is read already. Drafts may come on the table in a later round.
        """
        member, prefetcher = self.members[member_index], self._prefetchers[member_index]
        root = member.root(prompt.index)
        spans, later = self._table(member_index, prompt, pool, drafts)
        needed = member.needed_to_score(prompt.index, spans) or unread([root])
        useful = member.ends_of(prompt.index, spans) + later
        if needed:
            first = [node for node in unread(prefetcher.add_first_nodes(root)) if node not in needed]
            yield ForwardRequest(member_index, [*needed, *first], useful)
        proposals = yield from self._proposers[member_index].propose(root, useful)
        member.num_proposals += len(proposals.spans)
        pool.add(member_index, proposals)
        return proposals

    def _propose_ahead(
        self, first: int, others: list[int], prompt: Prompt, proposals: Proposals, sizes: list[int]
    ) -> Requests[list[list[str]]]:
        """What the first member would propose in the next rounds: read by the others together with this one. Not in a
        batch, where other prompts fill the passes; not after a turn without a pass, for it is ahead already."""

        def is_last(texts: list[str]) -> bool:
            length = len(prompt.ids) + sum(len(self._vocabularies[0].encode(text).ids) for text in texts)
            return prompt.max_length is not None and length >= prompt.max_length

        is_alone = self.members[first].num_active == 1
        if not (others and sizes and is_alone and self._proposers[first].looks_ahead):
            return []
        readers = [self.members[k] for k in others]
        chains = yield from propose_ahead(
            self._proposers[first], prompt.index, proposals, sizes, readers, self.record, is_last
        )
        return chains

    def _table(
        self, member_index: int, prompt: Prompt, pool: Pool, drafts: list[list[int]]
    ) -> tuple[list[Span], list[Node]]:
        """What a member can score before its own turn, and the nodes of what may come on the table later."""
        spans = [
            Span(pool.encode_for(member_index, candidate), candidate.ends)
            for candidate in pool.ranked()
            if candidate.reaches_caller and self.fits(member_index, prompt, pool, candidate)
        ]
        prefetcher = self._prefetchers[member_index]
        return spans, [node for ids in drafts for node in prefetcher.add_draft(prompt.index, ids)]

    def drop_unfit(self, prompt: Prompt, pool: Pool) -> None:
        """Candidates that could not reach the caller, or that do not fit into a member's context, leave the pool."""
        for candidate in pool.ranked():
            unfit = [m for k, m in enumerate(self.members) if not self.fits(k, prompt, pool, candidate)]
            if not candidate.reaches_caller:
                candidate.dropped = f"the tokenizer of {self.members[0].name} cannot represent it"
            elif unfit:
                candidate.dropped = f"it outgrows {unfit[0].limit} of {unfit[0].name}"

    def fits(self, member_index: int, prompt: Prompt, pool: Pool, candidate: Candidate) -> bool:
        member = self.members[member_index]
        return len(pool.encode_for(member_index, candidate)) <= member.room_after(member.root(prompt.index))

    def score(self, prompt: Prompt, pool: Pool, candidates: Sequence[Candidate] | None = None) -> Requests[Scored]:
        """Per member, the log-probabilities of these candidates, or of all still in the pool: at most one pass each."""
        if candidates is None:
            candidates = [candidate for candidate in pool.ranked() if candidate.dropped is None]
        parts = [self._score(k, prompt, pool, candidates) for k in range(len(self.members))]
        scored = yield from of_each(parts, self._devices)
        if self._needs_logits:
            for candidate in candidates:
                spans = [Span(pool.encode_for(k, candidate), candidate.ends) for k in range(len(self.members))]
                candidate.logits = [m.logits(prompt.index, one) for m, one in zip(self.members, spans, strict=True)]
        return scored

    def _score(
        self, member_index: int, prompt: Prompt, pool: Pool, candidates: Sequence[Candidate]
    ) -> Requests[dict[Candidate, list[float]]]:
        """The log-probabilities of candidates under one member."""
        member = self.members[member_index]
        spans = [Span(pool.encode_for(member_index, candidate), candidate.ends) for candidate in candidates]
        ends = member.ends_of(prompt.index, spans)
        if needed := member.needed_to_score(prompt.index, spans):
            yield ForwardRequest(member_index, needed, ends)
        return dict(zip(candidates, member.log_probs(prompt.index, spans), strict=True))
