"""Makes the rounds of each prompt. The method names the kind of round, unless the call samples words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..config import AdaFuseConfig
from ..members.member import Member
from ..members.prompt_content import PromptEvidence
from ..trees.nodes import Node
from .answer_stops import AnswerStops
from .answer_turns import AnswerTurns
from .certainty_gate import CertaintyGate
from .committed_text import CommittedText
from .member_turns import MemberTurns
from .member_weights import PromptWeights
from .progress import Prompt, Sampling
from .proposer import Proposer
from .requests import Requests
from .reviews import Reviews
from .round import Round, WrittenText, write
from .sampled_round import SampledRound
from .samplers import DraftSampler, WordSampler
from .scheduler import nothing_likely
from .selector import Selector
from .span_round import AnswerRound, CommittedSpanRound, SpanRound
from .speculation import Prefetcher
from .strategies.strategy import RoundKind, SampledPart, SpanStrategy
from .token_round import TokenRound, TokenText
from .verified_round import VerifiedRound, VerifiedText
from .word_splitter import WordSplitter


@dataclass
class RoundFactory:
    """
    Makes the rounds of the prompts of a call.

    Args:
        members, prompts, config, strategies, should_stop, on_commit, prompt_evidence, reviews: as of [`Decoder`].

    Attributes:
        likely_nodes (`list[Callable]`): per member, `likely(prompt_index)` gives the nodes that the member will
            probably read next for that prompt.
    """

    members: list[Member]
    prompts: list[Prompt]
    config: AdaFuseConfig
    strategies: list[Any]
    should_stop: Callable[[Prompt], str | None]
    on_commit: Callable[[Prompt, list[int]], None]
    prompt_evidence: Sequence[Sequence[PromptEvidence]]
    reviews: Reviews | None

    def __post_init__(self) -> None:
        self._splitter = WordSplitter(self.config.max_word_tokens, self.config.word_boundary)
        self._weights = self._new_weights()
        self._joint_methods: list[SpanStrategy] = []
        for strategy in self.strategies:
            self._add_joint_method(strategy)
        self.likely_nodes: list[Callable[[int], list[Node]]] = [nothing_likely] * len(self.members)
        if self.strategies[0].round_kind == RoundKind.SPAN:
            self._proposers = self._make_proposers(self.strategies[0])
            self._shared_span_round = self._make_span_round()

    def add(self, strategy: Any) -> None:
        """Take a further prompt of the call, whose method is `strategy`."""
        self.strategies.append(strategy)
        self._add_joint_method(strategy)

    def rounds_of(self, prompt: Prompt) -> Requests[None]:
        """A generator that runs all rounds of a prompt that has been read."""
        strategy = self.strategies[prompt.index]
        rounds_of_kind = {
            RoundKind.SPAN: self._span_rounds,
            RoundKind.TOKEN: self._token_rounds,
            RoundKind.VERIFIED: self._verified_rounds,
        }
        return rounds_of_kind[strategy.round_kind](prompt, strategy)

    def _span_rounds(self, prompt: Prompt, strategy: Any) -> Requests[None]:
        text = CommittedText(self.members, prompt, self.should_stop, self.on_commit, strategy.is_whole)
        if prompt.sampling is not None and strategy.samples == SampledPart.WORDS:
            return write(self._make_sampled_round(prompt, prompt.sampling), text)
        return write(self._shared_span_round, text)

    def _token_rounds(self, prompt: Prompt, strategy: Any) -> Requests[None]:
        text = TokenText(self.members, prompt, self.should_stop, self.on_commit, strategy)
        return write(TokenRound(self.members, strategy, self._weights_for(prompt)), text)

    def _verified_rounds(self, prompt: Prompt, strategy: Any) -> Requests[None]:
        text = VerifiedText(self.members, prompt, self.should_stop, self.on_commit, strategy)
        return write(VerifiedRound(self.members, strategy, self._weights_for(prompt)), text)

    def _weights_for(self, prompt: Prompt) -> Sequence[float]:
        """How much each member counts at the beginning of a prompt's text."""
        return self._weights.of(prompt.index).weights

    def _make_sampled_round(self, prompt: Prompt, sampling: Sampling) -> SampledRound:
        """The round in which words are drawn, of one prompt."""
        sampler = WordSampler(
            prompt_index=prompt.index,
            proposers=self._proposers,
            weights=self._weights_for(prompt),
            draws=sampling.draws,
            is_greedy=sampling.is_greedy,
            numbers=sampling.numbers,
        )
        return SampledRound(self.members, self._proposers, sampler)

    def _make_span_round(self) -> Round[WrittenText]:
        """The round over spans, which serves all prompts."""
        method = self.strategies[0]
        prefetchers = [Prefetcher(proposer) for proposer in self._proposers]
        for proposer in self._proposers:
            proposer.stops = self._answer_stops()
            if (sampling := self.prompts[0].sampling) is not None:
                draw = sampling.draws[proposer.member_index]
                proposer.set_draft_sampler(DraftSampler(proposer.member_index, draw, self._numbers))
        parts: dict[str, Any] = {
            "members": self.members,
            "proposers": self._proposers,
            "selector": self._make_selector(self.strategies, self._weights),
            "needs_logits": method.needs_logits,
            "strategies": self.strategies,
            "stops": self._answer_stops(),
            "joint_round": self._make_joint_round(),
            "reviews": self.reviews,
        }
        committed: CommittedSpanRound
        if method.is_whole:
            for proposer in self._proposers:
                proposer.keeps_logits = partial(self._keeps_logits, proposer.member_index)
            turns = AnswerTurns(self.members, self._proposers, prefetchers, self._keeps_logits)
            committed = AnswerRound(**parts, turns=turns, keeps_logits=self._keeps_logits)
        else:
            self.likely_nodes = [prefetcher.add_likely_nodes for prefetcher in prefetchers]
            committed = CommittedSpanRound(**parts, turns=MemberTurns(self.members, self._proposers, prefetchers))
        return CertaintyGate(self.members, self._proposers[0], self.strategies, committed)

    def _keeps_logits(self, member_index: int, prompt_index: int) -> bool:
        """Whether the logits after the tokens of whole answers are needed once they have been read: by draws, by rounds
        in which the members write an answer together, by methods or callers that ask for them."""
        prompt = self.prompts[prompt_index]
        is_needed = self.strategies[0].needs_logits or bool(self._joint_methods) or prompt.sampling is not None
        return is_needed or prompt.keeps_logits or not self.members[member_index].can_forget

    def _make_joint_round(self) -> SpanRound | None:
        """The round by which members write one answer together, ranked with each member's own answer."""
        if not self._joint_methods:
            return None
        selector = self._make_selector(self._joint_methods, self._new_weights())
        method = self._joint_methods[0]
        return SpanRound(self.members, self._make_proposers(method), selector, method.needs_logits)

    def _make_selector(self, strategies: Sequence[SpanStrategy], weights: PromptWeights) -> Selector:
        return Selector([member.vocabulary for member in self.members], strategies, self._splitter, weights)

    def _make_proposers(self, method: SpanStrategy) -> list[Proposer]:
        return [method.make_proposer(index, self.members, self._splitter) for index in range(len(self.members))]

    def _add_joint_method(self, strategy: Any) -> None:
        method = strategy.draft_method() if strategy.round_kind == RoundKind.SPAN else None
        if method is not None:
            self._joint_methods.append(method)

    def _new_weights(self) -> PromptWeights:
        return PromptWeights(self.config, self.prompt_evidence, len(self.members))

    def _answer_stops(self) -> AnswerStops:
        return AnswerStops(self.members[0].vocabulary, self.prompts, self.should_stop)

    def _numbers(self, prompt_index: int) -> Any:
        """The random numbers of a prompt."""
        sampling = self.prompts[prompt_index].sampling
        assert sampling is not None
        return sampling.numbers
