"""The numbers by which an answer is judged: what all members say of it, made of what decoding has computed anyway.

A question has the answers of K members. With member k's tokens t of an answer, its log-probability of the answer is
S_k = sum_t log p_k(t | prompt, earlier tokens), in nats. That the text ends there counts as one token and one byte,
where the answer has an end-of-sequence token. Features with a member in their name are there for each of the K members.

Of an answer:

- `log-probability per token, member k`: S_k / its tokens. The NLL of AdaFuse, equation 4, with the sign turned.
- `log-probability per byte, member k`: S_k / UTF-8 bytes. The same, comparable across tokenizers.
- `log-probability, member k`: S_k. The likelihood of the sequence (arXiv 2207.05221).
- `worst word, member k`: the lowest log-probability of a word.
- `log-probability per byte, authors`: the mean of S_k / bytes over the members whose own answer it is.
- `log-probability per byte, others`: the same over the other members; over the authors where there is no other. The
  cross-model perplexity (arXiv 2603.25450), as a logarithm.
- `log-probability, authors`: the mean over the authors of S_k / root of their tokens: how sure they are of the whole of
  it, in a form in which short and long answers compare.
- `disagreement`: the standard deviation of S_k / bytes over the members (cross-model disagreement, arXiv 2604.17112).
- `word confidence`: the mean over words of log sum_k w_k p_k(word).
- `word confidence, text`: the sum of the same over n words / root of n: the logarithm of the `confidence` of an output.
- `word confidence, whole text`: the same. It is not known of an answer that came neither to its end nor to a stop text,
  where another answer to the prompt did: the longer an answer repeats itself, the surer the members are of it.
- `word confidence, worst`: the lowest of the same.
- `agreement`: the share of the weight of the members whose own answer it is, but for space around it. Self-consistency
  (arXiv 2203.11171) over members.
- `agreement, normalized`: the same, without case, articles, and punctuation around words.
- `agreement, last number`: the same of answers with the same last number, as in GSM8K; 0 of an answer without a number.
- `agreement, words`: the weighted mean over members of the F1 of the answer's words and those of the member's own.
- `length`: log(1 + bytes).

Of the prompt, the same for all its answers:

- `first entropy, member k`: -sum_t p_k(t) log p_k(t) over the first token, in nats.
- `prompt cost, member k`: the NLL of the prompt, in nats per byte (PackLLM, arXiv 2404.11531).
- `question cost, member k`: the NLL of the part of the prompt behind its last empty line.

Where members rate answers (`select` with `with_ratings=True`), also of an answer:

- `rating, member k`: the mean that member k gives it by the rubric, as `peer-review` defines it (arXiv 2512.23213).

What a member cannot tell (the entropy behind a server, the cost of a prompt that has no text) is `None`, and is filled
in by [`filled`].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .answer_text import last_number_in, normalized_answer, word_f1
from .word_confidence import word_log_confidences

_ARTICLES = frozenset(("a", "an", "the"))

_PER_MEMBER = ("log-probability per token", "log-probability per byte", "log-probability", "worst word")
_OF_ANSWER = [
    "log-probability per byte, authors",
    "log-probability per byte, others",
    "log-probability, authors",
    "disagreement",
    "word confidence",
    "word confidence, text",
    "word confidence, whole text",
    "word confidence, worst",
    "agreement",
    "agreement, normalized",
    "agreement, last number",
    "agreement, words",
    "length",
]
# The ridge penalties of a calibration: of the features that say how sure members are of a whole answer, of each rating,
# and of all other features. Chosen on mixes of TriviaQA, SQuAD and GSM8K with three small models (docs/quality.md).
_OF_THE_WHOLE = ("log-probability, authors", "word confidence, whole text")
_SURE, _RATING, _OTHER = 3.0, 10.0, 30.0
_OF_PROMPT = ("first entropy", "prompt cost", "question cost")

Row = list[float | None]


@dataclass(frozen=True)
class AnswerFacts:
    """
    One answer as its features see it.

    Args:
        text (`str`): the text of the answer.
        log_probs (`list[list[list[float]]]`): per member and word, the log-probabilities (nats) of the member's own
            tokens that begin in the word; the end of the text is a word of its own. Empty for a member that has nothing
            to score.
        num_bytes (`int`): the length of the text in bytes of UTF-8. Its end counts as one.
        authors (`tuple[int]`): the members whose own answer it is, by number.
        ratings (`list[float]`): each member's rating of it; empty where members do not rate.
        is_whole (`bool`, defaults to `True`): whether it came to its end, or to a text to stop at.
    """

    text: str
    log_probs: Sequence[Sequence[Sequence[float]]]
    num_bytes: int
    authors: tuple[int, ...]
    ratings: Sequence[float | None] = ()
    is_whole: bool = True


@dataclass(frozen=True)
class PromptFacts:
    """
    What the prompt says to each member; `None` where it is not known.

    Args:
        entropies (`list[float]`): per member, of its first token (nats).
        prompt_nlls (`list[float]`): per member, its NLL of the prompt in nats per byte.
        question_nlls (`list[float]`): per member, the same of the prompt's last part.
    """

    entropies: Sequence[float | None]
    prompt_nlls: Sequence[float | None]
    question_nlls: Sequence[float | None]


def feature_names(num_members: int, with_ratings: bool = False) -> list[str]:
    """What the features of an answer are, in their order; with the members' ratings where these are among them."""
    members = range(num_members)
    own = [f"{name}, member {k}" for name in _PER_MEMBER for k in members]
    ratings = [f"rating, member {k}" for k in members if with_ratings]
    return [*own, *_OF_ANSWER, *(f"{name}, member {k}" for name in _OF_PROMPT for k in members), *ratings]


