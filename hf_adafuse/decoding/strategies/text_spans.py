"""Sentences and paragraphs as the unit: the words of AdaFuse replaced by larger spans."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...members.member import Member
from ..proposer import Proposer
from ..scored_spans import Choice, ScoredSpan
from ..scoring import fused_score
from ..word_splitter import WordSplitter, icu_breaker, segments
from .drafting import TextUnits
from .strategy import SpanStrategy, check_choice, check_number, lowest

UNITS = ("word", "sentence", "paragraph")
MERGES = ("weighted", "confidence")
_SENTENCES = ("SentenceBreaker", 'unit="sentence"')


@dataclass
class TextSpans(SpanStrategy):
    """
    Each round every member proposes greedy text to the end of a unit, and the candidate of the lowest fused NLL is
    committed: sum_k v_k NLL_k / sum_k v_k.

    Args:
        unit (`str`, *optional*, defaults to `"sentence"`): the unit that a member proposes. `"word"`: one word.
            `"sentence"`: up to the end of a sentence by UAX #29 (needs the `unicode` extra), or to a line break.
            `"paragraph"`: up to a line break.
        merge (`str`, *optional*, defaults to `"weighted"`): how members count. `"weighted"`: v_k = w_k, by their
            weights. `"confidence"`: v_k = w_k exp(-NLL_k of the text that member k proposes), by their mean confidence
            in their own text too (geometric, per token).
        num_words (`int`, *optional*, defaults to 64): a unit also ends after this many words.
    """

    request_options = ("unit", "merge")
    num_words: int = 64
    unit: str = "sentence"
    merge: str = "weighted"

    def __post_init__(self) -> None:
        check_number("num_words", self.num_words, 1, is_integer=True)
        check_choice("unit", self.unit, UNITS)
        check_choice("merge", self.merge, MERGES)
        if self.unit == "sentence":
            icu_breaker(*_SENTENCES)

    def make_proposer(self, member_index: int, members: Sequence[Member], splitter: WordSplitter) -> Proposer:
        is_unit = {"word": _is_word, "sentence": ends_sentence, "paragraph": _ends_paragraph}[self.unit]
        settings = self.greedy_settings()
        return TextUnits(member_index, members[member_index], settings, splitter, is_unit, self.num_words)

    def choose(self, candidates: Sequence[ScoredSpan], weights: Sequence[float], main_index: int | None) -> Choice:
        nlls = self.nlls(candidates, len(weights))
        if self.merge == "confidence":
            weights = [weight * self._confidence(k, candidates, nlls) for k, weight in enumerate(weights)]
        return lowest(candidates, nlls, [fused_score(of_one, weights) for of_one in nlls])

    def _confidence(self, member_index: int, candidates: Sequence[ScoredSpan], nlls: list[list[float | None]]) -> float:
        """Of a member in its own proposal; that of a member whose proposal has left the pool is a fair coin's."""
        for candidate, of_one in zip(candidates, nlls, strict=True):
            nll = of_one[member_index]
            if member_index in candidate.proposers and nll is not None:
                return max(math.exp(-nll), 1e-300)
        return 0.5


def ends_sentence(text: str, following: str) -> bool:
    """Whether a sentence ends after `text`, before `following`, by UAX #29, or at a line break."""
    if _ends_paragraph(text, following):
        return True
    ends = itertools.accumulate(len(segment) for segment in segments(text + following, *_SENTENCES))
    # The space between two sentences belongs to the first by the rules, and to the next word here.
    gap = len(text) + len(following) - len(following.lstrip())
    return any(len(text) <= end <= gap for end in ends if end < len(text + following))


def _ends_paragraph(text: str, following: str) -> bool:
    space = following[: len(following) - len(following.lstrip())]
    return "\n" in space or "\n" in text[len(text.rstrip()) :]


def _is_word(text: str, following: str) -> bool:
    return True
