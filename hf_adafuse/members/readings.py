"""What a member reads off the logits of nodes, after its logits processors. Calls no model and knows no cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch

from ..trees.nodes import Node
from .processors import PromptProcessors, States

Allow = Callable[[int], bool]

# A first token is drawn again where it does not begin a word: seldom this often, and to ask all tokens of a large
# vocabulary takes as long as a forward pass.
_MOST_DRAWS = 16


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
    # `topk` leaves the order of equal values open: take one more, so that a tie at the edge shows.
    values, ids = scores.topk(min(num_tokens + 1, scores.shape[-1]), dim=-1)
    tied = values[:, 1:] == values[:, :-1]
    if tied.any():
        values, ids = values.clone(), ids.clone()
        for row in tied.any(dim=-1).nonzero().flatten().tolist():
            sorted_row = scores[row].sort(descending=True, stable=True)
            values[row] = sorted_row.values[: values.shape[-1]]
            ids[row] = sorted_row.indices[: ids.shape[-1]]
    return values[:, :num_tokens], ids[:, :num_tokens]


class Reading:
    """
    What a member reads off the logits of one node.

    Attributes:
        scores (`torch.FloatTensor` of shape `(vocab_size,)`): processed logits.
        log_total (`float`): log of the sum of their exponentials.
        top (`list[int]`), top_log_probs (`list[float]`): the best tokens, best first, and their log-probabilities.
        states (`list`, *optional*): where the processors with a history are; `None` where there are none.
        is_forbidden (`bool`): whether a token on the way here has been forbidden and not committed.
    """

    __slots__ = ("is_forbidden", "log_total", "scores", "states", "top", "top_log_probs")

    def __init__(
        self,
        scores: torch.Tensor,
        log_total: float,
        top: list[int],
        top_log_probs: list[float],
        states: States | None = None,
        is_forbidden: bool = False,
    ) -> None:
        self.scores = scores
        self.states = states
        self.is_forbidden = is_forbidden
        self.log_total = log_total
        self.top = top
        self.top_log_probs = top_log_probs

    def best(self, count: int, allow: Callable[[int], bool] = lambda token: True) -> list[tuple[int, float]]:
        """The `count` best tokens that are allowed and possible, with their log-probabilities."""
        vocab_size = self.scores.shape[-1]
        looked_at = min(4 * count + 16, vocab_size)
        while True:
            values, ids = best_tokens(self.scores[None], looked_at)
            pairs = zip(ids[0].tolist(), (values[0].double() - self.log_total).tolist(), strict=True)
            best = [(token, value) for token, value in pairs if value > -math.inf and allow(token)][:count]
            if len(best) == count or looked_at == vocab_size:
                return best
            looked_at = min(4 * looked_at, vocab_size)

    def forbids(self, token: int) -> bool:
        """Whether the processors rule a token out."""
        return bool(self.scores[token] == -math.inf)

    def best_of(self, tokens: Sequence[int]) -> int:
        """The most likely of these tokens; the first of equals."""
        scores: list[float] = self.scores[list(tokens)].tolist()
        return tokens[scores.index(max(scores))]


def draw_token(
    reading: Reading,
    warp: Callable[[torch.Tensor], torch.Tensor] | None,
    numbers: Iterator[float],
    allow: Allow | None,
) -> int:
    """
    A token drawn after a node: the one where the probabilities, laid end to end in the order of the ids, reach a random
    number. One that is not allowed is drawn again; after `_MOST_DRAWS` in vain, one of those that are is drawn.

    Args:
        reading (`Reading`): of the node.
        warp (`Callable`, *optional*): gives the scores, of shape `(1, vocab_size)`, from which is drawn. `None`: the
            most likely token is taken.
        numbers (`Iterator[float]`): random ones from 0 to 1.
        allow (`Callable`, *optional*): which tokens are allowed, where one that is is possible.
    """
    if warp is None:
        best = (reading.best(1, allow) if allow is not None else []) or reading.best(1)
        return best[0][0] if best else reading.top[0]
    probabilities = warp(reading.scores[None].clone())[0].double().softmax(-1)
    bounds = probabilities.cumsum(0)
    if not bounds[-1] > 0:  # every token is forbidden
        return reading.top[0]
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


def span_log_probs(readings: list[Reading], ids: list[int], eos_ids: Sequence[int] | None) -> list[float]:
    """
    The log-probability (nats) of each id of a span, and of the end of the text after it.

    Args:
        readings (`list[Reading]`): of the node before the span, and of those of its ids as far as they are needed.
        ids (`list[int]`): the span.
        eos_ids (`list[int]`, *optional*): where the text ends after it, what may end it: their probabilities are
            summed.
    """
    scores = [reading.scores[token] for reading, token in zip(readings, ids, strict=False)]
    if eos_ids is not None:
        scores.append(readings[-1].scores[list(eos_ids)].logsumexp(0))
    values = torch.stack(scores).tolist() if scores else []
    return [value - reading.log_total for value, reading in zip(values, readings, strict=False)]


class Reader:
    """
    Reads what one member's trees have run.

    Args:
        processors (`list[PromptProcessors]`): per prompt.
        num_top (`int`): how many of the best tokens a reading holds.
        ids_to (`Callable`): all ids of a node's prompt up to it.
    """

    def __init__(self, processors: list[PromptProcessors], num_top: int, ids_to: Callable[[Node], list[int]]) -> None:
        self._processors, self._num_top, self._ids_to = processors, num_top, ids_to
        self.has_processors = any(processors)
        self._committed: dict[int, set[Node]] = {}  # per prompt, what has been committed before it was read
        self._settled: dict[int, States | None] = {}  # per prompt, of the last token read before the first one unread

    def read(self, nodes: list[Node], is_committed: bool = False) -> None:
        """Give the nodes, which have logits, their readings; `is_committed`: also those below forbidden tokens."""
        if not nodes:
            return
        scores, states, forbidden = self._process(nodes, is_committed)
        values, ids = best_tokens(scores, self._num_top)
        # The largest score is taken out first and put back in float64: large logits must not cost digits.
        largest = values[:, :1]
        totals = (scores - largest).exp().sum(-1).log().double() + largest[:, 0].double()
        totals = totals.nan_to_num(0.0)  # where every token is forbidden
        log_probs = values.double() - totals[:, None]
        rows = zip(nodes, scores, totals.tolist(), ids.tolist(), log_probs.tolist(), strict=True)
        for node, row_scores, total, top, top_log_probs in rows:
            node.reading = Reading(row_scores, total, top, top_log_probs, states.get(node), node in forbidden)

    def missing(self, path: list[Node], tokens: Sequence[int]) -> list[Node]:
        """Of these nodes, those that have not been read; whatever comes after a node, its reading has it."""
        return [node for node in path if node.reading is None]

    def span_log_probs(self, path: list[Node], ids: list[int], eos_ids: Sequence[int] | None) -> list[float]:
        """As of the function, by the nodes before the ids, and after them."""
        return span_log_probs([node.reading for node in path], ids, eos_ids)

    def best_of(self, node: Node, tokens: Sequence[int]) -> int:
        """The most likely of these tokens after a node that has been read; the first of equals."""
        best: int = node.reading.best_of(tokens)
        return best

    def remember(self, path: list[Node]) -> None:
        """This path becomes part of the prefix, and what is not read of it is parted from what is."""
        prompt_index = path[0].prompt_index
        for above, node in pairwise(path):
            if node.reading is None and above.reading is not None:
                self._settled[prompt_index] = above.reading.states
        committed = {*self._committed.get(prompt_index, ()), *path}
        self._committed[prompt_index] = {node for node in committed if node.reading is None}

    def _process(self, nodes: list[Node], is_committed: bool) -> tuple[torch.Tensor, dict[Node, States], set[Node]]:
        """The processed logits, where processors with a history are, and which nodes are below forbidden tokens."""
        logits = torch.stack([node.logits for node in nodes if node.logits is not None])
        states, forbidden = dict[Node, States](), set[Node]()
        if not self.has_processors:
            return logits, states, forbidden
        order = {id(node): index for index, node in enumerate(nodes)}
        groups: dict[tuple[int, int], list[int]] = {}  # texts of equal length go through the processors together
        for index, node in enumerate(nodes):
            groups.setdefault((node.prompt_index, node.position), []).append(index)
        for (prompt_index, _), indices in sorted(groups.items()):  # by position: what forbids a token comes before it
            # A processor is not asked what may follow a text that it has forbidden: a grammar has no answer.
            if not is_committed:
                committed = self._committed.get(prompt_index, set())
                below = [nodes[i] for i in indices if _is_forbidden(nodes[i], order, logits, committed, forbidden)]
                forbidden.update(below)
                indices = [index for index in indices if nodes[index] not in forbidden]
            processors = self._processors[prompt_index]
            if processors.has_history:
                for index in indices:
                    logits[index], states[nodes[index]] = self._follow(nodes[index], logits[index], states)
            elif indices and processors:
                ids = [self._ids_to(nodes[index]) for index in indices]
                logits[indices] = processors(ids, logits[indices])
        return logits, states, forbidden

    def _follow(self, node: Node, logits: torch.Tensor, states: dict[Node, States]) -> tuple[torch.Tensor, States]:
        """The processed logits of one node, where the processors have a history: that of the node above goes on."""
        processors, ids, above = self._processors[node.prompt_index], self._ids_to(node), node.parent
        settled = self._settled.get(node.prompt_index)
        before = settled if above is None else states.get(above) or above.reading.states
        return processors.begin(ids, logits) if before is None else processors.advance(ids, logits, before)


def _is_forbidden(
    node: Node, order: dict[int, int], logits: torch.Tensor, committed: set[Node], forbidden: set[Node]
) -> bool:
    """Whether a token on the way to the node, but for committed ones, has been forbidden, here or in an earlier
    reading; what is known of the node above it is not looked for again."""
    above = node.parent
    if above is None or node in committed:
        return False  # all before a committed token is committed
    is_new = id(above) in order
    if above in forbidden if is_new else above.reading.is_forbidden:
        return True
    scores = logits[order[id(above)]] if is_new else above.reading.scores
    return bool(scores[node.token] == -math.inf)
