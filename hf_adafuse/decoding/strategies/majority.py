"""Majority voting over whole answers, and other choices among them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...confidence.answer_text import normalized_answer
from ...members.member import Member
from ..proposer import Proposer
from ..scored_spans import Choice, ScoredSpan
from ..scoring import first_lowest, fused_score
from ..word_splitter import WordSplitter
from .drafting import AnswerProposer
from .strategy import SampledPart, SpanStrategy, check_number


@dataclass
class WholeAnswers(SpanStrategy):
    """
    Every member answers alone to the end, greedily or sampled; the answer of the lowest fused NLL is taken (reranking).

    Args:
        num_samples (`int`, *optional*, defaults to 1): how many answers each member draws, with `do_sample=True`.
    """

    is_whole = True
    samples = SampledPart.DRAFTS
    num_words: int = field(default=1, init=False)
    num_samples: int = 1

    def __post_init__(self) -> None:
        check_number("num_samples", self.num_samples, 1, is_integer=True)

    def make_proposer(self, member_index: int, members: Sequence[Member], splitter: WordSplitter) -> Proposer:
        return AnswerProposer(member_index, members[member_index], self.greedy_settings(), splitter, self.num_samples)


@dataclass
class Majority(WholeAnswers):
    """
    Every member answers alone, greedily or sampled; it gives its weight to what its answer says (of `num_samples`, a
    share to each), and of the answers that say what most weight says, the one of the lowest fused NLL is taken. So a
    tie goes to the lower NLL too.

    Args:
        num_samples (`int`, *optional*, defaults to 1): how many answers each member draws, with `do_sample=True`
            (self-consistency, arXiv 2203.11171).
        pattern (`str`, *optional*): a regular expression. Answers are compared by its last match in them that has a
            text; where it has groups, by the first of the match that has one. Without a pattern, or without such a
            match, they are compared by their whole text. Case, spaces and punctuation at the ends do not count.
    """

    criterion, highest_wins = "share of votes", True
    pattern: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self._pattern = None if self.pattern is None else re.compile(self.pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"`pattern` must be a regular expression, but is {self.pattern!r}: {error}. Correct it."
            ) from None

    def choose(self, candidates: Sequence[ScoredSpan], weights: Sequence[float], main_index: int | None) -> Choice:
        nlls = self.nlls(candidates, len(weights))
        said = [self._says(self.answer_in(candidate.text)) for candidate in candidates]
        votes = dict.fromkeys(said, 0.0)
        for candidate, answer in zip(candidates, said, strict=True):
            if candidate.is_possible:
                votes[answer] += sum(weights[k] for k in candidate.proposers)
        possible = [index for index, candidate in enumerate(candidates) if candidate.is_possible]
        scores = [-votes[answer] / (sum(weights) * self.num_samples) for answer in said]
        if not possible:
            return Choice(None, nlls, scores)
        most = min(scores[index] for index in possible)
        first = [index for index in possible if scores[index] <= most + 1e-9]
        best = first_lowest([fused_score(nlls[index], weights) for index in first])
        shares = [[-score] for score in scores]
        notes = {index: "as many votes, but a higher fused NLL" for index in first if index != first[best]}
        return Choice(first[best], nlls, scores, shares, notes)

    def _says(self, text: str) -> str:
        matches = [] if self._pattern is None else self._pattern.finditer(text)
        found = [next(filter(None, match.groups() or [match.group()]), None) for match in matches]
        return normalized_answer(next(filter(None, reversed(found)), text))