def feature_penalties(num_members: int, with_ratings: bool = False) -> list[float]:
    """
    The ridge penalties of a calibration by these features, in their order.

    A feature with a small penalty may have a large coefficient. The two that say how sure the members are of a whole
    answer have the smallest penalty, then each rating, then all other features.
    """
    names = feature_names(num_members, with_ratings)
    return [_SURE if name in _OF_THE_WHOLE else _RATING if name.startswith("rating") else _OTHER for name in names]


def answer_features(
    answers: Sequence[AnswerFacts], own_texts: Sequence[str | None], weights: Sequence[float], prompt: PromptFacts
) -> list[Row]:
    """
    Per answer its features, in the order of [`feature_names`]; `None`: not known.

    Args:
        answers (`list[AnswerFacts]`): the answers to one prompt.
        own_texts (`list[str]`): per member, its own answer. `None` stands for a member that has none.
        weights (`list[float]`): how much each member counts. They are positive.
        prompt (`PromptFacts`): the prompt as its features see it.
    """
    said = [None if text is None else _Said(text) for text in own_texts]
    has_whole = any(answer.is_whole for answer in answers)
    return [_features(answer, said, weights, prompt, answer.is_whole or not has_whole) for answer in answers]


def filled(rows: Sequence[Sequence[Row | None]], centres: Sequence[float] | None = None) -> Any:
    """
    The features of several questions as an array, what is not known filled in: by the mean of the question's other
    candidates, else by the mean of the questions.

    Args:
        rows (`list`): per question and candidate its features, or `None` where there is no such candidate.
        centres (`list[float]`, *optional*): per feature, the mean of the questions of a fit; by default that of these.

    Returns:
        `numpy.ndarray` of shape `(num_questions, num_candidates, num_features)`: finite.
    """
    width = next((len(row) for of_question in rows for row in of_question if row is not None), len(centres or ()))
    blank: Row = [None] * width
    values = np.array(
        [[[math.nan if value is None else value for value in row or blank] for row in one] for one in rows],
        dtype=np.float64,
    )
    values = np.where(np.isfinite(values), values, math.nan)
    means = _mean(values, 1)
    columns = _mean(means, 0)[0] if centres is None else np.asarray(centres, dtype=np.float64)
    columns = np.where(np.isfinite(columns), columns, 0.0)
    means = np.where(np.isfinite(means), means, columns)
    return np.where(np.isfinite(values), values, means)


class _Said:
    """What a member's own answer says."""

    def __init__(self, text: str) -> None:
        self.text = text.strip()
        self.words = [word for word in normalized_answer(text).split() if word not in _ARTICLES]
        self.number = last_number_in(text)

    def overlap(self, other: _Said) -> float:
        """The F1 of both texts' words."""
        return word_f1(self.words, other.words)


def _features(
    answer: AnswerFacts,
    said: Sequence[_Said | None],
    weights: Sequence[float],
    prompt: PromptFacts,
    is_as_whole_as_others: bool,
) -> Row:
    sums: Row = [_total(of_member) for of_member in answer.log_probs]
    counts = [sum(map(len, of_member)) for of_member in answer.log_probs]
    per_byte = [None if value is None else value / max(answer.num_bytes, 1) for value in sums]
    per_token = [None if value is None else value / count for value, count in zip(sums, counts, strict=True)]
    per_root = [None if value is None else value / math.sqrt(count) for value, count in zip(sums, counts, strict=True)]
    worst: Row = [min(map(math.fsum, filter(None, of_member)), default=None) for of_member in answer.log_probs]
    confidences = [value for value in word_log_confidences(answer.log_probs, weights) if value is not None]
    authors = [value for k, value in enumerate(per_byte) if k in answer.authors]
    others = [value for k, value in enumerate(per_byte) if k not in answer.authors]
    own = _Said(answer.text)
    of_text = math.fsum(confidences) / math.sqrt(len(confidences)) if confidences else None
    return [
        *per_token,
        *per_byte,
        *sums,
        *worst,
        _known_mean(authors or others),
        _known_mean(others or authors),
        _known_mean([value for k, value in enumerate(per_root) if k in answer.authors] or per_root),
        _spread(per_byte),
        _known_mean(confidences),
        of_text,
        of_text if is_as_whole_as_others else None,
        min(confidences, default=None),
        _share([one is not None and one.text == own.text for one in said], weights),
        _share([one is not None and one.words == own.words for one in said], weights),
        _share([one is not None and own.number is not None and one.number == own.number for one in said], weights),
        _share([0.0 if one is None else one.overlap(own) for one in said], weights),
        math.log(1 + answer.num_bytes),
        *prompt.entropies,
        *prompt.prompt_nlls,
        *prompt.question_nlls,
        *answer.ratings,
    ]


def _total(of_member: Sequence[Sequence[float]]) -> float | None:
    values = [value for word in of_member for value in word]
    return math.fsum(values) if values else None


def _known_mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _spread(values: Sequence[float | None]) -> float | None:
    mean = _known_mean(values)
    return None if mean is None else math.sqrt(_known_mean([(v - mean) ** 2 for v in values if v is not None]) or 0.0)


def _share(values: Sequence[float], weights: Sequence[float]) -> float:
    return math.fsum(weight * value for weight, value in zip(weights, values, strict=True)) / math.fsum(weights)


def _mean(values: Any, axis: int) -> Any:
    """The mean of what is known along an axis, which stays; NaN where nothing is."""
    known = np.isfinite(values)
    total = np.where(known, values, 0.0).sum(axis, keepdims=True)
    counts = known.sum(axis, keepdims=True)
    return np.where(counts > 0, total / np.maximum(counts, 1), math.nan)
