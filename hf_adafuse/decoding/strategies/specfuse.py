"""SpecFuse (and SpecEM, its later form): segments of a few tokens, chosen by the verifiers' normalised scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...members.member import Member
from ..proposer import Proposer
from ..scored_spans import Choice, ScoredSpan
from ..word_splitter import WordSplitter
from .drafting import TokenSegments
from .strategy import SampledPart, SpanStrategy, check_choice, check_number, lowest

SCORES = ("probability", "logit")


@dataclass
class SpecFuse(SpanStrategy):
    """
    Each round every member drafts `num_tokens` tokens, greedy or sampled, cut at the end of a word; every member j
    verifies every draft i: S[j, i] = the mean over its tokens of the probability that j gives them, divided by the sum
    of the absolute values of its row. The draft of the largest sum_j w_j S[j, i] is committed.

    With a `learning_rate` the weights learn (Hedge): in round t, w_i is multiplied by exp(rate * sqrt(1 / K) / t *
    r_i), where r_i is the number of pairs of others (j, k) with S[j, i] >= S[j, k], at least 1, over (K - 1)^2.

    A draft that ends the text is scored with its end, by logits that of its likeliest end-of-sequence token.

    Sources: SpecFuse for the probabilities (there without the row's sum, by which verifiers count alike here; and a
    member that is hardly ever chosen leaves, which none does here), SpecEM's code for Hedge and `score="logit"` (the
    mean raw logit of the tokens). That code divides logits by the plain sum of the row. Where all means of a row are
    positive, this is the same. Where they are negative, the plain sum turns the order around: of the mean logits -1
    and -9 it takes -9. Here -1 wins. The released code always samples drafts: `do_sample=True,
    temperature=0.6, top_p=0.9` does here. It drops what follows the last character that is no letter or digit, also
    where the word is complete; writes " ." where nothing is left; and leaves out Hedge by default.

    Args:
        num_tokens (`int`, *optional*, defaults to 10): the most tokens of a draft. Its first word is always whole.
        score (`str`, *optional*, defaults to `"probability"`): by what verifiers score a draft: the mean
            `"probability"` or the mean `"logit"` of its tokens.
        learning_rate (`float`, *optional*): how quickly weights learn. `None`: they stay as they are.
    """

    samples = SampledPart.DRAFTS
    request_options = ("score",)
    criterion, highest_wins = "verifiers' score", True
    num_words: int = field(default=1, init=False)
    num_tokens: int = 10
    score: str = "probability"
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        check_number("num_tokens", self.num_tokens, 1, is_integer=True)
        check_choice("score", self.score, SCORES)
        if self.learning_rate is not None:
            check_number("learning_rate", self.learning_rate, 0)
        self.needs_logits = self.score == "logit"
        self._logs: list[float] = []  # of the weights so far
        self._round = 0

    def make_proposer(self, member_index: int, members: Sequence[Member], splitter: WordSplitter) -> Proposer:
        return TokenSegments(member_index, members[member_index], self.greedy_settings(), splitter, self.num_tokens)

    def choose(self, candidates: Sequence[ScoredSpan], weights: Sequence[float], main_index: int | None) -> Choice:
        table = [self._row(candidates, member) for member in range(len(weights))]
        weights = self._learned(table, candidates, weights)
        total = math.fsum(weights)
        sums = [
            math.fsum(weight * row[index] for weight, row in zip(weights, table, strict=True)) / total
            for index in range(len(candidates))
        ]
        choice = lowest(candidates, self.nlls(candidates, len(weights)), [-value for value in sums])
        return replace(choice, decided_by=[[value] for value in sums], weights=weights)

    def _row(self, candidates: Sequence[ScoredSpan], member_index: int) -> list[float]:
        """The scores that one member gives all candidates: row j of the matrix S. A candidate that it cannot score, or
        that is forbidden, gets the lowest value of the row, at most 0."""
        means = [self._mean(candidate, member_index) if candidate.is_possible else None for candidate in candidates]
        known = [mean for mean in means if mean is not None]
        total = math.fsum(map(abs, known)) or 1.0
        lowest_mean = min([0.0, *known])
        return [(lowest_mean if mean is None else mean) / total for mean in means]

    def _mean(self, candidate: ScoredSpan, member_index: int) -> float | None:
        if self.score == "logit":
            values = candidate.logits[member_index]
        else:
            values = [math.exp(value) for word in candidate.log_probs[member_index] for value in word]
        return math.fsum(values) / len(values) if values else None

    def _learned(
        self, table: list[list[float]], candidates: Sequence[ScoredSpan], weights: Sequence[float]
    ) -> list[float]:
        """The weights after this round's rewards."""
        self._round += 1
        count = len(weights)
        if self.learning_rate is None or count < 2:
            return list(weights)
        logs = self._logs or [math.log(weight) for weight in weights]
        drafts = [next((i for i, one in enumerate(candidates) if k in one.proposers), None) for k in range(count)]
        rate = self.learning_rate * math.sqrt(1 / count) / self._round
        logs = [log + rate * _reward(table, drafts, k) for k, log in enumerate(logs)]
        self._logs = [log - max(logs) for log in logs]
        return [math.exp(log) for log in self._logs]


def _reward(table: list[list[float]], drafts: Sequence[int | None], member_index: int) -> float:
    """How often others like a member's draft at least as well as another's, in shares of all pairs of others."""
    others = [k for k in range(len(drafts)) if k != member_index]
    mine = drafts[member_index]
    pairs = ((table[j][mine], drafts[k], table[j]) for j in others for k in others) if mine is not None else ()
    count = sum(value >= (min([0.0, *row]) if draft is None else row[draft]) for value, draft, row in pairs)
    return max(count, 1) / len(others) ** 2
