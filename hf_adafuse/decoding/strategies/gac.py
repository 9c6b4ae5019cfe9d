"""GaC: the mean of the members' distributions over the union of their vocabularies, as texts."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...members.distributions import Distribution, tokens_of
from ...members.vocabulary import Vocabulary
from .strategy import check_number
from .token_strategy import NextToken, TokenStrategy, ranked

# How many of the best texts are looked at: the main model may be unable to say some.
_MOST_TRIED = 64
_MOST_KEPT = 10
_MOST_UNIONS = 8


@dataclass
class GaC(TokenStrategy):
    """
    Per token: U is the union, as bytes, of the members' vocabularies; each member's probability of a text in U is the
    sum over its tokens of that text. The text of the largest sum_k w_k p_k is committed; each member reads it in its
    own tokens, as a continuation. The end of the sequence is one text, whatever ids a member has for it.

    With a `threshold` the main model is the gate: where its largest probability reaches it, its likeliest text is
    committed without asking the others, who read it later.

    Source: a copy of the released tokenizer code, and its README. That maps tokens to texts by rules for each family
    (some bytes not); here all tokens are bytes.

    Args:
        threshold (`float`, *optional*): from 0 to 1. From this probability on, the main model's own likeliest token is
            committed, and the other members are not asked. `None`: they are always asked.
    """

    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.threshold is not None:
            check_number("threshold", self.threshold, 0, 1)

    def asks(self, main: Distribution) -> bool:
        return self.threshold is None or math.exp(main.logprobs.top_log_probs[0]) < self.threshold

    def choose(self, members: Sequence[Distribution | None], weights: Sequence[float]) -> list[NextToken]:
        return ranked(self.candidates(members, weights, _MOST_KEPT))

    def candidates(
        self, members: Sequence[Distribution | None], weights: Sequence[float], most: int = _MOST_TRIED
    ) -> list[NextToken]:
        """The best of the union that the main model can say, as of `choose`, in the order in which ties are broken."""
        main = members[0]
        assert main is not None  # it writes the text
        union = _union([None if member is None else member.vocabulary for member in members])
        masses = [None if one is None else union.masses(k, one) for k, one in enumerate(members)]
        voting = [(mass, weight) for mass, weight in zip(masses, weights, strict=True) if mass is not None]
        fused = sum(weight * mass for mass, weight in voting) / math.fsum(weight for _, weight in voting)
        assert isinstance(fused, torch.Tensor)
        values, order = fused.topk(min(_MOST_TRIED, len(fused)))
        found: list[tuple[int, NextToken]] = []
        for index, value in zip(order.tolist(), values.tolist(), strict=True):
            data = union.texts[index]
            ids = [] if data is None else union.main_tokens(main, data)
            if value <= 0 or len(found) == most:
                break
            if ids is None or (data is None and main.end_log_prob == -math.inf):
                continue  # the main model cannot say it, or must not
            log_probs = [None if mass is None else _log(float(mass[index])) for mass in masses]
            found.append((index, NextToken(data, ids, -math.log(value), log_probs)))
        found.sort(key=lambda pair: pair[0])  # of equals the first text of the union
        return [one for _, one in found]


class _Union:
    """The texts of several vocabularies; the first one is the end of the text."""

    def __init__(self, vocabularies: Sequence[Vocabulary | None]) -> None:
        pieces = [[] if one is None else one.all_pieces() for one in vocabularies]
        texts = dict.fromkeys(piece for of_one in pieces for piece in of_one if piece)
        self.texts: list[bytes | None] = [None, *texts]
        places = {text: place for place, text in enumerate(self.texts)}
        # Tokens without a text go to a place of their own behind the others, and are left out.
        self._places = [
            torch.tensor([places.get(piece, len(places)) for piece in of_one], device="cpu") for of_one in pieces
        ]
        self._alike: dict[bytes, list[int]] = {}  # the main model's tokens of a text
        for token, piece in enumerate(pieces[0]):
            self._alike.setdefault(piece, []).append(token)

    def masses(self, member_index: int, member: Distribution) -> torch.Tensor:
        """The probability of each text under a member, of shape `(num_texts,)`."""
        places = self._places[member_index].clone()
        places[member.eos_ids] = 0
        probabilities = member.probabilities()[: len(places)]
        return torch.zeros(len(self.texts) + 1, dtype=torch.float64, device="cpu").index_add_(0, places, probabilities)[
            :-1
        ]

    def main_tokens(self, main: Distribution, data: bytes) -> list[int] | None:
        """The main model's tokens of a text: of those that are it, the likeliest; `None` where it cannot write it, or a
        processor forbids the first."""
        if data in self._alike:
            token = main.logprobs.best_of(self._alike[data])
            return None if main.logprobs.forbids(token) else [token]
        ids = tokens_of(main.vocabulary, data)
        is_written = bool(ids) and b"".join(map(main.vocabulary.piece, ids or [])) == data
        return ids if ids and is_written and not main.logprobs.forbids(ids[0]) else None


def _union(vocabularies: Sequence[Vocabulary | None]) -> _Union:
    """Made once for the same vocabularies, as long as they live."""
    key = tuple(map(id, vocabularies))
    for dead in [one for one, (_, refs) in _UNIONS.items() if any(ref is not None and ref() is None for ref in refs)]:
        del _UNIONS[dead]
    if key not in _UNIONS:
        while len(_UNIONS) >= _MOST_UNIONS:
            del _UNIONS[next(iter(_UNIONS))]
        _UNIONS[key] = _Union(vocabularies), [None if one is None else weakref.ref(one) for one in vocabularies]
    return _UNIONS[key][0]


_UNIONS: dict[tuple[int, ...], tuple[_Union, list[Any]]] = {}


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
