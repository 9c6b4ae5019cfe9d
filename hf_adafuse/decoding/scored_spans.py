"""What a strategy compares, and what it says: the candidates of a round with their log-probabilities, and a choice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..config import AdaFuseConfig
from .scoring import span_nll

# What follows the last word of a candidate that ends the sequence: a word of its own, unlike any that has text.
END = ""


@dataclass(frozen=True)
class ScoredSpan:
    """
    A candidate as a strategy sees it.

    Args:
        words (`tuple[str]`): the words of its text, as the strategy's `units` has them. Where the text ends after the
            candidate, `END` is the last of them.
        log_probs (`list[list[list[float]]]`): per member and word, the log-probabilities (nats) of the member's own
            tokens that begin in the word. The list of a member that has nothing to score, or was not asked, is empty.
        num_bytes (`list[int]`): per word, its length in bytes of UTF-8. `END` counts as one.
        proposers (`tuple[int]`): the members that proposed it, `(0, 0, 1)` where member 0 did so twice.
        logits (`list[list[float]]`): per member, the logits of its own tokens, where the strategy `needs_logits`; empty
            of a member that was not asked.
        tokens (`list[list[list[int]]]`): per member and word, the tokens of `log_probs`; that of `END` is negative.
            Empty unless the strategy `needs_tokens`.
        is_first (`bool`): whether the text of the prompt's answer begins with it.
        ratings (`list[float]`): per member, its rating of the candidate, where members rate. `None` stands for a member
            that gave none.
        first_choice_of (`tuple[int]`): the members whose first proposal it is: their own greedy text, without a branch.
    """

    words: tuple[str, ...]
    log_probs: list[list[list[float]]]
    num_bytes: list[int]
    proposers: tuple[int, ...] = ()
    logits: list[list[float]] = field(default_factory=list)
    tokens: list[list[list[int]]] = field(default_factory=list)
    is_first: bool = False
    ratings: Sequence[float | None] = ()
    first_choice_of: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The text of the candidate. `END` adds nothing to it."""
        return "".join(self.words)

    @property
    def is_possible(self) -> bool:
        """Whether no member's processors forbid a token of it, and one member at least can score it."""
        values = [value for member in self.log_probs for word in member for value in word]
        return bool(values) and -math.inf not in values

    @property
    def is_blank(self) -> bool:
        """Whether it begins a text with a line break, or ends it at once."""
        return self.is_first and not self.words[0].strip()

    def word_log_prob(self, member_index: int, level: int) -> float | None:
        """The log-probability of a word: the sum over its tokens; `None` for a member that has nothing to score."""
        words = self.log_probs[member_index]
        return math.fsum(words[level]) if words else None


@dataclass(frozen=True)
class Choice:
    """
    What a strategy has chosen.

    Args:
        winner (`int`, *optional*): the index of the candidate that is committed. `None`: none is possible.
        nlls (`list[list[float]]`): per candidate and member, its NLL; `None` where the member has nothing to score.
        scores (`list[float]`): per candidate, the method's score.
        decided_by (`list[list[float]]`, *optional*): per candidate, the numbers by which it was compared with the
            others, for the trace. By default its score.
        notes (`dict[int, str]`, *optional*): by candidate, another reason that decided.
        weights (`list[float]`, *optional*): how much each member counted, where that differs from the weights that
            `choose` was given.
        features (`dict[int, list[float]]`, *optional*): by candidate, the numbers by which it was judged; `None` stands
            for a number that is not known.
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


def mean_nll(
    span: ScoredSpan,
    member_index: int,
    config: AdaFuseConfig,
    num_words: int | None = None,
    length_exponent: float = 1.0,
) -> float | None:
    """
    The NLL of a candidate under one member, divided by its length to the power of `length_exponent` (equation 4).

    Args:
        span (`ScoredSpan`): the candidate.
        member_index (`int`): the number of the member.
        config (`AdaFuseConfig`): its `nll_normalization` says whether the length is in the member's tokens or in bytes.
        num_words (`int`, *optional*): how many of the candidate's first words count. All by default.
        length_exponent (`float`, *optional*, defaults to 1.0): the exponent of the length. 0: the sum of the NLL.

    Returns:
        nats per token, or per byte; `None` where the member has nothing to score.
    """
    words = span.log_probs[member_index][:num_words]
    log_probs = [value for word in words for value in word]
    length = None if config.nll_normalization == "token" else sum(span.num_bytes[:num_words])
    return span_nll(log_probs, length, length_exponent)
