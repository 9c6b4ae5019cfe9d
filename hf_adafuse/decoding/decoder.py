"""The loop of AdaFuse (Algorithm 1): propose, pool, score, commit. Knows members and the prompts' text; no model, cache
or tensor, and nothing of `generate()`.

Members act in turn, cheapest first: each scores what is on the table, then proposes, so that where it agrees with
another its tokens are already there, computed. At the end the earlier members score what came after them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..config import AdaFuseConfig
from ..members.member import Member, MemberError, Span, unread
from ..trees.nodes import Node
from .committer import Committer
from .foresight import Foresight
from .look_ahead import WinRecord, propose_ahead
from .pool import Candidate, Pool
from .progress import AdaFuseDecodingError, Prompt
from .proposer import Proposals, Proposer
from .requests import Read, Requests, with_sizes
from .sampled_rounds import SampledRounds
from .scheduler import Scheduler
from .word_sampler import WordSampler
from .words import WordRule


@dataclass
class Decoder:
    """
    Decodes a batch of prompts with an ensemble.

    Args:
        members (`list[Member]`): the main model first; all have read their prompts.
        prompts (`list[Prompt]`)
        config (`AdaFuseConfig`)
        should_stop (`Callable`): asked after each new token of a prompt.
        on_commit (`Callable`): told the new ids of a prompt after each round.
        max_length (`int`, *optional*): how many ids a prompt has at the end, if nothing stops it before.
        keep_logits (`bool`): keep the scores and logits of each committed token.
        keep_cache (`bool`): keep the members' keys and values of each prompt.
        draws (`list[Callable]`, *optional*), streams (`list[Iterator[float]]`), is_greedy (`bool`): as of
            [`WordSampler`], where words are sampled.
    """

    members: list[Member]
    prompts: list[Prompt]
    config: AdaFuseConfig
    should_stop: Callable[[Prompt], bool]
    on_commit: Callable[[list[int]], None] = lambda ids: None
    max_length: int | None = None
    keep_logits: bool = False
    keep_cache: bool = False
    draws: Sequence[Callable[..., int]] | None = None
    streams: Sequence[Iterator[float]] = ()
    is_greedy: bool = False

    def __post_init__(self) -> None:
        rule = WordRule(self.config.max_word_tokens, self.config.word_boundary)
        self._proposers = [Proposer(index, member, self.config, rule) for index, member in enumerate(self.members)]
        self._foresights = [Foresight(proposer) for proposer in self._proposers]
        self._vocabularies = [member.vocabulary for member in self.members]
        self._committer = Committer(self.members, self.should_stop, self.on_commit, self.keep_logits)
        self._record = WinRecord()  # of whoever goes first

    def run(self) -> None:
        """
        Every prompt runs its own rounds; those that finish leave the batch.

        Raises:
            AdaFuseDecodingError: a member failed.
        """
        scheduler = Scheduler(self.members, [foresight.add_likely_nodes for foresight in self._foresights], self._leave)
        decode = self._decode if self.draws is None else functools.partial(self._sample, self._sampled_rounds())
        try:
            scheduler.run({prompt.index: decode(prompt) for prompt in self.prompts})
        except MemberError as error:
            number = max(len(self.prompts[index].rounds) for index in scheduler.served) + 1
            raise AdaFuseDecodingError.of(error, number, self.prompts) from error.__cause__

    def _decode(self, prompt: Prompt) -> Requests[None]:
        """The rounds of one prompt."""
        while self._has_room(prompt):
            pool = Pool(self._vocabularies)
            first = yield from self._propose(prompt, pool)
            self._drop_unfit(prompt, pool)
            log_probs = yield from self._score(prompt, pool)
            winner = pool.choose(self.config, log_probs)
            if winner is None:
                winner = yield from self._last_resort(prompt)
            if winner is not None:
                self._record.add(pool.margins[first][-1], winner is pool.best_of(first))
                self._committer.commit(prompt, pool, winner)

    def _sampled_rounds(self) -> SampledRounds:
        weights = self.config.model_weights or [1.0] * len(self.members)
        sampler = WordSampler(self._proposers, weights, self.draws or [], self.is_greedy, self.streams)
        return SampledRounds(self.members, self._proposers, sampler, self._drop_unfit, self.keep_logits)

    def _sample(self, rounds: SampledRounds, prompt: Prompt) -> Requests[None]:
        """The rounds of one prompt where words are sampled: one member's word, committed by all."""
        while self._has_room(prompt):
            pool, winner = yield from rounds.draw(prompt)
            if winner.dropped is None:
                self._committer.commit(prompt, pool, winner)
            else:
                self._stop_at_context(prompt, self.members[0])

    # 1. Propose, and pool

    def _propose(self, prompt: Prompt, pool: Pool) -> Requests[int]:
        """Pool every member's proposals, the cheapest member's first; returns who that is."""
        first, *others = sorted(range(len(self.members)), key=lambda k: self.members[k].prompt_cost(prompt.index))
        texts = [self._foresights[k].greedy_text(prompt.index) for k in others]
        drafts = [self._vocabularies[first].encode(text).ids for text in texts if text]
        proposals, sizes = yield from with_sizes(self._take_turn(first, prompt, pool, drafts))
        ahead = yield from self._propose_ahead(first, others, prompt, proposals, sizes)
        for k in others:
            drafts = [[token for text in texts for token in self._vocabularies[k].encode(text).ids] for texts in ahead]
            yield from self._take_turn(k, prompt, pool, drafts)
        return first

    def _take_turn(self, member_index: int, prompt: Prompt, pool: Pool, drafts: list[list[int]]) -> Requests[Proposals]:
        """
        A member reads what the score of the candidates on the table needs, in one pass; then it proposes: what it
        agrees with is read already. Drafts may come on the table in a later round.
        """
        member, foresight = self.members[member_index], self._foresights[member_index]
        root = member.root(prompt.index)
        spans, later = self._table(member_index, prompt, pool, drafts)
        needed = member.needed_to_score(prompt.index, spans) or unread([root])
        useful = member.ends_of(prompt.index, spans) + later
        if needed:
            yield Read(member_index, unread([*needed, *foresight.add_first_nodes(root)]), useful)
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
            return self.max_length is not None and length >= self.max_length

        is_alone = sum(not other.is_finished for other in self.prompts) == 1
        if not (others and sizes and is_alone):
            return []
        readers = [self.members[k] for k in others]
        chains = yield from propose_ahead(
            self._proposers[first], prompt.index, proposals, sizes, readers, self._record, is_last
        )
        return chains

    def _table(
        self, member_index: int, prompt: Prompt, pool: Pool, drafts: list[list[int]]
    ) -> tuple[list[Span], list[Node]]:
        """What a member can score before its own turn, and the nodes of what may come on the table later."""
        spans = [
            Span(pool.encode_for(member_index, candidate), candidate.ends)
            for candidate in pool.ranked()
            if candidate.reaches_caller and self._fits(member_index, prompt, pool, candidate)
        ]
        foresight = self._foresights[member_index]
        return spans, [node for ids in drafts for node in foresight.add_draft(prompt.index, ids)]

    # 2. Score

    def _drop_unfit(self, prompt: Prompt, pool: Pool) -> None:
        """Candidates that could not reach the caller, or that do not fit into a member's context, leave the pool."""
        for candidate in pool.ranked():
            unfit = [m for k, m in enumerate(self.members) if not self._fits(k, prompt, pool, candidate)]
            if not candidate.reaches_caller:
                candidate.dropped = f"the tokenizer of {self.members[0].name} cannot represent it"
            elif unfit:
                candidate.dropped = f"it outgrows {unfit[0].limit} of {unfit[0].name}"

    def _fits(self, member_index: int, prompt: Prompt, pool: Pool, candidate: Candidate) -> bool:
        member = self.members[member_index]
        return len(pool.encode_for(member_index, candidate)) <= member.room_after(member.root(prompt.index))

    def _score(self, prompt: Prompt, pool: Pool) -> Requests[list[dict[Candidate, list[float]]]]:
        """Per member, the log-probabilities of each candidate that is still in the pool: at most one pass each."""
        candidates = [candidate for candidate in pool.ranked() if candidate.dropped is None]
        scored = []
        for k, member in enumerate(self.members):
            spans = [Span(pool.encode_for(k, candidate), candidate.ends) for candidate in candidates]
            ends = member.ends_of(prompt.index, spans)
            if needed := member.needed_to_score(prompt.index, spans):
                yield Read(k, needed, ends)
            log_probs = [member.log_probs(prompt.index, span) for span in spans]
            scored.append(dict(zip(candidates, log_probs, strict=True)))
        return scored

    def _last_resort(self, prompt: Prompt) -> Requests[Candidate | None]:
        """Every candidate is forbidden: the main model's greedy word, or `None`, and the end, if it does not fit."""
        word = yield from self._proposers[0].propose_word(self.members[0].root(prompt.index))
        winner = Candidate(word.text, word.words, word.ends, {0: list(word.ids)}, (0, 0), [0])
        pool = Pool(self._vocabularies)
        unfit = [member for k, member in enumerate(self.members) if not self._fits(k, prompt, pool, winner)]
        if unfit:
            self._stop_at_context(prompt, unfit[0])
            return None
        return winner

    # 3. Where a prompt ends

    def _has_room(self, prompt: Prompt) -> bool:
        """Whether the prompt goes on; one that has filled a member's context is finished here."""
        if not prompt.is_finished:
            full = [member for member in self.members if member.room_after(member.root(prompt.index)) < 1]
            if full:
                self._stop_at_context(prompt, full[0])
        return not prompt.is_finished

    def _stop_at_context(self, prompt: Prompt, member: Member) -> None:
        prompt.is_finished = True
        warnings.warn(
            f"Generation of prompt {prompt.index} stopped early: the text outgrows {member.limit} of {member.name} "
            f"({member.max_length} tokens). What was generated is kept.",
            UserWarning,
            stacklevel=2,
        )

    def _leave(self, paused: Iterable[int]) -> None:
        """Of these prompts, those that are finished leave the batch."""
        finished = {index for index in paused if self.prompts[index].is_finished}
        for member in self.members:
            if self.keep_cache:
                for index in sorted(finished):
                    backend = member.backend
                    self.prompts[index].states.append((backend.trees[index].ids, backend.keys_values(index)))
            member.backend.drop(finished)
