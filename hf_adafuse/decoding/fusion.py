"""The rules by which a round's candidates are fused into one choice. Pure functions over the log-probabilities that the
round has computed anyway; they know no member, text rule or tensor.

| `fusion` | score of a candidate (lowest wins), or how it is found | source |
|---|---|---|
| `span` | weighted mean over members of sum NLL / length^a, a = 1: mean NLL per token | AdaFuse, equations 4 and 5 |
| `horizon` | the same over the first h words, h those of the shortest candidate | this project |
| `word` | in the trie of the candidates' words, level by level the word of largest mean probability | this project |

Members propose spans of different lengths. Where those that go on with a word count less than those whose spans end
there, the round ends there too: the next word would be one of theirs alone, whatever the others think of it.

In the trie a line break before a word is a word of its own: whether a line ends is one question, what the next one
begins with another, and a break would else lose to a comma for all the words that may follow it. At the beginning of a
text a break, or the end, says nothing; with `empty_text="all"` a single member's habit does not give that for all.

A word's probability under a member is that of all its tokens; with `word_part="distinct"`, of what sets it apart from
the other words of its level ([`distinct_log_probs`]): for tokens that nobody contests a word of many does not pay, and
a member that counts alone takes the word that it goes on with greedily. Where all count alike, whole words say more of
what a member knows (to be sure of a first token may be habit, as of a quotation mark): `"weighted"` takes one for the
other as far as the weight is one member's. Scores are always those of whole words.

The mean probability of a word is arithmetic, sum w p (a mixture: one member that knows the word suffices), geometric,
prod p^w (a product of experts: one that finds it unlikely suffices to reject it), or between the two, (sum w p^0.5)^2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..config import AdaFuseConfig
from .scoring import first_lowest, fused_score
from .word_parts import distinct_log_probs, share_of_rest

# What follows the last word of a candidate that ends the sequence: a word of its own, unlike any that has text.
END = ""
# The means of probabilities as power means (sum w p^a)^(1 / a); the geometric one is the limit.
_EXPONENTS = {"arithmetic": 1.0, "root": 0.5, "geometric": 0.0}


def units(words: Sequence[str], config: AdaFuseConfig) -> list[str]:
    """What is compared of a text of these words: they themselves; in a trie, line breaks before them apart."""
    if config.fusion != "word":
        return list(words)
    ends = [word[: len(word) - len(word.lstrip())].rfind("\n") + 1 for word in words]
    return [part for word, end in zip(words, ends, strict=True) for part in (word[:end], word[end:]) if part]


@dataclass(frozen=True)
class ScoredSpan:
    """
    A candidate as fusion sees it.

    Args:
        words (`tuple[str]`): of its text, `END` among them.
        log_probs (`list[list[list[float]]]`): per member and word, the log-probabilities (nats) of the member's own
            tokens that begin in the word; empty for a member that has nothing to score.
        num_bytes (`list[int]`): per word, its UTF-8 bytes; `END` counts as one.
        proposers (`tuple[int]`): the members that proposed it, each as often as it did.
        logits (`list[list[float]]`): per member, the logits of its own tokens, where a method asks for them.
        tokens (`list[list[list[int]]]`): the tokens of `log_probs`, that of `END` below 0; not needed for whole words.
        is_first (`bool`): the text begins with it.
        ratings (`list[float]`): each member's rating of it, where members rate; `None`: that member gives none.
    """

    words: tuple[str, ...]
    log_probs: list[list[list[float]]]
    num_bytes: list[int]
    proposers: tuple[int, ...] = ()
    logits: list[list[float]] = field(default_factory=list)
    tokens: list[list[list[int]]] = field(default_factory=list)
    is_first: bool = False
    ratings: Sequence[float | None] = ()

    @property
    def text(self) -> str:
        """Its text; the end of the sequence has none."""
        return "".join(self.words)

    @property
    def is_possible(self) -> bool:
        """Whether no member's processors forbid a token of it, and one member at least can score it."""
        values = [value for member in self.log_probs for word in member for value in word]
        return bool(values) and -math.inf not in values

    @property
    def says_nothing(self) -> bool:
        """Whether it begins a text with a line break, or ends it at once."""
        return self.is_first and not self.words[0].strip()

    def word_log_prob(self, member_index: int, level: int) -> float | None:
        """The log-probability of a word: the sum over its tokens; `None` for a member that has nothing to score."""
        words = self.log_probs[member_index]
        return math.fsum(words[level]) if words else None


