"""The log-probabilities at one node of a token tree, after the member's logits processors.

A pass copies its numbers from the device to the host once, all together: each copy makes the host wait.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from ..trees.backend import ForwardError, to_device
from .processors import ProcessorStates

Allow = Callable[[int], bool]

# A first token is drawn again where it does not begin a word: seldom this often, and to ask all tokens of a large
# vocabulary takes as long as a forward pass.
_MOST_DRAWS = 16
# On CPU, top-k over a vocabulary of 16,384 tokens or more first takes the maximum of each block of 512 tokens, then
# searches the k best blocks, where there are at least 4 k blocks. It takes 10 % to 65 % of the time of `torch.topk`.
_LARGE_VOCABULARY = 2**14
_BLOCK = 512
_MANY_BLOCKS = 4
# Stands in the place of the scores of a forgotten node.
_NO_SCORES = torch.empty(0, device="cpu")


def best_tokens(scores: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The most likely tokens, best first; equal scores in the order of their ids, on every device.

    Args:
        scores (`torch.FloatTensor` of shape `(num_rows, vocab_size)`): logits or log-probabilities.
        num_tokens (`int`): how many to return (at most the vocabulary).

    Returns:
        scores and ids, each of shape `(num_rows, num_tokens)`.
    """
    num_tokens = min(num_tokens, scores.shape[-1])
    values, ids = _one_more(scores, num_tokens)
    for row in (values[:, 1:] == values[:, :-1]).any(-1).nonzero().flatten().tolist():
        ids[row] = _in_order(scores[row], values[row, -1], ids.shape[-1])
    return values[:, :num_tokens], ids[:, :num_tokens]


