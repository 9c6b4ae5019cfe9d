"""From the logits of nodes to readings, through the logits processors. Knows nodes and their ids; no model or cache."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .processors import RowProcessors
from .reading import Reading
from .scoring import best_tokens
from .token_nodes import Node


class Reader:
    """
    Reads what one member's trees have run.

    Args:
        processors (`list[RowProcessors]`): per row.
        num_top (`int`): how many of the best tokens a reading holds.
        ids_to (`Callable`): all ids of a node's row up to it.
    """

    def __init__(self, processors: list[RowProcessors], num_top: int, ids_to: Callable[[Node], list[int]]) -> None:
        self._processors, self._num_top, self._ids_to = processors, num_top, ids_to

    def read(self, nodes: list[Node]) -> None:
        """Give the nodes, which have logits, their readings."""
        if not nodes:
            return
        scores = self._process(nodes)
        values, ids = best_tokens(scores, self._num_top)
        # The largest score is taken out first and put back in float64: large logits must not cost digits.
        largest = values[:, :1]
        totals = (scores - largest).exp().sum(-1).log().double() + largest[:, 0].double()
        totals = totals.nan_to_num(0.0)  # where every token is forbidden
        log_probs = values.double() - totals[:, None]
        rows = zip(nodes, scores, totals.tolist(), ids.tolist(), log_probs.tolist(), strict=True)
        for node, row_scores, total, top, top_log_probs in rows:
            node.reading = Reading(row_scores, total, top, top_log_probs)

    def _process(self, nodes: list[Node]) -> torch.Tensor:
        logits = torch.stack([node.logits for node in nodes if node.logits is not None])
        if not any(self._processors):
            return logits
        order = {id(node): index for index, node in enumerate(nodes)}
        groups: dict[tuple[int, int], list[int]] = {}  # rows of equal length go through the processors together
        for index, node in enumerate(nodes):
            groups.setdefault((node.row, node.position), []).append(index)
        for (row, _), indices in sorted(groups.items()):  # by position: what forbids a token comes before it
            # A processor is not asked what may follow a text that it has forbidden: a grammar has no answer.
            indices = [index for index in indices if not _is_forbidden(nodes[index], order, logits)]
            if indices:
                ids = [self._ids_to(nodes[index]) for index in indices]
                logits[indices] = self._processors[row](ids, logits[indices])
        return logits


def _is_forbidden(node: Node, order: dict[int, int], logits: torch.Tensor) -> bool:
    """Whether a token on the way to the node has been forbidden, here or in an earlier reading."""
    while node.parent is not None:
        above = node.parent
        scores = logits[order[id(above)]] if id(above) in order else above.reading.scores
        if scores[node.token] == -math.inf:
            return True
        node = above
    return False
