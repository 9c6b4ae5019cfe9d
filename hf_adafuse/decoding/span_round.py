"""Rounds over spans: every member proposes texts, every member scores every text, and a method chooses one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..confidence.features import PromptFacts
from ..members.member import Member, Span
from ..trees.nodes import Node
from .answer_stops import AnswerStops
from .joint_answer import JointAnswer
from .long_spans import long_log_probs
from .member_turns import MemberTurns
from .pool import Candidate, Pool
from .progress import Prompt
from .proposer import Proposer
from .requests import ForwardRequest, Requests, run_on_each_member
from .reviews import Reviews
from .round import Round, WrittenText, outgrows, write
from .selector import Selector
from .strategies.strategy import SpanStrategy


@dataclass(eq=False)
class SpanRound(Round[WrittenText]):
    """
    A round as the paper has it (sections 3.2 to 3.4): all members propose, all score, one candidate is chosen.

    Args:
        members (`list[Member]`): the members, the main model first.
        proposers (`list[Proposer]`): one per member.
        selector (`Selector`): has the method choose the winner.
        needs_logits (`bool`): whether the method needs the logits of the candidates' ids.
    """

    proposers: Sequence[Proposer]
    selector: Selector
    needs_logits: bool

    def propose(self, text: WrittenText, pool: Pool) -> Requests[None]:
        """The members that are asked propose; all of them, where nothing of that can be committed."""
        pool.asked = self._asked_members(text)
        yield from self._take_turns(text, pool)
        if len(pool.asked) < len(self.members):
            text.drop_unfit(pool)
            if all(candidate.dropped is not None for candidate in pool.ranked()):
                pool.clear()
                pool.asked = list(range(len(self.members)))
                yield from self._take_turns(text, pool)

    def _take_turns(self, text: WrittenText, pool: Pool) -> Requests[None]:
        """The members that are asked propose, one after the other."""
        for k in pool.asked:
            proposer, end = self.proposers[k], text.node(k)
            proposals = yield from proposer.propose_unbranched(end) if pool.asks_one else proposer.propose(end)
            pool.add(k, proposals)

    def score(self, text: WrittenText, pool: Pool) -> Requests[None]:
        """Give the candidates that could be appended their log-probabilities, by at most one pass of each member."""
        text.drop_unfit(pool)
        yield from self.add_log_probs(text, pool, [one for one in pool.ranked() if one.dropped is None])

    def choose(self, text: WrittenText, pool: Pool) -> Requests[Candidate | None]:
        yield from ()
        return self.selector.choose(text.prompt, pool)

    def _asked_members(self, text: WrittenText) -> list[int]:
        """The numbers of the members that a round asks: those that the method asks, and those that may forbid a
        text."""
        index = text.prompt.index
        asked = {k for k, member in enumerate(self.members) if member.may_forbid(index)}
        return sorted(asked.union(self.selector.asked_members(text.prompt)))

    def add_log_probs(self, text: WrittenText, pool: Pool, candidates: Sequence[Candidate]) -> Requests[None]:
        """Give candidates their log-probabilities under every member that is asked, and their logits where these are
        needed."""
        parts = [self._read(k, text, pool, candidates) for k in pool.asked]
        yield from run_on_each_member(parts, [self.members[k].device_key for k in pool.asked])
        if self.needs_logits:
            for candidate in candidates:
                candidate.logits = [self._logits(k, text, pool, candidate) for k in range(len(self.members))]

    def _logits(self, member_index: int, text: WrittenText, pool: Pool, candidate: Candidate) -> list[float]:
        """The logits of a candidate's ids under one member; none where it was not asked."""
        if member_index not in pool.asked:
            return []
        span = text.span(member_index, pool, candidate)
        return self.members[member_index].logits(text.prompt.index, span)[span.start :]

    def _read(
        self, member_index: int, text: WrittenText, pool: Pool, candidates: Sequence[Candidate]
    ) -> Requests[None]:
        """Give candidates their log-probabilities under one member."""
        member, prompt_index = self.members[member_index], text.prompt.index
        spans = [text.span(member_index, pool, candidate) for candidate in candidates]
        useful = self._useful(member, prompt_index, spans)
        if needed := member.needed_to_score(prompt_index, spans):
            yield ForwardRequest(member_index, needed, useful)
        for candidate, log_probs in zip(candidates, member.log_probs(prompt_index, spans), strict=True):
            candidate.log_probs[member_index] = log_probs

    def _useful(self, member: Member, prompt_index: int, spans: Sequence[Span]) -> list[Node]:
        """What may come along in the pass that scores these candidates of a member."""
        return []


