"""What members make of a given answer, as [`AdaFuseEnsemble.score`] returns it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from .word_confidence import text_confidence


@dataclass(frozen=True)
class AnswerScore:
    """
    A given answer under all members, as [`AdaFuseEnsemble.score`] gives it.

    Attributes:
        text (`str`): the answer.
        ends (`bool`): whether the end of the text after the answer was scored too.
        log_probs (`list[list[float]]`): per member, the log-probability (nats) of each of its own tokens of the answer.
            With `ends` the last number is that of the end of the text; it is minus infinity under a member without an
            end-of-sequence token.
        num_bytes (`int`): the length of the answer in bytes of UTF-8. With `ends` the end of the text counts as one.
        words (`list[str]`): the words of the answer. Joined, they give `text`.
        confidences (`list[float]`): per word, the weighted mean of the members' probabilities of it, from 0 to 1.
        lossy (`list[int]`): the members whose tokenizer cannot represent the text. They score the text that their
            tokens decode to.
    """

    text: str
    ends: bool
    log_probs: list[list[float]]
    num_bytes: int
    words: list[str]
    confidences: list[float | None]
    lossy: list[int] = field(default_factory=list)

    @property
    def log_likelihoods(self) -> list[float | None]:
        """Per member, the log-likelihood of the answer in nats; `None` of a member whose tokenizer gives no token."""
        return [math.fsum(of_member) if of_member else None for of_member in self.log_probs]

    @property
    def num_tokens(self) -> list[int]:
        """Per member, its tokens of the answer; with `ends` the end of the text counts as one."""
        return [len(of_member) for of_member in self.log_probs]

    @property
    def confidence(self) -> float | None:
        """How sure the members are of the answer, as of [`AdaFuseOutput`]."""
        return text_confidence(self.confidences)

    def to_dict(self) -> dict[str, Any]:
        """The score as plain JSON values, the sums among them. The log-probability of what is impossible is minus
        infinity."""
        sums = {"log_likelihoods": self.log_likelihoods, "num_tokens": self.num_tokens, "confidence": self.confidence}
        return {**asdict(self), **sums}
