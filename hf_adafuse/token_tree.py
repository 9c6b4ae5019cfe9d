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

# The cache is compacted when at least this many of its slots, and this share, are dead: a copy costs like a pass.
_DEAD_SLOTS, _DEAD_SHARE = 16, 1 / 16


class ForwardError(Exception):
    """A model raised, ran out of memory or returned NaN; the reason is its `__cause__` or its text."""


class Node:
    """
    One token below (or at the end of) the committed prefix.

    Attributes:
        row (`int`): the prompt whose tree it is in.
        position (`int`): the number of tokens before it.
        slot (`int`): its column in the cache, -1 until it has been run.
        logits (`torch.FloatTensor` of shape `(vocab_size,)`): of the token after it, in float32, once it has been run.
        reading: what its member made of the logits.
    """

    __slots__ = ("children", "logits", "parent", "position", "reading", "row", "slot", "token")

    def __init__(self, token: int, parent: Node | None, row: int, position: int) -> None:
        self.token, self.parent, self.row, self.position = token, parent, row, position
        self.slot = -1
        self.children: dict[int, Node] = {}
        self.logits: torch.Tensor | None = None
        self.reading: Any = None

    @property
    def is_run(self) -> bool:
        return self.slot >= 0

    def child(self, token: int) -> Node:
        """The node of `token` after this one; made, not run, when it is new."""
        node = self.children.get(token)
        if node is None:
            node = self.children[token] = Node(token, self, self.row, self.position + 1)
        return node

    def path(self, tokens: Iterable[int]) -> list[Node]:
        """The nodes of `tokens`, one below the other, below this one."""
        nodes, node = [], self
        for token in tokens:
            node = node.child(token)
            nodes.append(node)
        return nodes

    def lineage(self) -> list[Node]:
        """This node and those above it, as far up as they are not settled in the prefix, top first."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def run_descendants(self) -> list[Node]:
        """The nodes below this one that have been run, parents before children."""
        nodes = [child for child in self.children.values() if child.is_run]
        for node in nodes:  # grows as it goes
            nodes.extend(child for child in node.children.values() if child.is_run)
        return nodes


class Row:
    """One prompt's tree: its committed ids, the slots of those run, those still to run, and the root, the last one."""

    def __init__(self, index: int, ids: list[int], slots: list[int]) -> None:
        self.ids, self.slots = ids, slots
        self.pending: list[Node] = []
        self.root = Node(ids[-1], None, index, len(ids) - 1)
        self.root.slot = slots[-1]


class TokenTree:
    """
    The trees of a batch of prompts under one model.

    Args:
        model (`PreTrainedModel`): called as it is; nothing of it is changed.
        device (`torch.device`): where its inputs go.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model, self.device = model, device
        self.rows: list[Row] = []
        self.active: list[int] = []  # the row behind each entry of the cache's batch
        self.num_forwards = self.num_tokens = 0
        self._masks = MaskMaker(model, device)
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
        missing = _missing(wanted)
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

    def ids_to(self, node: Node) -> list[int]:
        """All ids of the node's row up to it."""
        row, below = self.rows[node.row], []
        while node.position > row.root.position and node.parent is not None:
            below.append(node.token)
            node = node.parent
        return row.ids[: node.position + 1] + below[::-1]

    def commit(self, index: int, path: list[Node]) -> None:
        """Make `path`, empty or not, part of row `index`'s prefix. What hangs below its end stays, all else goes."""
        row = self.rows[index]
        row.ids.extend(node.token for node in path)
        row.pending.extend(path)
        row.root = path[-1] if path else row.root
        settled = 0
        while settled < len(row.pending) and row.pending[settled].is_run:
            settled += 1
        slots = [node.slot for node in row.pending[:settled]]
        row.slots.extend(slots)
        self._committed[self.active.index(index), slots] = True
        row.pending = row.pending[settled:]
        (row.pending[0] if row.pending else row.root).parent = None

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
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                return_dict=True,
                **extra,
            )
        except Exception as error:
            raise ForwardError(f"{type(error).__name__}: {error}") from error
        return output.logits  # type: ignore[no-any-return]

    def _store(self, nodes: list[Node], logits: torch.Tensor) -> list[Node]:
        logits = logits.float()
        if not torch.isfinite(logits.amax(-1)).all():
            raise ForwardError("its logits are NaN" if logits.isnan().any() else "its logits are infinite")
        for node, row in zip(nodes, logits, strict=True):
            node.logits = row
        return nodes


def _missing(nodes: Iterable[Node]) -> list[Node]:
    """The nodes not yet run among these and those above them, each once, parents first."""
    missing = {id(above): above for node in nodes for above in node.lineage() if not above.is_run}
    return list(missing.values())
