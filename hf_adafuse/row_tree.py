"""Trees of attention models that take no 4-D mask (flash-attention, ALiBi): each branch is a row of a batch that reads
a copy of its prefix's keys. The `rows` backend.

The keys and values of all nodes are kept once, in slots, as in a packed tree. A forward pass gathers for each new chain
the slots above it, padded on the left, and reads the chain, padded on the right; the new keys go back into the slots.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .kv_cache import make_cache
from .token_nodes import Node, leaves_of, missing_nodes
from .token_tree import SlotTrees


class RowTree(SlotTrees):
    """The trees of a batch of prompts under an attention model; see [`Trees`] for the arguments."""

    @property
    def is_padded(self) -> bool:
        return len(self.active) > 1

    @torch.no_grad()
    def run(self, wanted: Iterable[Node]) -> list[Node]:
        """Run these nodes, and those above them, in one forward pass; returns the nodes newly run."""
        missing = missing_nodes(wanted)
        if not missing:
            return []
        leaves = leaves_of(missing)
        chains = [[node for node in leaf.lineage() if not node.is_run] for leaf in leaves]
        pasts = [self._slots_above(chain[0]) for chain in chains]
        width, length = max(map(len, pasts)), max(map(len, chains))
        lane = 0  # all share it: each pass gathers what it reads
        sources = [[(lane, slot) for slot in [0] * (width - len(slots)) + slots] for slots in pasts]
        fork = make_cache(list(self.cache.gather(sources)))
        ids = [[node.token for node in chain] + [0] * (length - len(chain)) for chain in chains]
        mask = torch.tensor(
            [
                [0] * (width - len(past)) + [1] * (len(past) + len(chain)) + [0] * (length - len(chain))
                for past, chain in zip(pasts, chains, strict=True)
            ],
            device=self.device,
        )
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, width:]
        logits = self._forward(
            torch.tensor(ids, device=self.device), positions, None if bool(mask.all()) else mask, fork
        )
        self.num_tokens += sum(map(len, chains))
        places: dict[int, tuple[int, int]] = {}
        for chain_index, chain in enumerate(chains):
            for offset, node in enumerate(chain):
                places.setdefault(id(node), (chain_index, offset))
        found = [places[id(node)] for node in missing]
        columns = self.cache.take(lane, len(missing))
        for node, slot in zip(missing, columns, strict=True):
            node.slot = slot
        self.cache.append(fork, [(row, width + offset) for row, offset in found], columns)
        rows, offsets = torch.tensor(found, device=logits.device).unbind(1)
        return self._store(missing, logits[rows, offsets])

    def _slots_above(self, node: Node) -> list[int]:
        row = self.rows[node.row]
        above = [] if node.parent is None else node.parent.lineage()
        return row.slots + [other.slot for other in above if row.pending or other is not row.root]

    def _shares(self, num_columns: int) -> bool:
        return True
