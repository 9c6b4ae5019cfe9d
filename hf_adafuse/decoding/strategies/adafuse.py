"""AdaFuse itself (arXiv 2601.06022) as one of the methods: adaptive spans, branches, and the rules of `fusion`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...members.member import Member
from ...trees.nodes import Node
from ..fusion import Choice, ScoredSpan, choose
from ..proposer import Proposal, Proposer
from ..requests import Requests
from ..words import WordRule
from .strategy import SpanStrategy


@dataclass
class AdaFuse(SpanStrategy):
    """Its options are the fields of [`AdaFuseConfig`]."""

    samples = "words"
    num_words: int = field(default=1, init=False)

    def make_proposer(self, member_index: int, members: Sequence[Member], rule: WordRule) -> Proposer:
        return Proposer(member_index, members[member_index], self.config, rule)

    def propose_alone(self, main: Proposer, root: Node) -> Requests[Proposal | None]:
        if self.config.certainty_gate is None:
            return None
        span = yield from main.propose_certain(root, self.config.certainty_gate)
        return span

    @property
    def criterion(self) -> str:  # type: ignore[override]
        if not self.highest_wins:
            return "fused NLL"
        return {"arithmetic": "", "root": "root ", "geometric": "geometric "}[
            self.config.word_mean
        ] + "mean probability"

    @property
    def highest_wins(self) -> bool:  # type: ignore[override]
        return self.config.fusion == "word"

    def choose(self, candidates: Sequence[ScoredSpan], weights: Sequence[float], own: int | None) -> Choice:
        return choose(candidates, weights, self.config, own)
