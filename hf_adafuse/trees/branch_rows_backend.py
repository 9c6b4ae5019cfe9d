"""Branch rows, for attention models that take no 4-D mask (flash-attention, ALiBi): each branch is a row of the batch,
which reads a copy of its prefix's keys.

The keys and values of all nodes are kept once, in columns, as under tree attention. For each new chain of nodes a pass
gathers the columns above it, padded on the left, and reads the chain, padded on the right. The new keys go back into
columns.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .backend import to_device
from .kv_cache import make_cache
from .kv_cache_backend import KVCacheBackend
from .nodes import Node, leaves_of, missing_nodes

_ROW = 0  # all prompts share one row of the cache: each pass gathers what it reads


class BranchRowsBackend(KVCacheBackend):
    """The trees of a batch of prompts under an attention model; see [`Backend`] for the arguments."""

    @property
    def is_padded(self) -> bool:
        return len(self.active) > 1

    @torch.no_grad()
    def run(self, nodes: Iterable[Node]) -> list[Node]:
        """Run these nodes, and those above them, in one forward pass; returns the newly computed nodes."""
        missing = missing_nodes(nodes)
        if not missing:
            return []
        chains = [[node for node in leaf.lineage() if not node.is_computed] for leaf in leaves_of(missing)]
        pasts = [self._columns_above(chain[0]) for chain in chains]
        width = max(map(len, pasts))
        length = max(map(len, chains))
        padded_pasts = [[0] * (width - len(past)) + past for past in pasts]  # the mask hides padding
        fork = make_cache(list(self.cache.gather([[(_ROW, column) for column in past] for past in padded_pasts])))
        ids = [[node.token for node in chain] + [0] * (length - len(chain)) for chain in chains]
        rows = [
            [0] * (width - len(past)) + [1] * (len(past) + len(chain)) + [0] * (length - len(chain))
            for past, chain in zip(pasts, chains, strict=True)
        ]
        mask = to_device(rows, self.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, width:]
        logits = self._forward(to_device(ids, self.device), positions, None if all(map(all, rows)) else mask, fork)
        self.num_tokens += sum(map(len, chains))
        found = _places(missing, chains)
        columns = self.slots.allocate_for_nodes(missing)
        self.cache.append(fork, [(row, width + offset) for row, offset in found], columns, self.slots.width)
        entries, offsets = to_device(found, logits.device).unbind(1)
        return self._store(missing, logits[entries, offsets])

    def _columns_above(self, node: Node) -> list[int]:
        """The columns of all that a node sees before it, in order."""
        below = self.slots.above(node.parent) if node.parent is not None else []
        return self.slots.prefix[node.prompt_index] + [column for column, _ in below]

    def _shares_row(self, num_columns: int) -> bool:
        return True


def _places(nodes: list[Node], chains: list[list[Node]]) -> list[tuple[int, int]]:
    """The chain of each node, the first where it is in several, and its place in it."""
    places: dict[int, tuple[int, int]] = {}
    for number, chain in enumerate(chains):
        for offset, node in enumerate(chain):
            places.setdefault(id(node), (number, offset))
    return [places[id(node)] for node in nodes]
