"""The method `words`: the members' proposals are compared word by word, by a mean of the members' probabilities of each
word. The preset `robust` uses it, with options of its own. It is this project's own.

The words of all candidates make a trie. At each level of the trie the word of the largest mean probability is taken,
and the candidates that have another word there are out. A word that every member writes greedily is taken at once. So
copies of one model write the model's greedy text. If the members proposing a longer span weigh less than those whose
spans end here, the round ends here. The next word would be a choice among the longer spans alone.

A member that begins with less than a twentieth of the largest weight is not asked. One whose weight falls below that
later has no say in what every member writes. So a main model that begins with more than twenty times the weight of any
other member writes its greedy text, in as many passes as alone.

In the trie a line break before a word is a word of its own. Whether a line ends is one question, and what the next line
begins with another: a break would otherwise lose to a comma for all the words that may follow it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..scored_spans import Choice, ScoredSpan
from ..scoring import first_lowest
from .adaptive_spans import AdaptiveSpans, lowest_by_margin
from .strategy import check_choice, check_switch
from .word_parts import distinct_log_probs, uncontested_share

# The means of probabilities as power means (sum w p^a)^(1 / a); the geometric one is the limit.
_EXPONENTS = {"arithmetic": 1.0, "root": 0.5, "geometric": 0.0}
PARTS = ("whole", "distinct", "weighted")
# A member that counts less than this share of the one that counts most has no say; if it begins so, it is not asked.
_LEAST_WEIGHT = 0.05


def members_that_count(weights: Sequence[float]) -> list[int]:
    """The numbers of the members whose share of the largest weight is not too small to ask them."""
    return [k for k, weight in enumerate(weights) if weight >= _LEAST_WEIGHT * max(weights)]


@dataclass
class Words(AdaptiveSpans):
    """
    Members propose as in AdaFuse. Their candidates are compared word by word.

    Args:
        mean (`str`, *optional*, defaults to `"arithmetic"`): the mean of the members' probabilities of a word by which
            words are compared. `"arithmetic"`, sum w p: a mixture, in which one member that knows the word suffices.
            `"geometric"`, prod p^w: a product of experts, in which one member that finds the word unlikely suffices to
            reject it. `"root"`, (sum w p^0.5)^2: between the two.
        part (`str`, *optional*, defaults to `"whole"`): how much of a word a member judges it by. `"whole"`: the
            probability of all its tokens. `"distinct"`: of what sets it apart from the other words at its place. A word
            of many tokens then does not pay for those that nobody contests. `"weighted"` mixes both: whole words when
            members have equal weight, distinct parts when one member has all the weight. With equal weights whole words
            say more of what the members know, since a first token alone, like a quotation mark, may be habit. Scores in
            a trace are always those of whole words.
        allow_blank (`bool`, *optional*, defaults to `True`): whether a text that ends at once, or begins with a line
            break, wins as any word does. `False`: it wins only where all members that count (at least half as much as
            the one that counts most) find that likeliest, or where it is the main model's own word, kept by
            `switch_margin` or `certainty_gate`.
            A single member's habit does not leave a text empty then.
    """

    highest_wins = True
    mean: str = "arithmetic"
    part: str = "whole"
    allow_blank: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("mean", self.mean, tuple(_EXPONENTS))
        check_choice("part", self.part, PARTS)
        check_switch("allow_blank", self.allow_blank)

    @property
    def criterion(self) -> str:  # type: ignore[override]
        return {"arithmetic": "", "root": "root ", "geometric": "geometric "}[self.mean] + "mean probability"

    @property
    def needs_tokens(self) -> bool:  # type: ignore[override]
        return self.part != "whole"

    def asked_members(self, weights: Sequence[float]) -> list[int]:
        """The members that count; and the main model where its own words are to be kept by `switch_margin`."""
        counts = members_that_count(weights)
        return counts if self.config.switch_margin == 0 else sorted({0, *counts})

    def units(self, words: Sequence[str]) -> list[str]:
        """Line breaks before words are apart: `"\\n\\nThe"` is `"\\n\\n"` and `"The"`."""
        ends = [word[: len(word) - len(word.lstrip())].rfind("\n") + 1 for word in words]
        return [part for word, end in zip(words, ends, strict=True) for part in (word[:end], word[end:]) if part]

    def choose(self, candidates: Sequence[ScoredSpan], weights: Sequence[float], main_index: int | None) -> Choice:
        possible = [index for index, span in enumerate(candidates) if span.is_possible]
        main_index = main_index if main_index in possible else None
        trie = WordTrie(candidates, weights, self.mean, self.part, self.config.switch_margin)
        scores = [trie.score(index) if index in possible else math.inf for index in range(len(candidates))]
        kept = main_index if self.config.switch_margin > 0 else None
        left = possible if self.allow_blank or not possible else trie.drop_blank(possible, kept)
        notes = {index: "it is blank, and not all members want that" for index in possible if index not in left}
        winner = trie.descend(left, main_index) if left else None
        return Choice(winner, self.nlls(candidates, len(weights)), scores, trie.decided_by, notes | trie.notes)


class WordTrie:
    """
    The words of the candidates as a trie, each with its log-probability under every member.

    Args:
        spans (`list[ScoredSpan]`): the candidates.
        weights (`list[float]`): how much each member counts.
        mean (`str`), part (`str`): the options of [`Words`].
        margin (`float`): in nats, by how much the main model's own words must lose to be left.
    """

    def __init__(
        self, spans: Sequence[ScoredSpan], weights: Sequence[float], mean: str, part: str, margin: float
    ) -> None:
        self._spans = spans
        self._weights = weights
        self._exponent = _EXPONENTS[mean]
        self._margin = margin
        self._share = {"whole": 1.0, "distinct": 0.0, "weighted": uncontested_share(weights)}[part]
        counts = members_that_count(weights)
        self._members = {k for span in spans if span.is_possible for k in span.first_choice_of if k in counts}
        # What `descend` has compared: per candidate, the mean probability of each of its words.
        self.decided_by: list[list[float]] = [[] for _ in spans]
        self.notes: dict[int, str] = {}

    def drop_blank(self, candidates: list[int], kept: int | None) -> list[int]:
        """The candidates but for those that begin with nothing, where a member that counts would rather say something;
        `kept` stays."""
        candidates = self._agreed(candidates, 0)
        first = list(self._first_of_each(candidates, 0).values())
        log_probs = self._log_probs(first, 0)
        for k, weight in enumerate(self._weights):
            # A member may have no token of a word, and one of the end after it.
            scored = [i for i, index in enumerate(first) if any(self._spans[index].log_probs[k][:1])]
            if scored and weight >= max(self._weights) / 2:
                likeliest = scored[first_lowest([-(log_probs[i][k] or 0.0) for i in scored])]
                if not self._spans[first[likeliest]].is_blank:
                    return [index for index in candidates if index == kept or not self._spans[index].is_blank]
        return candidates

    def descend(self, candidates: list[int], main_index: int | None) -> int:
        """From level to level, keep the candidates with the best next word, until one is left that none goes beyond, or
        beyond which those go that count less."""
        level = 0
        while True:
            longer = [index for index in candidates if len(self._spans[index].words) > level]
            # What others would go on with stands against no word of the main model's: it is to propose one first.
            if main_index is not None and main_index in candidates and main_index not in longer and self._margin > 0:
                return main_index
            ended = [index for index in candidates if index not in longer]
            if not longer or (ended and self._weight(longer) < self._weight(ended)):
                self.notes |= dict.fromkeys(longer, "it goes on, for members that count less")
                return ended[0]
            longer = self._agreed(longer, level)
            first = self._first_of_each(longer, level)
            values = [-self._fused(log_probs) for log_probs in self._log_probs(list(first.values()), level)]
            words = list(first)
            for index in longer:
                value = values[words.index(self._spans[index].words[level])]
                self.decided_by[index].append(math.exp(-value))
            kept = words.index(self._spans[main_index].words[level]) if main_index in longer else None
            chosen = words[lowest_by_margin(values, kept, self._margin) or 0]
            candidates = [index for index in longer if self._spans[index].words[level] == chosen]
            level += 1

    def _agreed(self, candidates: list[int], level: int) -> list[int]:
        """The candidates with the word that every member that counts writes greedily; all where these differ."""
        greedy = [self._spans[index] for index in candidates if self._members & {*self._spans[index].first_choice_of}]
        words = {span.words[level] for span in greedy}
        if len(words) != 1 or not self._members <= {k for span in greedy for k in span.first_choice_of}:
            return candidates
        agreed = [index for index in candidates if self._spans[index].words[level] in words]
        self.notes |= dict.fromkeys(set(candidates) - set(agreed), "every member that counts writes another word")
        return agreed

    def score(self, index: int) -> float:
        """Minus the fused log-probability of all words of a candidate, each as a whole."""
        span = self._spans[index]
        members = range(len(self._weights))
        levels = ([span.word_log_prob(k, level) for k in members] for level in range(len(span.words)))
        return -math.fsum(map(self._fused, levels))

    def _weight(self, candidates: Sequence[int]) -> float:
        """The sum of the weights of the members that have proposed one of these candidates."""
        return math.fsum(self._weights[k] for k in {k for index in candidates for k in self._spans[index].proposers})

    def _first_of_each(self, candidates: Sequence[int], level: int) -> dict[str, int]:
        """The words at a level, each with the first candidate that has it: the one by which it is judged."""
        first: dict[str, int] = {}
        for index in candidates:
            first.setdefault(self._spans[index].words[level], index)
        return first

    def _log_probs(self, candidates: Sequence[int], level: int) -> list[list[float | None]]:
        """Per candidate, each with another word, the log-probabilities of the word under the members."""
        spans = [self._spans[index] for index in candidates]
        members = range(len(self._weights))
        found = [[span.word_log_prob(k, level) for k in members] for span in spans]
        if self._share == 1 or len(spans) == 1:
            return found
        for k in members:
            scored = [(span, of_word) for span, of_word in zip(spans, found, strict=True) if of_word[k] is not None]
            tokens = [span.tokens[k][level] for span, _ in scored]
            log_probs = [span.log_probs[k][level] for span, _ in scored]
            for (_, of_word), distinct in zip(scored, distinct_log_probs(tokens, log_probs), strict=True):
                of_word[k] = distinct + self._share * ((of_word[k] or 0.0) - distinct)
        return found

    def _fused(self, log_probs: Sequence[float | None]) -> float:
        """The logarithm of the weighted mean, of the kind `mean`, of the members' probabilities of a word."""
        pairs = zip(self._weights, log_probs, strict=True)
        scored = [(weight, value) for weight, value in pairs if value is not None]
        total = math.fsum(weight for weight, _ in scored)
        exponent = self._exponent
        if exponent == 0:
            return math.fsum(weight * value for weight, value in scored) / total
        largest = max(value for _, value in scored)  # taken out first: probabilities of long words are tiny
        mean = math.fsum(weight * math.exp(exponent * (value - largest)) for weight, value in scored) / total
        return largest + math.log(mean) / exponent
