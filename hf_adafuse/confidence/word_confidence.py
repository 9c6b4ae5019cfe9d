"""How sure the members are of each word of a text, and of the text: a score of what decoding has computed anyway.

It is no probability of being right: a member that is sure of every word may be wrong. [`Calibration`] makes one of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def word_confidences(log_probs: Sequence[Sequence[Sequence[float]]], weights: Sequence[float]) -> list[float | None]:
    """
    Per word, the mean of the members' probabilities of it, sum_k w_k p_k / sum_k w_k: a word's probability under a
    member is the product over the member's own tokens that begin in the word.

    Args:
        log_probs (`list[list[list[float]]]`): per member and word, the log-probabilities (nats) of its tokens; empty
            for a member that has not scored the text.
        weights (`list[float]`): the members' weights; positive.

    Returns:
        per word a number from 0 to 1; `None` where no member has scored it.
    """
    return [None if value is None else math.exp(value) for value in word_log_confidences(log_probs, weights)]


def word_log_confidences(
    log_probs: Sequence[Sequence[Sequence[float]]], weights: Sequence[float]
) -> list[float | None]:
    """The logarithms of [`word_confidences`], which may be too small for a number."""
    scored = [(weight, of_words) for weight, of_words in zip(weights, log_probs, strict=True) if any(of_words)]
    num_words = max((len(of_words) for of_words in log_probs), default=0)
    if not scored:
        return [None] * num_words
    total = math.fsum(weight for weight, _ in scored)
    found = list[float | None]()
    for word in range(num_words):
        values = [min(math.fsum(of_words[word]), 0.0) for _, of_words in scored]
        most = max(values)
        if most == -math.inf:
            found.append(most)
            continue
        share = math.fsum(w * math.exp(value - most) for (w, _), value in zip(scored, values, strict=True)) / total
        found.append(min(most + math.log(share), 0.0))
    return found


def text_confidence(confidences: Sequence[float | None]) -> float | None:
    """
    The confidence of a text of n words: exp(sum of log c / root of n) of the words' confidences c. Of one word it is
    that of the word. Of more it lies between their product, the probability of the whole text, which is small for any
    long text, and their geometric mean, in which one doubtful word among sure ones is lost: of short answers the
    geometric mean tells the right ones from the wrong ones much worse (docs/confidence.md).

    Returns:
        from 0 to 1; `None` where no word has a confidence.
    """
    known = [value for value in confidences if value is not None]
    if not known:
        return None
    return 0.0 if min(known) <= 0 else math.exp(math.fsum(map(math.log, known)) / math.sqrt(len(known)))
