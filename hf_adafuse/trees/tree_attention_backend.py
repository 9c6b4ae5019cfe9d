"""Tree attention, for models that take a 4-D mask: one forward pass holds all branches of all prompts.

A pass holds the missing nodes of every prompt: `position_ids` are depths, and the mask lets a node see its prompt's
prefix and its own ancestors. Passes of a compiled model are filled up to few shapes (`static_shapes`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .backend import to_device
from .kv_cache_backend import KVCacheBackend
from .nodes import Node, missing_nodes
from .static_shapes import memory_of, static_size
from .tree_mask import MaskMaker


class TreeAttentionBackend(KVCacheBackend):
    """Token trees under a 4-D mask: all branches of a prompt are in one row of a pass; see [`Backend`]."""

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model, device)
        self._masks = MaskMaker(model, device)
        self._memory = memory_of(model, is_kept=self.policy.is_filled_up)
        self._is_filled = self._memory is not None and self.policy.is_filled_up

    @property
    def is_padded(self) -> bool:
        return self.slots.num_rows > 1

    @torch.no_grad()
    def run(self, nodes: Iterable[Node]) -> list[Node]:
        """Run these nodes, and those above them, in one forward pass; returns the newly computed nodes."""
        missing = missing_nodes(nodes)
        if not missing:
            return []
        if not self.is_padded and len(self.active) > 1 and not self._shares_row(self.slots.num_used):
            self._rearrange()
        batch: list[list[Node]] = [[] for _ in range(self.slots.num_rows)]
        for node in missing:
            batch[self.slots.row_of[node.prompt_index]].append(node)
        filler = self._fill_up(batch)
        queries = [node for row in batch for node in row]
        asking = {node.prompt_index for node in queries}
        numbers = self._masks.place({index: self.slots.prefix[index] for index in asking}, self.cache.width)
        # Contiguous each, also of one token: a compiled model is compiled anew for other strides.
        ids, positions, prompts = torch.tensor(
            [
                [[node.token for node in row] for row in batch],
                [[node.position for node in row] for row in batch],
                [[numbers[node.prompt_index] for node in row] for row in batch],
            ],
            device="cpu",
        )
        mask = self._masks.make(prompts, positions, self._seen(queries), self.cache.width)
        logits = self._forward(to_device(ids, self.device), to_device(positions, self.device), mask, self.cache)
        logits = logits.flatten(0, 1)
        self.num_tokens += len(missing)
        own = [number for number, node in enumerate(queries) if node is not filler]
        if len(own) < len(queries):
            queries, logits = [queries[number] for number in own], logits[to_device(own, logits.device)]
        return self._store(queries, logits)

    def _fill_up(self, batch: list[list[Node]]) -> Node:
        """Give the nodes of each row columns; fill shorter rows up with a node whose columns stay free: this one."""
        num_queries = max(map(len, batch))
        if self._is_filled:
            num_queries = static_size(num_queries)
        filler = Node(0, None, self.active[0], 0)  # sees what any prompt sees: nobody looks at it
        columns: list[list[int]] = []
        spare: list[tuple[int, list[int]]] = []
        for row, nodes in enumerate(batch):
            taken = self.slots.allocate_for_nodes(nodes)
            num_missing = num_queries - len(nodes)
            if num_missing:
                nodes += [filler] * num_missing
                unused = self.slots.allocate_columns(row, 1)
                spare.append((row, unused))
                taken = taken + unused * num_missing
            columns.append(taken)
        width = self.slots.width
        if self._memory is not None:
            width = self._memory.hold(self.cache, static_size(width, self.policy.least_static_columns))
        self.cache.open(columns, width)
        for row, unused in spare:
            self.slots.free_columns(row, unused)
        return filler

    def _seen(self, queries: list[Node]) -> list[tuple[int, int, int]]:
        """What the queries see below the prefixes, as `MaskMaker.make` takes it."""
        return [
            (number, column, node.position - above.position)
            for number, node in enumerate(queries)
            for column, above in self.slots.above(node)
        ]

    def _leave_cache(self) -> None:
        if self._memory is not None:
            self._memory.release(self.cache)
        super()._leave_cache()

    def _is_sparse(self) -> bool:
        # Where shapes are to be few, rows stay until half of them are empty.
        is_full = self._is_filled and 2 * len(self.active) > self.slots.num_rows > 1
        return not is_full and super()._is_sparse()

    def _take_in(self, newcomers: KVCacheBackend) -> None:
        super()._take_in(newcomers)
        self._masks.forget()

    def _rearrange(self, prompts: list[int] | None = None) -> None:
        super()._rearrange(prompts)
        self._masks.forget()
