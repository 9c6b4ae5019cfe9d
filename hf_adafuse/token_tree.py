"""A batch of token trees below the committed prefixes of one model: extend, read, commit. The `packed` backend.
Knows no text, word or other member.

One forward pass holds the missing nodes of every row, packed in one row each: `position_ids` are depths, and a 4-D mask
lets a node see the prefix and its own ancestors. What was committed is never run again; what hangs below it stays.

    columns of a row    padding | prefix | below the prefix: candidates, drafts | new nodes
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .attention_mask import MaskMaker
from .kv_cache import KeysValues
from .model_call import ModelCall
from .slot_cache import SlotCache
from .token_nodes import ForwardError, Node, Row, Trees, missing_nodes


class SlotTrees(Trees):
    """Trees whose keys and values are kept once, in the columns of one cache; see [`Trees`] for the arguments."""

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model, device)  # `active`: also the row behind each entry of the cache's batch
        self._call = ModelCall(model)
        self._moves: list[tuple[int, int, int]] = []  # of columns, due before the next pass

    @torch.no_grad()
    def prefill(self, prompts: list[list[int]], cache: KeysValues | None = None) -> list[Node]:
        """
        Read the prompts in one forward pass.

        Args:
            prompts (`list[list[int]]`): ids per row, unpadded, at least one each.
            cache (`KeysValues`, *optional*): keys and values of the first columns of the left-padded prompts.

        Returns:
            the roots, one per row.
        """
        width = max(map(len, prompts))
        pads = [width - len(ids) for ids in prompts]
        self.cache = SlotCache(len(prompts))
        self.cache.fill(cache or [])
        done = self.cache.ends[0]
        ids = torch.tensor([[0] * pad + row for pad, row in zip(pads, prompts, strict=True)], device=self.device)
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads], device=self.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        self.rows = [
            Row(index, list(row), list(range(pad, width)))
            for index, (row, pad) in enumerate(zip(prompts, pads, strict=True))
        ]
        self.active = list(range(len(prompts)))
        num_new = [width - done] * len(prompts)
        self.cache.open(num_new)
        logits = self._forward(ids[:, done:], positions[:, done:], mask if any(pads) else None, self.cache, True)
        self.cache.close(num_new)
        self.num_tokens += sum(width - max(done, pad) for pad in pads)
        return self._store([row.root for row in self.rows], logits[:, -1])

    def commit(self, index: int, path: list[Node]) -> None:
        """Make `path`, empty or not, part of row `index`'s prefix. What hangs below its end stays, all else goes."""
        row, entry = self.rows[index], self.active.index(index)
        if any(move[0] == entry for move in self._moves):
            self._move()
        settled = self._settle(row, path)
        live = sorted(row.root.run_descendants(), key=lambda node: node.slot)
        first = row.slots[-1] + 1
        row.slots.extend(range(first, first + len(settled)))
        for slot, node in enumerate([*settled, *live], first):
            if node.slot != slot:
                self._moves.append((entry, node.slot, slot))
                node.slot = slot
        end = first + len(settled) + len(live)
        self.cache.ends = [*self.cache.ends[:entry], end, *self.cache.ends[entry + 1 :]]

    def keys_values(self, index: int) -> KeysValues:
        """A copy of the keys and values of row `index`'s committed tokens, as far as they have been run."""
        self._move()
        slots = self.rows[index].slots
        return self.cache.row(self.active.index(index), slots[0], slots[-1] + 1)

    def drop(self, finished: set[int]) -> None:
        """These rows need no more passes and cost nothing from here on."""
        kept = [entry for entry, index in enumerate(self.active) if index not in finished]
        if len(kept) == len(self.active):
            return
        self._move()
        super().drop(finished)
        self.cache.select_rows(kept)

    def _move(self) -> None:
        """Close the holes that dropped nodes left."""
        self.cache.move(self._moves)
        self._moves = []

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: Any, cache: Any, last_only: bool = False
    ) -> torch.Tensor:
        length = cache.get_seq_length()
        self.num_forwards += 1
        logits, _ = self._call(ids, positions, mask, cache, last_only=last_only)
        if not cache.layers or cache.layers[0].keys.shape[2] <= length:
            raise ForwardError("it does not keep its keys and values in the cache that it is given")
        return logits


class TokenTree(SlotTrees):
    """Trees of models that take a 4-D mask: one forward pass holds them packed."""

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model, device)
        self._masks = MaskMaker(model, device)

    @torch.no_grad()
    def run(self, wanted: Iterable[Node]) -> list[Node]:
        """Run these nodes, and those above them, in one forward pass; returns the nodes newly run."""
        missing = missing_nodes(wanted)
        batch = [[node for node in missing if node.row == index] for index in self.active]
        num_queries = max(map(len, batch))
        if num_queries == 0:
            return []
        self._move()
        filler = [[0] * (num_queries - len(nodes)) for nodes in batch]
        ids = [[node.token for node in nodes] + fill for nodes, fill in zip(batch, filler, strict=True)]
        at = [[node.position for node in nodes] + fill for nodes, fill in zip(batch, filler, strict=True)]
        ends = self.cache.ends
        for nodes, end in zip(batch, ends, strict=True):
            for slot, node in enumerate(nodes, end):
                node.slot = slot
        prefixes = [(slots[0], slots[-1] + 1) for slots in (self.rows[index].slots for index in self.active)]
        seen = [[[(above.slot, above.position) for above in node.lineage()] for node in nodes] for nodes in batch]
        num_new = list(map(len, batch))
        self.cache.open(num_new)
        mask = self._masks.make(prefixes, self.cache.width, at, seen)
        positions = torch.tensor(at, device=self.device)
        logits = self._forward(torch.tensor(ids, device=self.device), positions, mask, self.cache)
        self.cache.close(num_new)
        self.num_tokens += len(missing)
        entries = [(entry, offset) for entry, nodes in enumerate(batch) for offset in range(len(nodes))]
        rows, offsets = torch.tensor(entries, device=logits.device).unbind(1)
        return self._store([node for nodes in batch for node in nodes], logits[rows, offsets])
