"""Trees of models that remember by a state, wholly or in part (recurrent and hybrid models), or whose cache cannot be
padded: a snapshot per node where chains of tokens end. The `tokenwise` backend. Knows no keys and values.

Sequences are never padded: chains that have read as many tokens go together in one forward pass. A node inside a chain
has no snapshot; when something is to follow it, the model reads again from the nearest node above it that has one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .kv_cache import KeysValues
from .memory import grows, join, split
from .model_call import ModelCall
from .token_nodes import Node, Row, Trees, missing_nodes

_Below = dict[int, list[Node]]  # by a node's id: the nodes to read after it


class StateRow(Row):
    """One prompt's tree; `memory` is what the model remembers of its first `num_read` ids, all committed."""

    def __init__(self, index: int, ids: list[int], memory: Any) -> None:
        super().__init__(index, ids, [0])
        self.memory = self.root.memory = memory
        self.num_read = len(ids)


class Chain:
    """
    Tokens to read one after the other, up to a node after which chains branch, or nothing comes.

    Args:
        row (`StateRow`): what it belongs to.
        first (`Node`): its first node; tokens of the prefix that are to be read again come before it.
        below (`dict`): the nodes to read after each node.
    """

    def __init__(self, row: StateRow, first: Node, below: _Below) -> None:
        again: list[int] = []
        if first.parent is None:
            self.memory, self.num_read = row.memory, row.num_read
            again = row.ids[row.num_read : first.position]
        else:
            self.memory, self.num_read = first.parent.memory, first.position
        self.nodes = [first]
        while len(following := below.get(id(self.nodes[-1]), [])) == 1:
            self.nodes.append(following[0])
        self.following = following
        self.tokens = again + [node.token for node in self.nodes]

    def advance(self, count: int, memory: Any) -> list[tuple[int, Node]]:
        """Take `count` tokens as read and `memory` as what it gave; returns the nodes read, with their offsets."""
        num_again = len(self.tokens) - len(self.nodes)
        read = list(enumerate(self.nodes[: max(0, count - num_again)], start=num_again))
        self.tokens, self.nodes = self.tokens[count:], self.nodes[len(read) :]
        self.memory, self.num_read = memory, self.num_read + count
        if read:
            read[-1][1].memory = memory
        return read


class StateTree(Trees):
    """
    The trees of a batch of prompts under a model with any memory.

    Args:
        model (`PreTrainedModel`), device (`torch.device`): as in [`Trees`].
        max_tokens (`int`, *optional*): the most tokens a pass after the prompt; 1 where several at a time go wrong.
        max_rows (`int`, *optional*): the most sequences a pass; 1 where several at a time go wrong.
    """

    keeps_keys = rides_free = False

    def __init__(
        self, model: Any, device: torch.device, max_tokens: int | None = None, max_rows: int | None = None
    ) -> None:
        super().__init__(model, device)
        self._call, self._max_tokens, self._max_rows = ModelCall(model), max_tokens, max_rows
        self.rows: list[StateRow] = []

    @torch.no_grad()
    def prefill(self, prompts: list[list[int]], cache: KeysValues | None = None) -> list[Node]:
        """Read the prompts, those of one length in one pass; returns the roots, one per row. There is no `cache`."""
        self.active = list(range(len(prompts)))
        rows: dict[int, StateRow] = {}
        while waiting := [index for index in self.active if index not in rows]:
            batch = [index for index in waiting if len(prompts[index]) == len(prompts[waiting[0]])][: self._max_rows]
            logits, parts = self._forward([prompts[index] for index in batch], [0] * len(batch), None, last_only=True)
            for index, part in zip(batch, parts, strict=True):
                rows[index] = StateRow(index, list(prompts[index]), part)
            self._store([rows[index].root for index in batch], logits[:, -1])
        self.rows = [rows[index] for index in self.active]
        return [row.root for row in self.rows]

    @torch.no_grad()
    def run(self, wanted: Iterable[Node]) -> list[Node]:
        """Run these nodes, and those above them; returns the nodes newly run."""
        missing = missing_nodes(wanted)
        starts, below = _plan(missing)
        chains = [Chain(self.rows[node.row], node, below) for node in starts]
        while chains:
            group, count = self._next_pass(chains)
            self._read(group, count)
            ended = [chain for chain in group if not chain.tokens]
            chains = [chain for chain in chains if chain.tokens]
            chains += [Chain(self.rows[node.row], node, below) for chain in ended for node in chain.following]
        return missing

    def commit(self, index: int, path: list[Node]) -> None:
        """Make `path`, empty or not, part of row `index`'s prefix. What hangs below its end stays, all else goes."""
        row = self.rows[index]
        for node in self._settle(row, path):
            if node.memory is not None:
                row.memory, row.num_read = node.memory, node.position + 1

    def drop(self, finished: set[int]) -> None:
        """These rows need no more passes, and hold no memory from here on."""
        for index in finished.intersection(self.active):
            row = self.rows[index]
            row.memory = row.root.memory = None
        super().drop(finished)

    def _next_pass(self, chains: list[Chain]) -> tuple[list[Chain], int]:
        """The chains that go together, those that are behind first, and the number of tokens that each reads."""
        count = min(len(chain.tokens) for chain in chains)
        if grows(chains[0].memory):
            lengths = sorted({chain.num_read for chain in chains})
            chains = [chain for chain in chains if chain.num_read == lengths[0]]
            count = min(len(chain.tokens) for chain in chains)
            if len(lengths) > 1:
                count = min(count, lengths[1] - lengths[0])
        return chains[: self._max_rows], min(count, self._max_tokens or count)

    def _read(self, chains: list[Chain], count: int) -> None:
        tokens, starts = [chain.tokens[:count] for chain in chains], [chain.num_read for chain in chains]
        logits, memories = self._forward(tokens, starts, join([chain.memory for chain in chains]))
        new = [
            (node, entry, offset)
            for entry, (chain, memory) in enumerate(zip(chains, memories, strict=True))
            for offset, node in chain.advance(count, memory)
            if not node.is_run
        ]
        if new:
            for node, _, _ in new:
                node.slot = 0
            entries, offsets = torch.tensor([place for _, *place in new], device=logits.device).unbind(1)
            self._store([node for node, _, _ in new], logits[entries, offsets])

    def _forward(
        self, tokens: list[list[int]], starts: list[int], memory: Any, last_only: bool = False
    ) -> tuple[torch.Tensor, list[Any]]:
        """The logits of rows of tokens of one length, and each row's own memory after them."""
        ids = torch.tensor(tokens, device=self.device)
        positions = torch.tensor(starts, device=self.device)[:, None] + torch.arange(ids.shape[1], device=self.device)
        logits, memory = self._call(ids, positions, memory=memory, last_only=last_only)
        self.num_forwards += 1
        self.num_tokens += ids.numel()
        return logits, split(memory, len(tokens))


def _plan(missing: list[Node]) -> tuple[list[Node], _Below]:
    """Where reading starts, and what is read after each node: what is missing, and what leads to it from a snapshot."""
    reads = {id(node): node for node in missing}
    for node in missing:
        above = node.parent
        while above is not None and above.memory is None and id(above) not in reads:
            reads[id(above)] = above
            above = above.parent
    below: _Below = {}
    starts = []
    for node in reads.values():
        if node.parent is not None and id(node.parent) in reads:
            below.setdefault(id(node.parent), []).append(node)
        else:
            starts.append(node)
    return starts, below
