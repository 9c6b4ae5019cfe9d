"""A batch of token trees below the committed prefixes of one model: extend, read, commit. The `packed` backend.
Knows no text, word or other member.

One forward pass holds the missing nodes of every prompt, packed: `position_ids` are depths, and a 4-D mask lets a node
see its prompt's prefix and its own ancestors. What was committed is never run again; what hangs below it stays. Prompts
share one lane of the cache, so that no pass runs filler, until there is so much text that attention to the columns of
other prompts costs more; then each has a lane of its own.

    columns of a lane    prefix of prompt 0 | prefix of prompt 1 | nodes of either, as columns were free
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

# With more columns than this, each prompt has a lane of its own: break-even on CPU, measured with members of 80 M.
MOST_SHARED = 3072


class SlotTrees(Trees):
    """Trees whose keys and values are kept once, in the columns of one cache; see [`Trees`] for the arguments."""

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model, device)
        self._call = ModelCall(model, is_set_up=True)
        self._lanes: dict[int, int] = {}  # the lane of each active prompt
        self.most_shared = MOST_SHARED

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
        done = self.cache.width
        ids = torch.tensor([[0] * pad + row for pad, row in zip(pads, prompts, strict=True)], device=self.device)
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads], device=self.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        self.rows = [
            Row(index, list(row), list(range(pad, width)))
            for index, (row, pad) in enumerate(zip(prompts, pads, strict=True))
        ]
        self.active = list(range(len(prompts)))
        self._lanes = {index: index for index in self.active}
        self.cache.open([self.cache.take(lane, width - done) for lane in self.active])
        logits = self._forward(ids[:, done:], positions[:, done:], mask if any(pads) else None, self.cache, True)
        self.num_tokens += sum(width - max(done, pad) for pad in pads)
        for lane, pad in enumerate(pads):
            self.cache.release(lane, range(pad))
        if len(prompts) > 1 and self._shares(self.cache.num_used):
            self._arrange()
        return self._store([row.root for row in self.rows], logits[:, -1])

    def commit(self, index: int, path: list[Node]) -> None:
        """Make `path`, empty or not, part of row `index`'s prefix. What hangs below its end stays, all else goes."""
        row = self.rows[index]
        held = {node.slot for node in row.unsettled()}
        settled = [node.slot for node in self._settle(row, path)]
        row.slots += settled
        dead = held.difference(settled, [node.slot for node in row.unsettled()])
        self.cache.release(self._lanes[index], dead)

    def keys_values(self, index: int) -> KeysValues:
        """A copy of the keys and values of row `index`'s committed tokens, as far as they have been run."""
        return list(self.cache.gather([[(self._lanes[index], slot) for slot in self.rows[index].slots]]))

    def drop(self, finished: set[int]) -> None:
        """These rows need no more passes and cost nothing from here on."""
        leaving = finished.intersection(self.active)
        if not leaving:
            return
        is_shared = self.cache.num_lanes == 1
        for index in leaving:
            self.cache.release(self._lanes.pop(index), self.rows[index].held_slots())
        super().drop(finished)
        if not self.active:
            self.cache = SlotCache(1)  # the memory of the old one is free
        elif not is_shared or 2 * self.cache.num_used < self.cache.width:
            self._arrange()

    def _shares(self, num_columns: int) -> bool:
        """Whether prompts that hold so many columns share a lane."""
        return num_columns <= self.most_shared

    def _arrange(self) -> None:
        """Lay all columns out anew, without holes."""
        rows = {index: self.rows[index] for index in self.active}
        below = {index: row.unsettled() for index, row in rows.items()}
        held = {index: row.held_slots() for index, row in rows.items()}
        is_shared = self._shares(sum(map(len, held.values())))
        lanes = [self.active] if is_shared else [[index] for index in self.active]
        self.cache.arrange([[(self._lanes[index], slot) for index in lane for slot in held[index]] for lane in lanes])
        for number, lane in enumerate(lanes):
            first = 0
            for index in lane:
                row, after = rows[index], first + len(rows[index].slots)
                row.slots = list(range(first, after))
                if not row.pending:
                    row.root.slot = after - 1
                for slot, node in enumerate(below[index], after):
                    node.slot = slot
                first, self._lanes[index] = after + len(below[index]), number

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: Any, cache: Any, last_only: bool = False
    ) -> torch.Tensor:
        length = cache.get_seq_length()
        self.num_forwards += 1
        logits, _ = self._call(ids, positions, mask, cache, last_only=last_only)
        is_kept = cache.is_written if isinstance(cache, SlotCache) else cache.get_seq_length() > length
        if not is_kept:
            raise ForwardError("it does not keep its keys and values in the cache that it is given")
        return logits


class TokenTree(SlotTrees):
    """Trees of models that take a 4-D mask: one forward pass holds them packed."""

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model, device)
        self._masks = MaskMaker(model, device)

    @property
    def is_padded(self) -> bool:
        return self.cache.num_lanes > 1

    @torch.no_grad()
    def run(self, wanted: Iterable[Node]) -> list[Node]:
        """Run these nodes, and those above them, in one forward pass; returns the nodes newly run."""
        missing = missing_nodes(wanted)
        if not missing:
            return []
        if not self.is_padded and len(self.active) > 1 and not self._shares(self.cache.num_used):
            self._arrange()
        batch = [[node for node in missing if self._lanes[node.row] == lane] for lane in range(self.cache.num_lanes)]
        fillers = self._fill_up(batch)
        for index in {node.row for nodes in batch for node in nodes}:
            self._masks.place(index, self.rows[index].slots, self.cache.width)
        inputs = [
            [[node.token for node in nodes] for nodes in batch],
            [[node.position for node in nodes] for nodes in batch],
            [[node.row for node in nodes] for nodes in batch],
        ]
        ids, positions, prompts = torch.tensor(inputs)
        queries = [node for nodes in batch for node in nodes]
        seen = [
            (number, above.slot, node.position - above.position)
            for number, node in enumerate(queries)
            for above in node.lineage()
        ]
        mask = self._masks.make(prompts, positions, seen, self.cache.width)
        logits = self._forward(ids.to(self.device), positions.to(self.device), mask, self.cache).flatten(0, 1)
        self.num_tokens += len(missing)
        if fillers:
            own = [number for number, node in enumerate(queries) if node not in fillers]
            queries, logits = [queries[number] for number in own], logits[own]
        return self._store(queries, logits)

    def _fill_up(self, batch: list[list[Node]]) -> list[Node]:
        """Give the nodes of each lane columns; fill shorter lanes up with nodes whose columns stay free: these."""
        num_queries, fillers = max(map(len, batch)), list[Node]()
        for lane, nodes in enumerate(batch):
            new, num_missing = list(nodes), num_queries - len(nodes)
            if num_missing:
                filler = Node(0, None, self.active[lane], 0)  # where there are several lanes, each is one prompt's
                nodes += [filler] * num_missing
                new.append(filler)
                fillers.append(filler)
            for node, slot in zip(new, self.cache.take(lane, len(new)), strict=True):
                node.slot = slot
        self.cache.open([[node.slot for node in nodes] for nodes in batch])
        for filler in fillers:
            self.cache.release(self._lanes[filler.row], [filler.slot])
        return fillers

    def _arrange(self) -> None:
        super()._arrange()
        self._masks.forget()
