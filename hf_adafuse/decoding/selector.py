"""`Selector`: has the strategy of a prompt choose the winner of a round. It gives the strategy the candidates as words
with each member's log-probabilities, and how much each member counts. Rounds over spans call it.
"""

from __future__ import annotations

import bisect
import itertools
import math
import unicodedata
from collections.abc import Sequence
from typing import TypeVar

from ..confidence.word_confidence import word_confidences
from ..members.vocabulary import Vocabulary
from .member_weights import PromptWeights, shares
from .pool import Candidate, Pool
from .progress import Prompt
from .scored_spans import END, Choice, ScoredSpan
from .strategies.strategy import SpanStrategy
from .word_splitter import WordSplitter

T = TypeVar("T")
_END_TOKEN = -1
# In texts of more words the ends of words are not looked up in tokens, which takes time for each.
_MOST_PREFIXES = 200


class Selector:
    """
    Has the strategy of a prompt choose the winner among the candidates of a pool.

    Args:
        vocabularies (`list[Vocabulary]`): one per member, the main model's first.
        strategies (`list[SpanStrategy]`): one per prompt.
        splitter (`WordSplitter`): says where a word ends.
        weights (`PromptWeights`): how much each member counts for a prompt.
    """

    def __init__(
        self,
        vocabularies: Sequence[Vocabulary],
        strategies: Sequence[SpanStrategy],
        splitter: WordSplitter,
        weights: PromptWeights,
    ) -> None:
        self._vocabularies = vocabularies
        self._strategies = strategies
        self._splitter = splitter
        self._weights = weights

    def asked_members(self, prompt: Prompt) -> list[int]:
        """The numbers of the members that the method asks in the rounds of a prompt."""
        strategy = self._strategies[prompt.index]
        asked = list(strategy.asked_members(self._weights.of(prompt.index).initial))
        if not asked or not {*asked} <= {*range(len(self._vocabularies))}:
            raise IndexError(
                f"What {type(strategy).__name__}.asked_members gives must be numbers of {len(self._vocabularies)} "
                f"members, one at least, but is {asked}. Mend the method."
            )
        return asked

    def choose(self, prompt: Prompt, pool: Pool) -> Candidate | None:
        """The winner of a round, or `None` when every candidate is forbidden."""
        candidates = [candidate for candidate in pool.ranked() if candidate.dropped is None]
        strategy = self._strategies[prompt.index]
        is_first = not (prompt.text or prompt.continues_earlier_call)
        spans = [
            self._scored_span(strategy, candidate, is_first, pool.members_whose_best_is(candidate))
            for candidate in candidates
        ]
        best = pool.best_of(0)
        main_index = candidates.index(best) if best is not None and best in candidates else None
        weights = self._weights.of(prompt.index).weights
        choice = strategy.choose(spans, weights, main_index)
        if not isinstance(choice, Choice):
            raise TypeError(
                f"What {type(strategy).__name__}.choose gives must be a Choice (of hf_adafuse.decoding.scored_spans), "
                f"but is {choice!r}. Mend the method."
            )
        if choice.winner is not None and not 0 <= choice.winner < len(candidates):
            raise IndexError(
                f"The winner that {type(strategy).__name__}.choose gives must be the index of one of {len(candidates)} "
                f"candidates, or None, but is {choice.winner}. Mend the method."
            )
        pool.weights = shares(weights if choice.weights is None else choice.weights)
        pool.criterion = strategy.criterion
        pool.highest_wins = strategy.highest_wins
        winner = pool.record_scores(candidates, choice)
        if winner is not None:
            self._note_confidences(winner, pool.weights)
        return winner

    def fused_text(self, prompt: Prompt, pool: Pool, winner: Candidate) -> str | None:
        """What the method writes itself of the candidates that could be committed; `None`: nothing."""
        possible = [one for one in pool.ranked() if one.dropped is None and one.score < math.inf]
        possible.sort(key=lambda one: (one is not winner, one.score))  # near ties are the winner's
        strategy = self._strategies[prompt.index]
        return strategy.fuse([strategy.answer_in(one.text) for one in possible])

    def words(self, text: str) -> tuple[str, ...]:
        """The words of a text."""
        return tuple(self._splitter.split(text))

    def score_fused_text(self, prompt: Prompt, fused: Candidate) -> bool:
        """Give what the method wrote its NLLs, and the best score: it stands before all others. Where a member's
        processors forbid it, it is dropped. Returns whether it can be committed."""
        strategy = self._strategies[prompt.index]
        span = self._scored_span(strategy, fused)
        (nlls,) = strategy.nlls([span], len(self._vocabularies))
        fused.nlls = dict(enumerate(nlls))
        if span.is_possible:
            fused.score = -math.inf
            self._note_confidences(fused, self._weights.of(prompt.index).weights)
        else:
            fused.dropped = "logits processors of a member forbid it"
        return span.is_possible

    def learn(self, prompt: Prompt, winner: Candidate) -> None:
        """The winner is committed: from the next round on each member counts by how it took it."""
        members = range(len(self._vocabularies))
        scored = [winner.log_probs.get(k) for k in members]
        nlls = [-math.fsum(log_probs) if log_probs else None for log_probs in scored]
        self._weights.of(prompt.index).update(nlls, len(winner.text.encode("utf-8", "replace")) + winner.ends)

    def _note_confidences(self, candidate: Candidate, weights: Sequence[float]) -> None:
        """What is to be committed gets the confidences of its words."""
        log_probs = [candidate.log_probs.get(k, []) for k in range(len(self._vocabularies))]
        candidate.confidences = confidences_of(candidate, log_probs, self._vocabularies, weights)

    def _scored_span(
        self,
        strategy: SpanStrategy,
        candidate: Candidate,
        is_first: bool = False,
        first_choice_of: tuple[int, ...] = (),
    ) -> ScoredSpan:
        """A candidate that has been scored, as the strategy sees it: its words or other units, and which of the
        members' log-probabilities belong to each."""
        members = range(len(self._vocabularies))
        words = strategy.units(self._splitter.split(candidate.text)) if candidate.text else []
        log_probs = [
            by_word(words, candidate.ids.get(k, []), candidate.log_probs.get(k, []), one) if words else []
            for k, one in enumerate(self._vocabularies)
        ]
        tokens = self._tokens(candidate, words) if strategy.needs_tokens else []
        if candidate.ends:  # tokens without text before the end belong to it
            ends = [candidate.log_probs.get(k, [])[len(candidate.ids.get(k, [])) if words else 0 :] for k in members]
            log_probs = [[*of_words, end] for of_words, end in zip(log_probs, ends, strict=True)]
        log_probs = [of_words if any(of_words) else [] for of_words in log_probs]
        tokens = [of_words if any(of_words) else [] for of_words in tokens]
        num_bytes = [len(word.encode("utf-8", "replace")) for word in words] + [1] * candidate.ends
        return ScoredSpan(
            words=(*words, *[END] * candidate.ends),
            log_probs=log_probs,
            num_bytes=num_bytes,
            proposers=tuple(sorted(candidate.times.elements())),
            logits=candidate.logits,
            tokens=tokens,
            is_first=is_first,
            ratings=candidate.ratings,
            first_choice_of=first_choice_of,
        )

    def _tokens(self, candidate: Candidate, words: list[str]) -> list[list[list[int]]]:
        """Per member and word, the tokens that begin in the word. The end of the text is a token that no word has."""
        members = enumerate(self._vocabularies)
        if not words:
            return [[[*candidate.ids[k], _END_TOKEN]] if candidate.ends else [] for k, _ in members]
        ids = [by_word(words, candidate.ids[k], candidate.ids[k], one) for k, one in members]
        return [[*of_words, [_END_TOKEN]] for of_words in ids] if candidate.ends else ids


