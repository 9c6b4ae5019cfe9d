"""SAFE (arXiv 2510.15346): the main model drafts, the others verify, and tokens are fused only where that is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...members.distributions import Distribution
from ...outputs import AdaFuseRound
from .gac import GaC
from .strategy import RoundKind, check_choice, check_number
from .token_strategy import NextToken, TokenStrategy, ranked
from .unite import UniTE

ENSEMBLES = ("unite", "gac")
SHARPENINGS = ("prefix", "geometric", "none")
# A fused distribution whose best token has less than this probability is sharpened (section 3.3).
_SMOOTH = 0.5
# UniTE's, where `top_k` is not given.
_TOP_K = 10
# What decided in a round of drafted tokens that were kept.
DRAFTED = "NLL under the main model, whose draft is kept"
_FUSED, _SHARPENED = "fused probability", "sharpened fused probability"


@dataclass
class SAFE(TokenStrategy):
    """
    The main model is the drafter: it writes `num_tokens` greedy tokens. The other members are the verifiers: each reads
    the draft in its own tokens, in one pass. From left to right, a drafted token t is replaced by fusion where all of
    these hold, and kept otherwise:

    1. Every verifier has a token boundary before t: the token before t is not out-of-vocabulary-like (equation 1).
    2. Not every verifier finds its own next token, the one that begins where t begins, the likeliest.
    3. sum_k w_k p_k is at most `acceptance_threshold` times sum_k w_k. p_0 is the main model's probability of t, p_k
       that of verifier k of its own next token, w are the members' weights.

    There the members' distributions are fused by UniTE or GaC, and the best token of the fused distribution P is
    committed. The main model then drafts anew. Where the best token has less than 0.5, P is sharpened first. With
    `sharpening="prefix"`, P(t) becomes P(t) plus the sum of P(u) over all other texts u that begin with t, for each
    token t of the main model's with P(t) > `sharpening_threshold`. With `"geometric"`, the weighted geometric mean
    takes the place of the arithmetic one. Of GaC's texts the 64 likeliest are looked at. The end of the text is a token
    too; a verifier's probability of it is the sum over its end-of-sequence ids.

    The main model drafts because it alone writes tokens that reach the caller, and because most of the text is the
    drafter's: the paper drafts with the best member, so make the best member the main model. `acceptance_threshold=0`
    is the main model alone. Members with one tokenizer give with `sharpening="none"` what UniTE or GaC alone gives.
    `stats` counts `tokens`, `fused`: of those, how many were fused, `sharpened`: of those, how many after sharpening,
    and `replaced`: how many fused tokens are not the main model's own.

    Source: the paper (version 2). Its code was not at hand. It differs so: it tokenizes the whole text anew in every
    cycle, here the text since the last word begun; it counts members alike, here by weight (its appendix H); its sum
    over prefixes would count t twice if read literally; and whether its GaC and UniTE end the text as here, it does not
    say. A drafted token without a text, such as a special token, is kept. So is one that a verifier cannot
    represent. A draft is shortened where a verifier's context holds no more.

    Args:
        num_tokens (`int`, *optional*, defaults to 5): the most tokens of a draft (the paper's n).
        acceptance_threshold (`float`, *optional*, defaults to 0.5): from 0 to 1. A drafted token whose weighted mean
            probability is above it is kept.
        ensemble (`str`, *optional*, defaults to `"unite"`): how distributions are fused: `"unite"` or `"gac"`.
        top_k (`int`, *optional*): the option of UniTE. `None`: 10.
        threshold (`float`, *optional*): the option of GaC, from 0 to 1. From this probability on, the main model's
            token is kept. `None`: there is no such gate. The paper has 0.5.
        sharpening (`str`, *optional*, defaults to `"prefix"`): how a smooth distribution is sharpened: `"prefix"`,
            `"geometric"` or `"none"`.
        sharpening_threshold (`float`, *optional*, defaults to 0.1): from 0 to 1 (the paper's lambda). Texts above this
            probability take over that of longer ones.
    """

    request_options = ("ensemble", "sharpening")
    num_tokens: int = 5
    acceptance_threshold: float = 0.5
    ensemble: str = "unite"
    top_k: int | None = None
    threshold: float | None = None
    sharpening: str = "prefix"
    sharpening_threshold: float = 0.1

    round_kind = RoundKind.VERIFIED
    is_retokenized = True

    def __post_init__(self) -> None:
        check_number("num_tokens", self.num_tokens, 1, is_integer=True)
        check_number("acceptance_threshold", self.acceptance_threshold, 0, 1)
        check_choice("ensemble", self.ensemble, ENSEMBLES)
        check_choice("sharpening", self.sharpening, SHARPENINGS)
        check_number("sharpening_threshold", self.sharpening_threshold, 0, 1)
        other, name = ("gac", "threshold") if self.ensemble == "unite" else ("unite", "top_k")
        if (value := getattr(self, name)) is not None:
            raise ValueError(
                f"`{name}` must be left out with `ensemble={self.ensemble!r}`, but is {value!r}. It belongs to "
                f"`ensemble={other!r}`."
            )
        self._fusion = (
            GaC(self.threshold) if self.ensemble == "gac" else UniTE(_TOP_K if self.top_k is None else self.top_k)
        )

    def asks(self, main: Distribution) -> bool:
        return self._fusion.asks(main)

    def keeps(self, log_probs: Sequence[float], are_likeliest: Sequence[bool], weights: Sequence[float]) -> bool:
        """
        Whether a drafted token stays, before which every verifier has a token boundary.

        Args:
            log_probs (`list[float]`): per member, the log-probability (nats) of its own token, the main model's first.
            are_likeliest (`list[bool]`): per verifier, whether its token is the one that it finds likeliest.
            weights (`list[float]`): how much each member counts.
        """
        return all(are_likeliest) or self._is_probable(log_probs, weights)

    def keeps_alone(self, log_prob: float, weights: Sequence[float]) -> bool:
        """Whether a drafted token stays whatever the verifiers say, by its log-probability (nats) under the main
        model."""
        return self._is_probable([log_prob] + [-math.inf] * (len(weights) - 1), weights)

    def choose(self, members: Sequence[Distribution | None], weights: Sequence[float]) -> list[NextToken]:
        found = self._fusion.candidates(members, weights)
        sharpened = self._sharpened(found, members[0], weights)
        self.criterion = _FUSED if sharpened is None else _SHARPENED
        return ranked(found if sharpened is None else sharpened)

    def counts(self, rounds: Sequence[AdaFuseRound]) -> dict[str, int]:
        fused = [one for one in rounds if one.criterion != DRAFTED]
        replaced = [one for one in fused if one.winner is not None and 0 not in one.candidates[one.winner].proposers]
        return {
            "tokens": sum(one.num_tokens for one in rounds),
            "fused": len(fused),
            "sharpened": sum(one.criterion == _SHARPENED for one in fused),
            "replaced": len(replaced),
        }

    def _is_probable(self, log_probs: Sequence[float], weights: Sequence[float]) -> bool:
        pairs = zip(weights, log_probs, strict=True)
        return math.fsum(w * math.exp(value) for w, value in pairs) > self.acceptance_threshold * math.fsum(weights)

    def _sharpened(
        self, found: Sequence[NextToken], main: Distribution | None, weights: Sequence[float]
    ) -> list[NextToken] | None:
        """The same with sharpened scores; `None` where the distribution is not sharpened."""
        if self.sharpening == "none" or not found or math.exp(-min(one.score for one in found)) >= _SMOOTH:
            return None
        if self.sharpening == "geometric":
            scores = [_geometric_score(one, weights) for one in found]
        else:
            assert main is not None  # it writes the text
            scores = [self._prefix_score(one, found, main) for one in found]
        if min(scores) == math.inf:  # each text has no probability under some member
            return None
        return [replace(one, score=score) for one, score in zip(found, scores, strict=True)]

    def _prefix_score(self, one: NextToken, found: Sequence[NextToken], main: Distribution) -> float:
        """Minus the logarithm of the probability of a text and, where it takes it over, that of all that begin so."""
        mass = math.exp(-one.score)
        is_token = one.data is not None and [*map(main.vocabulary.piece, one.ids)] == [one.data]
        if not is_token or mass <= self.sharpening_threshold:
            return one.score
        assert one.data is not None
        longer = [u for u in found if u.data is not None and u.data != one.data and u.data.startswith(one.data)]
        return -math.log(math.fsum([mass, *(math.exp(-u.score) for u in longer)]))


def _geometric_score(one: NextToken, weights: Sequence[float]) -> float:
    """Minus the weighted mean of the members' log-probabilities."""
    pairs = [(w, value) for w, value in zip(weights, one.log_probs, strict=True) if value is not None]
    return -math.fsum(w * value for w, value in pairs) / math.fsum(w for w, _ in pairs)
