"""A batch of token trees below the committed prefixes of one model: extend, read, commit. The only module that calls
`model(...)`. Knows no text, word or other member.

One forward pass holds the missing nodes of every row, packed in one row each: `position_ids` are depths, and a 4-D mask
lets a node see the prefix and its own ancestors. What was committed is never run again; what hangs below it stays.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from .attention_mask import MaskMaker
from .kv_cache import KeysValues, make_cache, num_slots, row_slots, select_rows, select_slots
from .model_call import position_offset
from .token_nodes import ForwardError, Node, Row, Trees, missing_nodes

# The cache is compacted when at least this many of its slots, and this share, are dead: a copy costs like a pass.
_DEAD_SLOTS, _DEAD_SHARE = 16, 1 / 16


class TokenTree(Trees):
    """
    The trees of a batch of prompts under one model.

    Args:
        model (`PreTrainedModel`): called as it is; nothing of it is changed.
        device (`torch.device`): where its inputs go.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model, device)  # `active`: also the row behind each entry of the cache's batch
        self._masks = MaskMaker(model, device)
        self._offset = position_offset(model.config.get_text_config())
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.no_grad()
    def prefill(self, prompts: list[list[int]], cache: Any = None) -> list[Node]:
        """
        Read the prompts in one forward pass.

        Args:
            prompts (`list[list[int]]`): ids per row, unpadded, at least one each.
            cache (`DynamicCache`, *optional*): keys and values of the first columns of the left-padded prompts.

        Returns:
            the roots, one per row.
        """
        width = max(map(len, prompts))
        pads = [width - len(ids) for ids in prompts]
        self.cache = make_cache([]) if cache is None else cache
        done = num_slots(self.cache)
        ids = torch.tensor([[0] * pad + row for pad, row in zip(pads, prompts, strict=True)], device=self.device)
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads], device=self.device)
        self._positions = (mask.cumsum(-1) - 1).clamp(min=0)
        self._committed = mask.bool()
        self.rows = [
            Row(index, list(row), list(range(pad, width)))
            for index, (row, pad) in enumerate(zip(prompts, pads, strict=True))
        ]
        self.active = list(range(len(prompts)))
        logits = self._forward(ids[:, done:], self._positions[:, done:], mask if any(pads) else None, last_only=True)
        self.num_tokens += sum(width - max(done, pad) for pad in pads)
        roots = [row.root for row in self.rows]
        return self._store(roots, logits[:, -1])

    @torch.no_grad()
    def run(self, wanted: Iterable[Node]) -> list[Node]:
        """Run these nodes, and those above them, in one forward pass; returns the nodes newly run."""
        missing = missing_nodes(wanted)
        batch = [[node for node in missing if node.row == index] for index in self.active]
        num_queries = max(map(len, batch))
        if num_queries == 0:
            return []
        start = self._committed.shape[1]
        filler = [[0] * (num_queries - len(nodes)) for nodes in batch]
        ids = [[node.token for node in nodes] + fill for nodes, fill in zip(batch, filler, strict=True)]
        at = [[node.position for node in nodes] + fill for nodes, fill in zip(batch, filler, strict=True)]
        positions = torch.tensor(at, device=self.device)
        for nodes in batch:
            for slot, node in enumerate(nodes, start):
                node.slot = slot
        self._committed = torch.nn.functional.pad(self._committed, (0, num_queries))
        self._positions = torch.cat([self._positions, positions], dim=1)
        seen = [[[above.slot for above in node.lineage()] for node in nodes] for nodes in batch]
        mask = self._masks.make(self._committed, self._positions, positions, seen, start)
        logits = self._forward(torch.tensor(ids, device=self.device), positions, mask)
        self.num_tokens += sum(map(len, batch))
        entries = [(entry, offset) for entry, nodes in enumerate(batch) for offset in range(len(nodes))]
        rows, offsets = torch.tensor(entries, device=logits.device).unbind(1)
        return self._store([node for nodes in batch for node in nodes], logits[rows, offsets])

    def commit(self, index: int, path: list[Node]) -> None:
        """Make `path`, empty or not, part of row `index`'s prefix. What hangs below its end stays, all else goes."""
        row = self.rows[index]
        slots = [node.slot for node in self._settle(row, path)]
        row.slots.extend(slots)
        self._committed[self.active.index(index), slots] = True

    def compact(self) -> None:
        """Close the holes that dropped nodes left, where they are many: prefix first, then what hangs below it."""
        live = [self.rows[index].root.run_descendants() for index in self.active]
        rows = [self.rows[index] for index in self.active]
        counts = [len(row.slots) + len(nodes) for row, nodes in zip(rows, live, strict=True)]
        total, width = self._committed.shape[1], max(counts)
        if total - width < max(_DEAD_SLOTS, total * _DEAD_SHARE):
            return
        kept = []
        for row, nodes, count in zip(rows, live, counts, strict=True):
            pad, num_prefix = width - count, len(row.slots)
            kept.append([0] * pad + row.slots + [node.slot for node in nodes])
            row.slots = list(range(pad, pad + num_prefix))
            for slot, node in enumerate(nodes, pad + num_prefix):
                node.slot = slot
            if row.root.is_run:
                row.root.slot = row.slots[-1]
        slots = torch.tensor(kept, device=self.device)
        select_slots(self.cache, slots)
        self._positions = self._positions.gather(1, slots)
        self._committed = torch.zeros_like(slots, dtype=torch.bool)
        for entry, row in enumerate(rows):
            self._committed[entry, row.slots] = True

    def keys_values(self, index: int) -> KeysValues:
        """A copy of the keys and values of row `index`'s committed tokens, as far as they have been run."""
        return row_slots(self.cache, self.active.index(index), self.rows[index].slots)

    def drop(self, finished: set[int]) -> None:
        """These rows need no more passes and cost nothing from here on."""
        kept = [entry for entry, index in enumerate(self.active) if index not in finished]
        if len(kept) == len(self.active):
            return
        self.active = [self.active[entry] for entry in kept]
        if kept:
            select_rows(self.cache, kept)
            self._committed, self._positions = self._committed[kept], self._positions[kept]

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: Any, last_only: bool = False) -> torch.Tensor:
        extra = {"logits_to_keep": 1} if last_only and self._keeps_logits else {}
        self.num_forwards += 1
        try:
            output = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions + self._offset,
                past_key_values=self.cache,
                use_cache=True,
                return_dict=True,
                **extra,
            )
        except Exception as error:
            raise ForwardError(f"{type(error).__name__}: {error}") from error
        return output.logits  # type: ignore[no-any-return]