def confidences_of(
    candidate: Candidate,
    log_probs: Sequence[Sequence[float]],
    vocabularies: Sequence[Vocabulary],
    weights: Sequence[float],
) -> list[float | None]:
    """
    How sure members are of each word of a candidate.

    Args:
        candidate (`Candidate`): the candidate.
        log_probs (`list[list[float]]`): per member, the log-probabilities (nats) of its ids of the candidate; empty for
            one that has not scored it.
        vocabularies (`list[Vocabulary]`): one per member.
        weights (`list[float]`): how much each member counts.
    """
    words = list(candidate.words)
    if not words:
        return []
    of_words = [
        by_word(words, candidate.ids.get(k, []), values, vocabulary)
        for k, (values, vocabulary) in enumerate(zip(log_probs, vocabularies, strict=True))
    ]
    return word_confidences(of_words, weights)


def by_word(
    words: list[str], ids: list[int], values: Sequence[T], vocabulary: Vocabulary, start: int = 0
) -> list[list[T]]:
    """The values of a member's tokens by the word in which each token begins; the first one's byte is `start`. Where
    the member's tokens say another text, each word ends where it ends in that."""
    bounds = _ends_of(words)
    size = start + sum(len(vocabulary.piece(token)) for token in ids)
    if size != bounds[-1] and start == 0:
        bounds = _other_ends(words, size, vocabulary)
    of_words: list[list[T]] = [[] for _ in words]
    for token, value in zip(ids, values, strict=False):
        of_words[min(bisect.bisect_right(bounds, start), len(words) - 1)].append(value)
        start += len(vocabulary.piece(token))
    return of_words


def _other_ends(words: Sequence[str], size: int, vocabulary: Vocabulary) -> list[int]:
    """Where words end, in bytes, in the text of so many bytes that a tokenizer makes of them: as its tokens of the text
    up to there say. In a long text by a normal form of Unicode, where it is one, else in proportion."""
    if len(words) <= _MOST_PREFIXES:
        texts = itertools.accumulate(words)
        return [sum(len(vocabulary.piece(token)) for token in vocabulary.encode(text).ids) for text in texts]
    for form in ("NFC", "NFKC", "NFD", "NFKD"):
        ends = _ends_of([unicodedata.normalize(form, word) for word in words])
        if ends[-1] == size:
            return ends
    ends = _ends_of(words)
    return [end * size // ends[-1] for end in ends]


def _ends_of(words: Sequence[str]) -> list[int]:
    return list(itertools.accumulate(len(word.encode("utf-8", "replace")) for word in words))