def _one_more(scores: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `num_tokens + 1` best scores and ids of each row; the extra one shows a tie at the edge. Equal scores
    stand in any order, as `topk` leaves them."""
    num_columns = scores.shape[-1]
    count = min(num_tokens + 1, num_columns)
    num_blocks = num_columns // _BLOCK
    if scores.device.type != "cpu" or num_columns < _LARGE_VOCABULARY or num_blocks < _MANY_BLOCKS * count:
        return scores.topk(count, dim=-1)
    # The best are in the blocks with the best maxima, or behind the last block.
    behind = num_blocks * _BLOCK
    blocks = scores[:, :behind].reshape(-1, num_blocks, _BLOCK)
    chosen = blocks.amax(-1).topk(count, dim=-1).indices
    inside = blocks.gather(1, chosen[..., None].expand(-1, -1, _BLOCK)).flatten(1)
    values, places = torch.cat([inside, scores[:, behind:]], dim=-1).topk(count, dim=-1)
    starts = _BLOCK * chosen.gather(1, (places // _BLOCK).clamp(max=count - 1))
    return values, torch.where(places < inside.shape[-1], starts + places % _BLOCK, behind + places - inside.shape[-1])


def _in_order(scores: torch.Tensor, least: torch.Tensor | float, count: int) -> torch.Tensor:
    """The `count` best ids of one row, equal scores by id; `least` is the lowest score among them."""
    above = (~(scores <= least)).nonzero().flatten()  # NaN among them; to sort a vocabulary takes milliseconds
    equal = (scores == least).nonzero().flatten()
    return torch.cat([above[scores[above].sort(descending=True, stable=True).indices], equal])[:count]


class NodeLogprobs:
    """
    The best tokens after one node, and the scores of all tokens.

    Args:
        row (`torch.Tensor` of shape `(vocab_size,)`): the processed logits, in any precision. This object keeps the
            tensor, so it must not be a view of the logits of other nodes.

    Attributes:
        scores (`torch.FloatTensor` of shape `(vocab_size,)`): processed logits in float32. Made of the row each time
            where that is in half precision.
        log_total (`float`): log of the sum of their exponentials.
        top (`list[int]`), top_log_probs (`list[float]`): the best tokens, best first, and their log-probabilities.
        known (`dict[int, float]`): by token, the scores that have been copied to the host.
        states (`list`, *optional*): the states of stateful logits processors after this node; `None` where there are no
            such processors.
        is_forbidden (`bool`): whether a token on the way here has been forbidden and not committed.
    """

    __slots__ = ("is_forbidden", "known", "log_total", "row", "states", "top", "top_log_probs")

    def __init__(
        self,
        row: torch.Tensor,
        log_total: float,
        top: list[int],
        top_log_probs: list[float],
        states: ProcessorStates | None = None,
        is_forbidden: bool = False,
        known: dict[int, float] | None = None,
    ) -> None:
        self.row = row
        self.known = {} if known is None else known
        self.states = states
        self.is_forbidden = is_forbidden
        self.log_total = log_total
        self.top = top
        self.top_log_probs = top_log_probs

    @property
    def scores(self) -> torch.Tensor:
        return self.row.float()

    @property
    def is_forgotten(self) -> bool:
        """Whether the scores are freed, but for those that were copied to the host."""
        return self.row is _NO_SCORES

    def forget(self) -> None:
        """Free the scores. Those that were copied to the host stay."""
        self.row = _NO_SCORES

    def best(self, count: int, allow: Callable[[int], bool] = lambda token: True) -> list[tuple[int, float]]:
        """The `count` best tokens that are allowed and possible, with their log-probabilities."""
        scores = self.scores[None]
        vocab_size = scores.shape[-1]
        looked_at = min(4 * count + 16, vocab_size)
        while True:
            values, ids = best_tokens(scores, looked_at)
            pairs = zip(ids[0].tolist(), (values[0].double() - self.log_total).tolist(), strict=True)
            best = [(token, value) for token, value in pairs if value > -math.inf and allow(token)][:count]
            if len(best) == count or looked_at == vocab_size:
                return best
            looked_at = min(4 * looked_at, vocab_size)

    def forbids(self, token: int) -> bool:
        """Whether the processors rule a token out. Scores are forgotten only where there are no processors."""
        if self.is_forgotten and token not in self.known:
            return False
        look_up([(self, token)])
        return self.known[token] == -math.inf

    def best_of(self, tokens: Sequence[int]) -> int:
        """The most likely of these tokens. Of equally likely ones, the first."""
        look_up([(self, token) for token in tokens])
        return max(tokens, key=lambda token: self.known[token])


def look_up(asked: Iterable[tuple[NodeLogprobs, int]]) -> None:
    """Copy the scores of these pairs of [`NodeLogprobs`] and token to the host, all together."""
    unknown = [(logprobs, token) for logprobs, token in asked if token not in logprobs.known]
    if unknown:
        scores = torch.stack([logprobs.row[token].float() for logprobs, token in unknown]).tolist()
        for (logprobs, token), score in zip(unknown, scores, strict=True):
            logprobs.known[token] = score


def entropy_of(logprobs: NodeLogprobs) -> float:
    """The entropy (nats) of the next token."""
    probabilities = (logprobs.scores.double() - logprobs.log_total).exp()
    return float(torch.special.entr(probabilities).sum())


def draw_token(
    logprobs: NodeLogprobs,
    warp: Callable[[torch.Tensor], torch.Tensor] | None,
    numbers: Iterator[float],
    allow: Allow | None,
) -> int:
    """
    A token drawn after a node: the one where the probabilities, laid end to end in the order of the ids, reach a random
    number. One that is not allowed is drawn again; after `_MOST_DRAWS` in vain, one of those that are is drawn.

    Args:
        logprobs (`NodeLogprobs`): the log-probabilities at the node after which the token is drawn.
        warp (`Callable`, *optional*): gives the scores, of shape `(1, vocab_size)`, from which is drawn. `None`: the
            most likely token is taken.
        numbers (`Iterator[float]`): random ones from 0 to 1.
        allow (`Callable`, *optional*): which tokens are allowed, where one that is is possible.
    """
    if warp is None:
        best = (logprobs.best(1, allow) if allow is not None else []) or logprobs.best(1)
        return best[0][0] if best else logprobs.top[0]
    probabilities = warp(logprobs.scores[None].clone())[0].double().softmax(-1)
    bounds = probabilities.cumsum(0)
    if not bounds[-1] > 0:  # every token is forbidden
        return logprobs.top[0]
    for _ in range(_MOST_DRAWS):
        token = _reached(bounds, next(numbers))
        if allow is None or allow(token):
            return token
    allowed = [token for token in probabilities.nonzero().flatten().tolist() if allow is not None and allow(token)]
    return allowed[_reached(probabilities[allowed].cumsum(0), next(numbers))] if allowed else token


def _reached(bounds: torch.Tensor, number: float) -> int:
    """The first index with more than this share of the whole before its end."""
    reached = torch.searchsorted(bounds, number * bounds[-1], right=True)
    # Rounded, a number just below 1 may be the whole: of what has no share at the end nothing is reached either.
    return int(torch.minimum(reached, torch.searchsorted(bounds, bounds[-1])))


def span_log_probs(path: list[NodeLogprobs], ids: list[int], eos_ids: Sequence[int] | None) -> list[float]:
    """
    The log-probability (nats) of each id of a span, and of the end of the text after it.

    Args:
        path (`list[NodeLogprobs]`): the log-probabilities at the node before the span, then at the nodes of its ids.
            Those at its last id are needed with `eos_ids` alone.
        ids (`list[int]`): the span.
        eos_ids (`list[int]`, *optional*): the end-of-sequence ids where the text ends after the span: their
            probabilities are summed.
    """
    pairs = list(zip(path, ids, strict=False))
    look_up([*pairs, *[(path[-1], token) for token in eos_ids or ()]])
    log_probs = [logprobs.known[token] - logprobs.log_total for logprobs, token in pairs]
    if eos_ids is not None:
        log_probs.append(log_sum([path[-1].known[token] for token in eos_ids]) - path[-1].log_total)
    return log_probs


def log_sum(values: Sequence[float]) -> float:
    """The logarithm of the sum of the exponentials of these values."""
    most = max(values, default=-math.inf)
    return most if most == -math.inf else most + math.log(math.fsum(math.exp(value - most) for value in values))


class RowNumbers(NamedTuple):
    """
    What leaves the device of one row of scores.

    Args:
        log_total (`float`): log of the sum of the exponentials of all scores.
        top (`list[int]`), top_log_probs (`list[float]`): the best tokens, best first, and their log-probabilities.
        known (`dict[int, float]`): by token, the scores of the best tokens and of those that were asked for.
    """

    log_total: float
    top: list[int]
    top_log_probs: list[float]
    known: dict[int, float]


def numbers_of(
    scores: torch.Tensor, largest: torch.Tensor, num_top: int, asked: list[list[int]]
) -> Iterator[RowNumbers]:
    """
    The numbers of each row of scores that leave the device, in one copy for all rows.

    Args:
        scores (`torch.FloatTensor` of shape `(num_rows, vocab_size)`): the processed logits.
        largest (`torch.FloatTensor` of shape `(num_rows,)`): the largest of each row's logits before processing; NaN
            where any is.
        num_top (`int`): how many of the best tokens leave the device.
        asked (`list[list[int]]`): per row, the tokens whose scores leave it too.

    Raises:
        ForwardError: the logits of a row are NaN or infinite.
    """
    values, ids = _one_more(scores, num_top)
    num_rows, width = values.shape
    # The largest score is taken out first and put back in float64: large logits must not cost digits.
    totals = (scores - values[:, :1]).exp_().sum(-1).log().double() + values[:, 0].double()
    rows = [row for row, tokens in enumerate(asked) for _ in tokens]
    tokens_asked = [token for tokens in asked for token in tokens]
    where = to_device(torch.tensor([rows, tokens_asked], dtype=torch.long, device="cpu"), scores.device)
    parts = [largest, totals, values.flatten(), ids.flatten(), scores[where[0], where[1]]]
    numbers = torch.cat([part.double() for part in parts]).tolist()
    maxima, log_totals, best_scores, best_ids, asked_scores = _split(numbers, [len(part) for part in parts])
    if not all(map(math.isfinite, maxima)):
        raise ForwardError("its logits are NaN" if any(map(math.isnan, maxima)) else "its logits are infinite")
    of_rows = zip(
        log_totals,
        _split(best_scores, [width] * num_rows),
        _split(best_ids, [width] * num_rows),
        _split(asked_scores, [len(tokens) for tokens in asked]),
        strict=True,
    )
    for row, (total, top_scores, ids_in_order, scores_asked) in enumerate(of_rows):
        log_total = 0.0 if math.isnan(total) else total  # NaN where every token is forbidden
        if any(one == other for one, other in pairwise(top_scores)):
            ids_in_order = _in_order(scores[row], top_scores[-1], width).tolist()
        top = [int(token) for token in ids_in_order[:num_top]]
        top_scores = top_scores[:num_top]
        known = dict(zip(asked[row], scores_asked, strict=True)) | dict(zip(top, top_scores, strict=True))
        yield RowNumbers(log_total, top, [value - log_total for value in top_scores], known)


def _split(numbers: list[float], sizes: Sequence[int]) -> list[list[float]]:
    """A list cut into parts of these sizes."""
    ends = itertools.accumulate(sizes)
    return [numbers[end - size : end] for size, end in zip(sizes, ends, strict=True)]
