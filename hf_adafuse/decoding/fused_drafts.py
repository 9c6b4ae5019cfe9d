"""A whole answer that the members write together before any is committed: rounds below the end of the prefix."""

from __future__ import annotations

from collections.abc import Sequence

from ..members.member import Member, Span
from ..outputs import cut_words
from ..trees.nodes import Node
from .answer_stops import AnswerStops, ids_up_to
from .pool import Candidate, Pool
from .progress import Prompt
from .proposer import Proposer
from .requests import ForwardRequest, Requests
from .selector import Scored, Selector


class FusedDrafts:
    """
    Writes answers.

    Args:
        members (`list[Member]`): the main model first.
        proposers (`list[Proposer]`), selector (`Selector`): of the method that writes them.
        stops (`AnswerStops`): where an answer ends.
    """

    def __init__(
        self, members: Sequence[Member], proposers: Sequence[Proposer], selector: Selector, stops: AnswerStops
    ) -> None:
        self._members = members
        self._proposers = proposers
        self._selector = selector
        self._stops = stops

    def add(self, prompt: Prompt, pool: Pool) -> Requests[None]:
        """Put the members' common answer on the table, behind their own."""
        text, words, ends = "", list[str](), False
        taken: list[list[int]] = [[] for _ in self._members]
        while not ends and self._goes_on(prompt, text, taken):
            candidate = yield from self._round(prompt, taken)
            if candidate is None:
                break
            text, ends = text + candidate.text, candidate.ends
            words += candidate.words
            taken = [[*ids, *candidate.ids[k]] for k, ids in enumerate(taken)]
        kept = self._stops.cut(prompt.index, text, taken[0])
        if kept is not None:
            text, words, ends = kept, cut_words(words, kept), False
            taken = [ids_up_to(m.vocabulary, ids, kept) for m, ids in zip(self._members, taken, strict=True)]
        if text or ends:
            pool.add_text(text, tuple(words), ends, dict(enumerate(taken)))

    def _goes_on(self, prompt: Prompt, text: str, taken: list[list[int]]) -> bool:
        is_full = any(m.room_after(self._end(k, prompt, taken)) < 1 for k, m in enumerate(self._members))
        return not is_full and not (text and self._stops(prompt.index, text, taken[0]))

    def _end(self, member_index: int, prompt: Prompt, taken: list[list[int]]) -> Node:
        return self._members[member_index].path(prompt.index, taken[member_index])[-1]

    def _round(self, prompt: Prompt, taken: list[list[int]]) -> Requests[Candidate | None]:
        """What comes next in the answer; `None` where there is nothing that may."""
        pool = Pool([member.vocabulary for member in self._members])
        ends = [self._end(k, prompt, taken) for k in range(len(self._members))]
        for proposer, end in zip(self._proposers, ends, strict=True):
            proposals = yield from proposer.propose(end)
            pool.add(proposer.member_index, proposals)
        for one in pool.ranked():
            sizes = [len(pool.encode_for(k, one)) for k in range(len(self._members))]
            fits = all(n <= m.room_after(end) for n, m, end in zip(sizes, self._members, ends, strict=True))
            one.dropped = None if fits and one.reaches_caller else "it cannot be committed"
        scored = yield from self._score(prompt, pool, taken)
        return self._selector.choose(prompt, pool, scored)

    def _score(self, prompt: Prompt, pool: Pool, taken: list[list[int]]) -> Requests[Scored]:
        candidates = [candidate for candidate in pool.ranked() if candidate.dropped is None]
        scored = []
        for k, member in enumerate(self._members):
            spans = [Span([*taken[k], *pool.encode_for(k, candidate)], candidate.ends) for candidate in candidates]
            if needed := member.needed_to_score(prompt.index, spans):
                yield ForwardRequest(k, needed)
            log_probs = [values[len(taken[k]) :] for values in member.log_probs(prompt.index, spans)]
            scored.append(dict(zip(candidates, log_probs, strict=True)))
        return scored