@dataclass(frozen=True)
class Choice:
    """
    What a rule says.

    Args:
        winner (`int`, *optional*): the index of the candidate; `None` where none is possible.
        nlls (`list[list[float]]`): per candidate and member, its NLL; `None` where there is nothing to score.
        scores (`list[float]`): per candidate, the fused score.
        decided_by (`list[list[float]]`, *optional*): per candidate, the quantities by which it was compared with the
            others, as the trace shows them; by default its score.
        notes (`dict[int, str]`, *optional*): what else decided, by candidate.
        weights (`list[float]`, *optional*): of the members, where the rule had others than it was given.
        features (`dict[int, list[float]]`, *optional*): the numbers by which it judged, by candidate; `None` where one
            is not known.
        confidences (`dict[int, float]`, *optional*): by candidate, the probability that the answer is right.
    """

    winner: int | None
    nlls: list[list[float | None]]
    scores: list[float]
    decided_by: list[list[float]] = field(default_factory=list)
    notes: Mapping[int, str] = field(default_factory=dict)
    weights: Sequence[float] | None = None
    features: Mapping[int, Sequence[float | None]] = field(default_factory=dict)
    confidences: Mapping[int, float] = field(default_factory=dict)


def choose(
    spans: Sequence[ScoredSpan], weights: Sequence[float], config: AdaFuseConfig, own: int | None = None
) -> Choice:
    """
    Choose a candidate.

    Args:
        spans (`list[ScoredSpan]`): in the order in which ties are broken.
        weights (`list[float]`): of the members.
        config (`AdaFuseConfig`): its `fusion`, and what belongs to it.
        own (`int`, *optional*): the main model's own best candidate, which is left only where another one wins by more
            than `switch_margin`.
    """
    possible = [index for index, span in enumerate(spans) if span.is_possible]
    horizon = min((len(spans[index].words) for index in possible), default=0)
    num_words = horizon if config.fusion == "horizon" else None
    nlls = [[mean_nll(span, member, config, num_words) for member in range(len(weights))] for span in spans]
    own = own if own in possible else None
    if config.fusion == "word":
        trie = _Trie(spans, weights, config)
        scores = [trie.score(index) if index in possible else math.inf for index in range(len(spans))]
        kept = own if config.switch_margin > 0 else None
        heard = trie.without_silence(possible, kept) if possible and config.empty_text == "all" else possible
        notes = {index: "it says nothing, and not all members want that" for index in possible if index not in heard}
        winner = trie.descend(heard, own) if heard else None
        return Choice(winner, nlls, scores, trie.decided_by, notes | trie.notes)
    scores = [fused_score(nlls[index], weights) if index in possible else math.inf for index in range(len(spans))]
    return Choice(_lowest(scores, own, config.switch_margin), nlls, scores)


def _lowest(scores: Sequence[float], own: int | None, margin: float) -> int | None:
    if not scores or min(scores) == math.inf:
        return None
    best = first_lowest(scores)
    is_kept = own is not None and margin > 0 and scores[own] - scores[best] <= margin
    return own if is_kept else best


def mean_nll(span: ScoredSpan, member_index: int, config: AdaFuseConfig, num_words: int | None = None) -> float | None:
    """Sum NLL / length^a, over the first words or all; the length is in tokens, or in bytes."""
    words = span.log_probs[member_index][:num_words]
    log_probs = [value for word in words for value in word]
    if not log_probs:
        return None
    length = len(log_probs) if config.nll_normalization == "token" else max(1, sum(span.num_bytes[:num_words]))
    if config.length_exponent == 1:
        return -math.fsum(log_probs) / length
    return -math.fsum(log_probs) * math.exp(-config.length_exponent * math.log(length))


