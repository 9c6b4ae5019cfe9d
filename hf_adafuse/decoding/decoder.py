"""The loop of AdaFuse (arXiv 2601.06022, Algorithm 1): propose, pool, score, commit.

How members take their turns is in `round_runner`, what a method makes of the scores in `selector` and `strategies`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..confidence.features import PromptFacts
from ..config import AdaFuseConfig
from ..members.member import Member, MemberError, Span
from ..trees.nodes import Node
from .answer_stops import AnswerStops
from .batch_slots import BatchSlots
from .committer import Committer
from .draft_sampler import DraftSampler
from .fused_answers import FusedAnswers
from .fused_drafts import FusedDrafts
from .pool import Candidate, Pool
from .prefetcher import Prefetcher
from .progress import AdaFuseDecodingError, Prompt, Sampling
from .proposer import Proposals
from .requests import ForwardRequest, Requests
from .reviews import Reviews
from .round_runner import RoundRunner
from .sampled_rounds import SampledRounds
from .scheduler import Scheduler, nothing_likely
from .scoring import span_nll
from .selector import Selector, confidences_of
from .strategies.drafting import DraftedText
from .strategies.safe import SAFE
from .strategies.strategy import ALONE, SpanStrategy
from .strategies.token_strategy import TokenStrategy
from .token_rounds import TokenRounds
from .verified_rounds import VerifiedRounds
from .word_sampler import WordSampler
from .words import WordRule


@dataclass
class Decoder:
    """
    Decodes a batch of prompts with an ensemble. Prompts may differ in their length, stops, processors and sampling;
    where drafts are sampled, the first one's sampling is that of all.

    Args:
        members (`list[Member]`): the main model first; all have the prompts, and have read none.
        prompts (`list[Prompt]`)
        config (`AdaFuseConfig`)
        strategies (`list`): the method that the settings name, a [`SpanStrategy`] or [`TokenStrategy`] per prompt.
        should_stop (`Callable`): asked after each new token of a prompt; gives the reason to stop, or `None`.
        on_commit (`Callable`): told a prompt and its new ids after each round.
        keep_cache (`bool`): keep the members' keys and values of each prompt.
        prompt_nlls (`list[list[float]]`, *optional*): as of [`Selector`].
        max_batch_size (`int`, *optional*), on_answer (`Callable`, *optional*): as of [`BatchSlots`].
        reviews (`Reviews`, *optional*): where the members rate answers; it has been given the prompts.
    """

    members: list[Member]
    prompts: list[Prompt]
    config: AdaFuseConfig
    strategies: list[Any]
    should_stop: Callable[[Prompt], str | None]
    on_commit: Callable[[Prompt, list[int]], None] = lambda prompt, ids: None
    keep_cache: bool = False
    prompt_nlls: Sequence[Sequence[float]] = ()
    max_batch_size: int | None = None
    on_answer: Callable[[int], None] | None = None
    reviews: Reviews | None = None

    def __post_init__(self) -> None:
        rule = WordRule(self.config.max_word_tokens, self.config.word_boundary)
        method = self.strategies[0]
        indices = range(len(self.members)) if isinstance(method, SpanStrategy) else ()  # who has words to propose
        self._proposers = [method.make_proposer(index, self.members, rule) for index in indices]
        self._prefetchers = [Prefetcher(proposer) for proposer in self._proposers]
        self._vocabularies = [member.vocabulary for member in self.members]
        main, *others = self._vocabularies
        self._speakers_of_main = [k for k, one in enumerate(others, start=1) if one.is_same_as(main)]
        self._committer = Committer(self.members, self.should_stop, self.on_commit)
        self._selector = Selector(self._vocabularies, self.config, self.strategies, rule, self.prompt_nlls)
        self._runner = RoundRunner(self.members, self._proposers, self._prefetchers, method.needs_logits)
        self._fused_answers = FusedAnswers(self.members, self._runner, self._selector)
        for proposer in self._proposers:
            proposer.stops = self._answer_stops()
            sampling = self.prompts[0].sampling
            if sampling is not None and isinstance(proposer, DraftedText):
                draw = sampling.draws[proposer.member_index]
                proposer.draft = DraftSampler(proposer.member_index, draw, self._numbers)
                proposer.looks_ahead = False
        self._fused_drafts = self._make_fused_drafts(rule)
        raters = [] if self.reviews is None else self.reviews.raters
        slots = self.max_batch_size, self.on_answer, self.keep_cache
        self._slots = BatchSlots(self.members, self.prompts, *slots, raters)
        likely = [one.add_likely_nodes for one in self._prefetchers] or [nothing_likely] * len(self.members)
        likely += [nothing_likely] * len(raters)
        readers = [*self.members, *raters]
        self._scheduler = Scheduler(readers, likely, self._move_on, self._num_left, self._begin_waiting)

    def _answer_stops(self) -> AnswerStops:
        return AnswerStops(self._vocabularies[0], self.prompts, self.should_stop)

    def _make_fused_drafts(self, rule: WordRule) -> FusedDrafts | None:
        """What the members write together, where the method reranks that beside their own answers."""
        self._draft_methods = methods = [found for one in self.strategies if (found := _draft_method(one)) is not None]
        if not methods:
            return None
        proposers = [methods[0].make_proposer(index, self.members, rule) for index in range(len(self.members))]
        selector = Selector(self._vocabularies, self.config, methods, rule, self.prompt_nlls)
        return FusedDrafts(self.members, proposers, selector, self._answer_stops())

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
            yield from self._scheduler.steps(self._move_on())
        except MemberError as error:
            served = [] if self._slots.is_reading else self._scheduler.served
            number = max((len(self.prompts[index].rounds) + 1 for index in served), default=0)
            raise AdaFuseDecodingError.of(error, number, self.prompts) from error.__cause__

    def add(self, prompt: Prompt, strategy: Any) -> None:
        """A further prompt, which all members have been given; it waits for a place. `strategy` is its method."""
        self.prompts.append(prompt)
        self.strategies.append(strategy)
        if (method := _draft_method(strategy)) is not None:
            self._draft_methods.append(method)
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

    def _numbers(self, prompt_index: int) -> Any:
        """The random numbers of a prompt."""
        sampling = self.prompts[prompt_index].sampling
        assert sampling is not None
        return sampling.numbers

    def _move_on(self, paused: Iterable[int] = ()) -> dict[int, Requests[None]]:
        """Of these prompts, those that are finished leave; what those that come in their place do."""
        self._slots.leave(paused)
        return self._begin_waiting()

    def _begin_waiting(self) -> dict[int, Requests[None]]:
        """What prompts do that have found a place."""
        return {prompt.index: self._decoding(prompt) for prompt in self._slots.fill()}

    def _decoding(self, prompt: Prompt) -> Requests[None]:
        """What one prompt does, by the method."""
        if isinstance(self.strategies[0], TokenStrategy):
            return self._decode_tokens(prompt)
        if prompt.sampling is not None and self.strategies[0].samples == "words":
            return self._sample(prompt, prompt.sampling)
        return self._decode(prompt)

    def _decode(self, prompt: Prompt) -> Requests[None]:
        """The rounds of one prompt."""
        while self._has_room(prompt):
            if (yield from self._commit_certain(prompt)):
                continue
            pool = Pool(self._vocabularies)
            first = yield from self._runner.propose(prompt, pool)
            if self._fused_drafts is not None:
                yield from self._fused_drafts.add(prompt, pool)
            self._runner.drop_unfit(prompt, pool)
            scored = yield from self._runner.score(prompt, pool)
            self._tell_facts(prompt)
            if self.reviews is not None:
                yield from self.reviews.rate(prompt, pool, scored)
            winner = self._selector.choose(prompt, pool, scored)
            if winner is None:
                winner = yield from self._last_resort(prompt)
            else:
                winner = yield from self._fused_answers.replace(prompt, pool, winner)
            if winner is not None:
                self._runner.record.add(pool.margins[first][-1], winner is pool.best_of(first))
                self._committer.commit(prompt, pool, winner)
                self._selector.learn(prompt, winner, scored)

    def _tell_facts(self, prompt: Prompt) -> None:
        """The method of a prompt that asks for it is told what the prompt says to each member."""
        strategy = self.strategies[prompt.index]
        if strategy.needs_prompt:
            entropies = [member.entropy(prompt.index) for member in self.members]
            costs = [_known(member.prompt_costs[prompt.index]) for member in self.members]
            strategy.prompt_facts = PromptFacts(entropies, [one for one, _ in costs], [one for _, one in costs])

    def _decode_tokens(self, prompt: Prompt) -> Requests[None]:
        """The rounds of one prompt where tokens are fused."""
        strategy, weights = self.strategies[prompt.index], self._selector.trust(prompt).weights
        kind = VerifiedRounds if isinstance(strategy, SAFE) else TokenRounds
        rounds = kind(self.members, prompt, strategy, weights, self._committer)
        while self._has_room(prompt, rounds.node):
            yield from rounds.run_round()
        rounds.finish()

    def _sample(self, prompt: Prompt, sampling: Sampling) -> Requests[None]:
        """The rounds of one prompt where words are sampled: one member's word, committed by all."""
        weights, draws = self._selector.trust(prompt).weights, sampling.draws
        sampler = WordSampler(prompt.index, self._proposers, weights, draws, sampling.is_greedy, sampling.numbers)
        rounds = SampledRounds(self.members, self._proposers, sampler, self._runner.drop_unfit)
        while self._has_room(prompt):
            pool, winner = yield from rounds.draw(prompt)
            if winner.dropped is None:
                self._committer.commit(prompt, pool, winner)
            else:
                self._stop_at_context(prompt, self._unfit(prompt, pool, winner)[0])

    def _commit_certain(self, prompt: Prompt) -> Requests[bool]:
        """Commit the words of which the main model is certain, without asking the others, who read them later."""
        main, strategy = self.members[0], self.strategies[prompt.index]
        span = yield from strategy.propose_alone(self._proposers[0], main.root(prompt.index))
        if span is None:
            return False
        sure = Pool(self._vocabularies)
        sure.add(0, Proposals([span], []))
        (winner,) = sure.ranked()
        # Members with the same tokenizer take its ids, as if they had proposed them: copies of a model stay copies.
        winner.ids |= {k: list(span.ids) for k in self._speakers_of_main}
        self._runner.drop_unfit(prompt, sure)
        if winner.dropped is not None:
            return False
        scored = Span(winner.ids[0], winner.ends)
        if needed := main.needed_to_score(prompt.index, [scored]):  # of the end only the most likely id is known
            yield ForwardRequest(0, needed)
        (log_probs,) = main.log_probs(prompt.index, [scored])
        winner.nlls[0] = span_nll(log_probs)
        winner.confidences = confidences_of(winner, [log_probs], self._vocabularies[:1], [1.0])
        winner.score = winner.nlls[0] or 0.0
        winner.decided_by = [winner.score]
        sure.criterion = ALONE
        main.num_proposals += 1
        self._committer.commit(prompt, sure, winner)
        return True

    def _last_resort(self, prompt: Prompt) -> Requests[Candidate | None]:
        """Every candidate is forbidden: the main model's greedy word, or `None`, and the end, if it does not fit."""
        word = yield from self._proposers[0].propose_word(self.members[0].root(prompt.index))
        winner = Candidate(word.text, word.words, word.ends, {0: list(word.ids)}, (0, 0), [0])
        pool = Pool(self._vocabularies)
        if unfit := self._unfit(prompt, pool, winner):
            self._stop_at_context(prompt, unfit[0])
            return None
        return winner

    def _unfit(self, prompt: Prompt, pool: Pool, candidate: Candidate) -> list[Member]:
        """The members into whose context a candidate does not fit."""
        return [member for k, member in enumerate(self.members) if not self._runner.fits(k, prompt, pool, candidate)]

    def _has_room(self, prompt: Prompt, end_of: Callable[[int], Node | None] | None = None) -> bool:
        """Whether the prompt goes on; one that has filled a member's context, by where the text ends for it, is
        finished here."""
        if not prompt.is_finished:
            ends = [(end_of and end_of(k)) or member.root(prompt.index) for k, member in enumerate(self.members)]
            full = [member for member, end in zip(self.members, ends, strict=True) if member.room_after(end) < 1]
            if full:
                self._stop_at_context(prompt, full[0])
        return not prompt.is_finished

    def _stop_at_context(self, prompt: Prompt, member: Member) -> None:
        prompt.finish("length")
        warnings.warn(
            f"Generation of prompt {prompt.index} stopped early: the text outgrows {member.limit} of {member.name} "
            f"({member.max_length} tokens). What was generated is kept.",
            UserWarning,
            stacklevel=2,
        )


def _draft_method(strategy: Any) -> SpanStrategy | None:
    return strategy.draft_method() if isinstance(strategy, SpanStrategy) else None


def _known(costs: tuple[float, float]) -> tuple[float | None, float | None]:
    """What is not known is NaN in numbers of members, and `None` in facts."""
    whole, last = (None if math.isnan(cost) else cost for cost in costs)
    return whole, last
