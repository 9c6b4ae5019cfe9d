"""Cool-Fusion (ACL 2025): the shortest segments on which all tokenizers agree, chosen by mean perplexity. No public
code; see the docstring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...members.member import Member
from ..proposer import Proposer
from ..scored_spans import Choice, ScoredSpan
from ..scoring import fused_score
from ..word_splitter import WordSplitter
from .drafting import AnswerProposer, CommonBoundaries
from .strategy import SpanStrategy, check_switch, lowest


@dataclass
class CoolFusion(SpanStrategy):
    """
    Each round every member proposes the shortest greedy run that ends at a word boundary of all tokenizers (the paper's
    aligned segments, which remove the bias of perplexity to longer ones), and the candidate of the lowest weighted mean
    perplexity over members, mean_k exp(mean NLL_k), is committed.

    Source: the abstract and a public note; how the paper tests boundaries in detail is not verified. Here a boundary is
    one of the tokenizer's own words (`word_ids`) in the text and what its author would write next.

    Args:
        rerank (`bool`, *optional*, defaults to `False`): the answer so written stands beside each member's own, and
            that of the lowest weighted mean perplexity is committed (the paper's best).
    """

    criterion = "fused perplexity"
    num_words: int = field(default=1, init=False)
    rerank: bool = False

    def __post_init__(self) -> None:
        check_switch("rerank", self.rerank)
        self.is_whole = self.rerank

    def draft_method(self) -> CoolFusion | None:
        if not self.rerank:
            return None
        method = CoolFusion()
        method.config = self.config
        return method

    def make_proposer(self, member_index: int, members: Sequence[Member], splitter: WordSplitter) -> Proposer:
        if self.rerank:
            return AnswerProposer(member_index, members[member_index], self.greedy_settings(), splitter)
        vocabularies = [member.vocabulary for member in members]
        return CommonBoundaries(member_index, members[member_index], self.greedy_settings(), splitter, vocabularies)

    def choose(self, candidates: Sequence[ScoredSpan], weights: Sequence[float], main_index: int | None) -> Choice:
        nlls = self.nlls(candidates, len(weights))
        perplexities = [[None if nll is None else math.exp(min(nll, 700.0)) for nll in of_one] for of_one in nlls]
        return lowest(candidates, nlls, [fused_score(of_one, weights) for of_one in perplexities])
