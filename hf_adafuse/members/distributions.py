"""A member's next-token distribution, with its tokens as bytes: members with different tokenizers share only bytes."""

from __future__ import annotations

import codecs
import functools
import math
from collections.abc import Iterator, Sequence

import torch

from .member import Member
from .node_logprobs import NodeLogprobs, look_up, span_log_probs
from .vocabulary import Vocabulary


class Distribution:
    """
    A member's next-token distribution after a node.

    Args:
        member (`Member`): the member.
        logprobs (`NodeLogprobs`): what the member has read off the node.
    """

    def __init__(self, member: Member, logprobs: NodeLogprobs) -> None:
        self.vocabulary = member.vocabulary
        self.eos_ids = member.eos_ids
        self.model = member.model
        self.logprobs = logprobs

    def top(self, count: int) -> list[tuple[bytes | None, int, float]]:
        """The most likely tokens as (bytes, id, log-probability in nats). The bytes are `None` for an end of
        sequence."""
        ends = set(self.eos_ids)
        piece = self.vocabulary.piece
        best = self.logprobs.best(count, lambda token: token in ends or bool(piece(token)))
        return [(None if token in ends else piece(token), token, value) for token, value in best]

    def log_prob(self, token: int) -> float:
        """The log-probability of a token in nats; minus infinity where a processor forbids it."""
        look_up([(self.logprobs, token)])
        return self.logprobs.known[token] - self.logprobs.log_total

    @functools.cached_property
    def end_log_prob(self) -> float:
        """The log-probability (nats) that the text ends: the sum over all end-of-sequence ids."""
        if not self.eos_ids:
            return -math.inf
        (value,) = span_log_probs([self.logprobs], [], self.eos_ids)
        return value

    @functools.cached_property
    def best_end(self) -> int:
        """The most likely of the member's end-of-sequence ids."""
        return self.logprobs.best_of(self.eos_ids)

    def probabilities(self) -> torch.Tensor:
        """The probabilities of all tokens, of shape `(vocab_size,)`, in float64 on the CPU."""
        return (self.logprobs.scores.double().cpu() - self.logprobs.log_total).exp()


def first_token(vocabulary: Vocabulary, data: bytes) -> int | None:
    """The token of these bytes, or the first of the tokens that write them; `None` where there is none."""
    token = vocabulary.token_of(data)
    if token is not None:
        return token
    ids = tokens_of(vocabulary, data)
    return ids[0] if ids and data.startswith(vocabulary.piece(ids[0])) and vocabulary.piece(ids[0]) else None


def tokens_of(vocabulary: Vocabulary, data: bytes) -> list[int] | None:
    """
    Bytes as a continuation: the tokenization of the whole characters, then a token for each byte of the beginning of
    one at the end; `None` where the vocabulary has no such tokens.
    """
    whole, rest = split_character(data)
    ids = list(vocabulary.encode(whole.decode("utf-8", "replace")).ids) if whole else []
    bytewise = [vocabulary.token_of(rest[index : index + 1]) for index in range(len(rest))]
    return None if None in bytewise else ids + [token for token in bytewise if token is not None]


def split_character(data: bytes) -> tuple[bytes, bytes]:
    """The bytes up to the beginning of a UTF-8 character that more bytes could complete, and that beginning."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    rest = decoder.getstate()[0]
    return data[: len(data) - len(rest)], rest


def shared_pieces(vocabularies: Sequence[Vocabulary]) -> list[bytes]:
    """The texts that are one token in every vocabulary, in the order of the first one's ids."""
    return list(_shared(vocabularies))


def have_shared_pieces(vocabularies: Sequence[Vocabulary]) -> bool:
    """Whether any text is one token in every vocabulary."""
    return next(_shared(vocabularies), None) is not None


def _shared(vocabularies: Sequence[Vocabulary]) -> Iterator[bytes]:
    main, *others = vocabularies
    for piece in dict.fromkeys(main.all_pieces()):
        if piece and all(other.token_of(piece) is not None for other in others):
            yield piece