@dataclass(eq=False)
class CommittedSpanRound(SpanRound):
    """
    A round over spans whose winner is committed. These are its parts beside what [`SpanRound`] does:

    - The members take turns, which saves passes.
    - A method with whole answers may have the members write one together, have answers rated, and write one itself.
    - Where all candidates are forbidden, the main model's own greedy word is committed.
    - The method is told the facts of the prompt, and the members' weights follow the committed text.

    Args:
        members, proposers, selector, needs_logits: as of [`SpanRound`].
        strategies (`list[SpanStrategy]`): one per prompt.
        turns (`MemberTurns`): in what order the members propose.
        stops (`AnswerStops`): where an answer ends that the members write together.
        joint_round (`SpanRound`, *optional*): the round by which the members write an answer together. `None`: they
            write none.
        reviews (`Reviews`, *optional*): has the members rate answers. `None`: they rate none.
    """

    strategies: Sequence[SpanStrategy]
    turns: MemberTurns
    stops: AnswerStops
    joint_round: SpanRound | None
    reviews: Reviews | None

    def propose(self, text: WrittenText, pool: Pool) -> Requests[None]:
        """Each member in its turn; then, where the method asks for it, all of them together."""
        yield from super().propose(text, pool)
        if self.joint_round is not None:
            answer = JointAnswer(self.members, text.prompt, self.stops)
            yield from write(self.joint_round, answer)
            answer.add_to(pool)

    def _take_turns(self, text: WrittenText, pool: Pool) -> Requests[None]:
        """As [`SpanRound`] does it, in fewer passes."""
        yield from self.turns.propose(text, pool)

    def _useful(self, member: Member, prompt_index: int, spans: Sequence[Span]) -> list[Node]:
        """The ends of the candidates: at one of them the next round begins."""
        return member.mark_ends(prompt_index, spans)

    def choose(self, text: WrittenText, pool: Pool) -> Requests[Candidate | None]:
        """The method's choice; one that does not fit into a context, `dropped`, where nothing else may come."""
        prompt = text.prompt
        self._tell_facts(prompt)
        if self.reviews is not None:
            yield from self.reviews.rate(prompt, pool, self.strategies[prompt.index].stop_texts)
        chosen = yield from super().choose(text, pool)
        if chosen is None:
            winner = yield from self._own_word(text, pool)
        else:
            winner = yield from self._write_fused_answer(text, pool, chosen)
        if winner.dropped is None:
            yield from self._read_winner(text, pool, winner)
            self.turns.note_winner(pool, winner)
            self.selector.learn(prompt, winner)
        return winner

    def _read_winner(self, text: WrittenText, pool: Pool, winner: Candidate) -> Requests[None]:
        """The main model reads a winner that it has not been asked about, where the caller wants its scores, or where
        the text ends and it has several end-of-sequence ids: the likeliest of them comes next."""
        main, prompt, ids = self.members[0], text.prompt, pool.encode_for(0, winner)
        has_to_choose = winner.ends and len(main.eos_ids) > 1
        if prompt.keeps_logits or has_to_choose:
            span = Span(ids, ends=winner.ends, start=0 if prompt.keeps_logits else len(ids))
            if needed := main.needed_to_score(prompt.index, [span]):
                yield ForwardRequest(0, needed)

    def _tell_facts(self, prompt: Prompt) -> None:
        """The method of a prompt that asks for it is told what the prompt says to each member."""
        strategy = self.strategies[prompt.index]
        if strategy.needs_prompt_facts:
            entropies = [member.entropy(prompt.index) for member in self.members]
            nlls = [_none_for_nan(member.prompt_and_question_nlls[prompt.index]) for member in self.members]
            strategy.prompt_facts = PromptFacts(entropies, [one for one, _ in nlls], [one for _, one in nlls])

    def _own_word(self, text: WrittenText, pool: Pool) -> Requests[Candidate]:
        """Every candidate is forbidden: the main model's greedy word, dropped where it does not fit into a context."""
        word = yield from self.proposers[0].propose_word(text.node(0))
        candidate = Candidate(word.text, word.words, word.ends, {0: list(word.ids)}, (0, 0), [0])
        member = text.outgrown(pool, candidate)
        candidate.dropped = None if member is None else outgrows(member)
        return candidate

    def _write_fused_answer(self, text: WrittenText, pool: Pool, winner: Candidate) -> Requests[Candidate]:
        """The answer that the method writes itself from the candidates; the winner where it writes none, or where its
        answer cannot be committed."""
        answer = self.selector.fused_text(text.prompt, pool, winner)
        if answer is None:
            return winner
        # An answer ends; without such a token of the main model's, where its text does.
        fused = pool.add_text(answer, self.selector.words(answer), ends=bool(self.members[0].eos_ids))
        if fused.proposers:
            return fused if answer and fused.dropped is None and fused.score < math.inf else winner
        if not answer:
            fused.dropped = "nothing was written"
            return winner
        text.drop_unfit(pool)
        if fused.dropped is not None:
            return winner
        yield from self.add_log_probs(text, pool, [fused])
        return fused if self.selector.score_fused_text(text.prompt, fused) else winner


@dataclass(eq=False)
class AnswerRound(CommittedSpanRound):
    """
    A round in which a candidate is a whole answer: long, and nothing comes after it.

    Args:
        keeps_logits (`Callable`): as of [`AnswerTurns`].
    """

    keeps_logits: Callable[[int, int], bool]

    def _read(
        self, member_index: int, text: WrittenText, pool: Pool, candidates: Sequence[Candidate]
    ) -> Requests[None]:
        """Give answers their log-probabilities under one member, in as many passes as it takes to hold few logits at
        a time."""
        member, prompt_index = self.members[member_index], text.prompt.index
        spans = [text.span(member_index, pool, candidate) for candidate in candidates]
        keeps_logits = self.keeps_logits(member_index, prompt_index)
        log_probs = yield from long_log_probs(member_index, member, prompt_index, spans, keeps_logits)
        for candidate, values in zip(candidates, log_probs, strict=True):
            candidate.log_probs[member_index] = values


def _none_for_nan(nlls: tuple[float, float]) -> tuple[float | None, float | None]:
    """Two NLLs with `None` in the place of NaN: members have NaN for an unknown number, and facts have `None`."""
    whole, last = (None if math.isnan(nll) else nll for nll in nlls)
    return whole, last
