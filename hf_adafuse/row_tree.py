"""Trees of attention models that take no 4-D mask (flash-attention, ALiBi): each branch is a row of a batch that reads
a copy of its prefix's keys. The `rows` backend.

The keys and values of all nodes are kept once, in slots, as in a packed tree. A forward pass gathers for each new chain
the slots above it, padded on the left, and reads the chain, padded on the right; the new keys go back into the slots.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .kv_cache import KeysValues, make_cache
from .model_call import ModelCall
from .row_cache import append_slots, gather_rows, num_slots, row_slots, select_rows, select_slots
from .token_nodes import ForwardError, Node, Row, Trees, missing_nodes


class RowTree(Trees):
    """The trees of a batch of prompts under an attention model; see [`Trees`] for the arguments."""

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model, device)
        self._call = ModelCall(model)

    @torch.no_grad()
    def prefill(self, prompts: list[list[int]], cache: Any = None) -> list[Node]:
        """Read the prompts in one forward pass, after a `cache` of their first left-padded columns where there is one;
        returns the roots, one per row."""
        width = max(map(len, prompts))
        pads = [width - len(ids) for ids in prompts]
        self.cache = make_cache([]) if cache is None else cache
        done = num_slots(self.cache)
        self.rows = [
            Row(index, list(ids), list(range(pad, width)))
            for index, (ids, pad) in enumerate(zip(prompts, pads, strict=True))
        ]
        self.active = list(range(len(prompts)))
        ids = [[0] * pad + row for pad, row in zip(pads, prompts, strict=True)]
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads], device=self.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._forward([row[done:] for row in ids], positions[:, done:], mask, self.cache, last_only=True)
        self.num_tokens += sum(width - max(done, pad) for pad in pads)
        return self._store([row.root for row in self.rows], logits[:, -1])

    @torch.no_grad()
    def run(self, wanted: Iterable[Node]) -> list[Node]:
        """Run these nodes, and those above them, in one forward pass; returns the nodes newly run."""
        missing = missing_nodes(wanted)
        if not missing:
            return []
        inner = {id(node.parent) for node in missing}
        leaves = [node for node in missing if id(node) not in inner]
        chains = [[node for node in leaf.lineage() if not node.is_run] for leaf in leaves]
        pasts = [self._slots_above(chain[0]) for chain in chains]
        width, length = max(map(len, pasts)), max(map(len, chains))
        entries = [self.active.index(leaf.row) for leaf in leaves]
        fork = gather_rows(self.cache, entries, [[0] * (width - len(slots)) + slots for slots in pasts])
        ids = [[node.token for node in chain] + [0] * (length - len(chain)) for chain in chains]
        mask = torch.tensor(
            [
                [0] * (width - len(past)) + [1] * (len(past) + len(chain)) + [0] * (length - len(chain))
                for past, chain in zip(pasts, chains, strict=True)
            ],
            device=self.device,
        )
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, width:]
        logits = self._forward(ids, positions, mask, fork)
        self.num_tokens += sum(map(len, chains))
        places: dict[int, tuple[int, int]] = {}
        for chain_index, chain in enumerate(chains):
            for offset, node in enumerate(chain):
                places.setdefault(id(node), (chain_index, offset))
        self._keep(fork, missing, places, width)
        rows, offsets = torch.tensor([places[id(node)] for node in missing], device=logits.device).unbind(1)
        return self._store(missing, logits[rows, offsets])

    def commit(self, index: int, path: list[Node]) -> None:
        """Make `path`, empty or not, part of row `index`'s prefix. What hangs below its end stays, all else goes."""
        row = self.rows[index]
        row.slots.extend(node.slot for node in self._settle(row, path))

    def compact(self) -> None:
        """Close the holes that dropped nodes left, where they are many."""
        kept = self._renumber(num_slots(self.cache))
        if kept is not None:
            select_slots(self.cache, torch.tensor(kept, device=self.device))

    def keys_values(self, index: int) -> KeysValues:
        """A copy of the keys and values of row `index`'s committed tokens, as far as they have been run."""
        return row_slots(self.cache, self.active.index(index), self.rows[index].slots)

    def drop(self, finished: set[int]) -> None:
        """These rows need no more passes and cost nothing from here on."""
        kept = [entry for entry, index in enumerate(self.active) if index not in finished]
        if len(kept) < len(self.active):
            self.active = [self.active[entry] for entry in kept]
            if kept:
                select_rows(self.cache, kept)

    def _slots_above(self, node: Node) -> list[int]:
        row = self.rows[node.row]
        above = [] if node.parent is None else node.parent.lineage()
        return row.slots + [other.slot for other in above if row.pending or other is not row.root]

    def _keep(self, fork: Any, nodes: list[Node], places: dict[int, tuple[int, int]], start: int) -> None:
        """Give the nodes slots and put there the keys that the pass made of them, from slot `start` of the fork on."""
        batch = [[node for node in nodes if node.row == index] for index in self.active]
        num_new, first = max(map(len, batch)), num_slots(self.cache)
        sources = [[places[id(node)] for node in new] + [(0, 0)] * (num_new - len(new)) for new in batch]
        append_slots(self.cache, fork, torch.tensor(sources, device=self.device), start)
        for new in batch:
            for slot, node in enumerate(new, first):
                node.slot = slot

    def _forward(
        self, ids: list[list[int]], positions: torch.Tensor, mask: torch.Tensor, cache: Any, last_only: bool = False
    ) -> torch.Tensor:
        length = num_slots(cache) + len(ids[0])
        logits, _ = self._call(
            torch.tensor(ids, device=self.device),
            positions,
            None if bool(mask.all()) else mask,
            cache,
            last_only=last_only,
        )
        self.num_forwards += 1
        if num_slots(cache) != length:
            raise ForwardError("it does not keep its keys and values in the cache that it is given")
        return logits
