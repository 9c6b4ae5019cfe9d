"""CoSD (arXiv 2502.08020) by words: the main model writes; a rule says where another member's word replaces its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...members.member import Member
from ...outputs import AdaFuseRound
from ...trees.nodes import Node
from ..proposer import GrowingWord, Proposal, Proposer
from ..requests import Requests
from ..scored_spans import Choice, ScoredSpan
from ..scoring import first_lowest
from ..word_splitter import WordSplitter
from .strategy import ALONE, SpanStrategy, check_number

# The logarithm of a `beta` of 0 (nats): below that of every word's probability, and finite.
_LOG_OF_NOTHING = -1e6


@dataclass
class Anchor(SpanStrategy):
    """
    The main model writes word by word, greedily. Its word stays where it gives the word a probability of at least
    `alpha`: then the other members are not asked, and read the text later. Below `alpha` every other member k proposes
    its own greedy word. The main model's word is replaced by one that differs from it where w_k p_k > beta w_0 p_0:
    p_k is the probability that member k gives its own word, p_0 that of the main model's word under the main model, w
    are the members' weights. Of several such words the one of the largest w_k p_k is committed. The probability of a
    word is the product over its proposer's tokens. The end of the text is a word too.

    So `alpha=0` is the main model alone, and the main model's quality bounds what can be lost: only words of which it
    is unsure can be replaced. `stats` counts `words` that were committed, `asked`: of those, the words at which the
    other members were asked, and `overruled`: the words that were not the main model's.

    Source: the paper's rule (CoSD-Rule), which compares tokens of two models; its values are `alpha=beta=0.5`. The
    released code was read. It differs from the paper: it compares both models' probabilities of the same token, that of
    the draft, and keeps the draft where the assistant gives it less than 0.5; it skips tokens on which both agree; and
    it maps no vocabulary to another. There a draft of several tokens is verified in one pass, and the rest of it is
    dropped after a replacement. Here words below `alpha` are found as they are written, which gives the same text.

    Args:
        alpha (`float`, *optional*, defaults to 0.5): from 0 to 1. A word that the main model gives this probability or
            more is kept.
        beta (`float`, *optional*, defaults to 0.5): at least 0. A word below `alpha` is replaced where another member,
            by its weight, gives its own word more than `beta` times the main model's probability. With 0 every word
            below `alpha` is replaced.
        num_words (`int`, *optional*, defaults to 4): the most words that the main model commits at a time without the
            others.
    """

    criterion, highest_wins = "proposer's probability", True
    num_words: int = 4
    alpha: float = 0.5
    beta: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("alpha", self.alpha, 0, 1)
        check_number("beta", self.beta, 0)

    def make_proposer(self, member_index: int, members: Sequence[Member], splitter: WordSplitter) -> Proposer:
        return Proposer(member_index, members[member_index], self.greedy_settings(), splitter)

    def propose_alone(self, main: Proposer, root: Node) -> Requests[Proposal | None]:
        words = list[GrowingWord]()
        node = root
        while len(words) < self.num_words and main.has_room(node):
            word = yield from main.greedy_word(node)
            log_probs = yield from main.log_probs(root, [*words, word])
            if not self._is_sure(math.fsum(log_probs[sum(len(one.nodes) for one in words) :])):
                break
            words.append(word)
            if word.ends:
                break
            node = word.nodes[-1]
        return main.proposal(words) if words else None

    def choose(self, candidates: Sequence[ScoredSpan], weights: Sequence[float], main_index: int | None) -> Choice:
        nlls = self.nlls(candidates, len(weights))
        if main_index is not None and not candidates[main_index].is_possible:
            main_index = None
        scores = [
            -self._strength(candidate, weights) if index != main_index and candidate.is_possible else math.inf
            for index, candidate in enumerate(candidates)
        ]
        notes: dict[int, str] = {}
        if main_index is not None:
            log_prob = _log_prob(candidates[main_index], 0)
            if self._is_sure(log_prob):
                scores[main_index] = min(-log_prob, *scores)
                notes[main_index] = f"the main model gives its own word alpha = {self.alpha:g} or more"
            else:
                scores[main_index] = -(log_prob + (math.log(self.beta) if self.beta else _LOG_OF_NOTHING))
                notes[main_index] = f"the main model's own word: beta = {self.beta:g} times its probability"
        if not scores or min(scores) == math.inf:
            return Choice(None, nlls, scores)
        # Of equals the main model's word is the first: candidates come in the order of their proposers.
        return Choice(first_lowest(scores), nlls, scores, [[math.exp(-score)] for score in scores], notes)

    def counts(self, rounds: Sequence[AdaFuseRound]) -> dict[str, int]:
        asked = [one for one in rounds if one.criterion != ALONE]
        return {
            "words": sum(len(one.words) + one.ends for one in rounds),
            "asked": sum(len(one.words) + one.ends for one in asked),
            "overruled": sum(len(one.words) + one.ends for one in asked if one.proposer != 0),
        }

    def _is_sure(self, log_prob: float) -> bool:
        """Whether the main model keeps a word to which it gives this log-probability (nats)."""
        return self.alpha == 0 or log_prob >= math.log(self.alpha)

    def _strength(self, candidate: ScoredSpan, weights: Sequence[float]) -> float:
        """The largest log (w_k p_k / w_0) over the members that proposed a candidate."""
        return max(
            math.log(weights[k]) - math.log(weights[0]) + _log_prob(candidate, k) for k in set(candidate.proposers)
        )


def _log_prob(candidate: ScoredSpan, member_index: int) -> float:
    """Of a candidate under one member, in nats."""
    return math.fsum(value for word in candidate.log_probs[member_index] for value in word)