class _Trie:
    """The words of the candidates as a trie, each with its log-probability under every member."""

    def __init__(self, spans: Sequence[ScoredSpan], weights: Sequence[float], config: AdaFuseConfig) -> None:
        self._spans = spans
        self._weights = weights
        self._config = config
        self._share = {"whole": 1.0, "distinct": 0.0, "weighted": share_of_rest(weights)}[config.word_part]
        # What `descend` has compared: per candidate, the mean probability of each of its words.
        self.decided_by: list[list[float]] = [[] for _ in spans]
        self.notes: dict[int, str] = {}

    def without_silence(self, candidates: list[int], kept: int | None) -> list[int]:
        """The candidates but for those that say nothing, where a member that counts would rather say something; `kept`
        stays."""
        first = list(self._first_of_each(candidates, 0).values())
        log_probs = self._log_probs(first, 0)
        for k, weight in enumerate(self._weights):
            # A member may have no token of a word, and one of the end after it.
            scored = [i for i, index in enumerate(first) if any(self._spans[index].log_probs[k][:1])]
            if scored and weight >= max(self._weights) / 2:
                likeliest = scored[first_lowest([-(log_probs[i][k] or 0.0) for i in scored])]
                if not self._spans[first[likeliest]].says_nothing:
                    return [index for index in candidates if index == kept or not self._spans[index].says_nothing]
        return candidates

    def descend(self, candidates: list[int], own: int | None) -> int:
        """From level to level, keep the candidates with the best next word, until one is left that none goes beyond, or
        beyond which those go that count less."""
        level, margin = 0, self._config.switch_margin
        while True:
            longer = [index for index in candidates if len(self._spans[index].words) > level]
            # What others would go on with stands against no word of the main model's: it is to propose one first.
            if own is not None and own in candidates and own not in longer and margin > 0:
                return own
            ended = [index for index in candidates if index not in longer]
            if not longer or (ended and self._weight(longer) < self._weight(ended)):
                self.notes |= dict.fromkeys(longer, "it goes on, for members that count less")
                return ended[0]
            first = self._first_of_each(longer, level)
            values = [-self._fused(log_probs) for log_probs in self._log_probs(list(first.values()), level)]
            words = list(first)
            for index in longer:
                value = values[words.index(self._spans[index].words[level])]
                self.decided_by[index].append(math.exp(-value))
            kept = words.index(self._spans[own].words[level]) if own in longer else None
            chosen = words[_lowest(values, kept, margin) or 0]
            candidates = [index for index in longer if self._spans[index].words[level] == chosen]
            level += 1

    def _weight(self, candidates: Sequence[int]) -> float:
        """Of the members that have proposed one of them."""
        return math.fsum(self._weights[k] for k in {k for index in candidates for k in self._spans[index].proposers})

    def score(self, index: int) -> float:
        """Minus the fused log-probability of all words of a candidate, each as a whole."""
        span = self._spans[index]
        members = range(len(self._weights))
        levels = ([span.word_log_prob(k, level) for k in members] for level in range(len(span.words)))
        return -math.fsum(map(self._fused, levels))

    def _first_of_each(self, candidates: Sequence[int], level: int) -> dict[str, int]:
        """The words at a level, each with the first candidate that has it: the one by which it is judged."""
        first: dict[str, int] = {}
        for index in candidates:
            first.setdefault(self._spans[index].words[level], index)
        return first

    def _log_probs(self, candidates: Sequence[int], level: int) -> list[list[float | None]]:
        """Per candidate, each with another word, the log-probabilities of the word under the members."""
        spans, members = [self._spans[index] for index in candidates], range(len(self._weights))
        found = [[span.word_log_prob(k, level) for k in members] for span in spans]
        if self._share == 1 or len(spans) == 1:
            return found
        for k in members:
            scored = [(span, of_word) for span, of_word in zip(spans, found, strict=True) if of_word[k] is not None]
            tokens, log_probs = [s.tokens[k][level] for s, _ in scored], [s.log_probs[k][level] for s, _ in scored]
            for (_, of_word), distinct in zip(scored, distinct_log_probs(tokens, log_probs), strict=True):
                of_word[k] = distinct + self._share * ((of_word[k] or 0.0) - distinct)
        return found

    def _fused(self, log_probs: Sequence[float | None]) -> float:
        pairs = zip(self._weights, log_probs, strict=True)
        scored = [(weight, value) for weight, value in pairs if value is not None]
        total, exponent = math.fsum(weight for weight, _ in scored), _EXPONENTS[self._config.word_mean]
        if exponent == 0:
            return math.fsum(weight * value for weight, value in scored) / total
        largest = max(value for _, value in scored)  # taken out first: probabilities of long words are tiny
        mean = math.fsum(weight * math.exp(exponent * (value - largest)) for weight, value in scored) / total
        return largest + math.log(mean) / exponent
