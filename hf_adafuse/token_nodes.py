"""The nodes of a token tree and what the backends share: bookkeeping of rows, ids and logits. Calls no model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .kv_cache import KeysValues


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
        is_end (`bool`): whether a candidate ends here, so that the next round may begin here.
        memory: what the model remembers of the tokens up to it, where a backend keeps that per node.
    """

    __slots__ = ("children", "is_end", "logits", "memory", "parent", "position", "reading", "row", "slot", "token")

    def __init__(self, token: int, parent: Node | None, row: int, position: int) -> None:
        self.token, self.parent, self.row, self.position = token, parent, row, position
        self.slot = -1
        self.is_end = False
        self.children: dict[int, Node] = {}
        self.logits: torch.Tensor | None = None
        self.reading: Any = None
        self.memory: Any = None

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

    def unsettled(self) -> list[Node]:
        """The nodes that have been run and are not yet settled in the prefix, parents before children."""
        top = self.pending[0] if self.pending else self.root
        return ([top] if self.pending and top.is_run else []) + top.run_descendants()

    def held_slots(self) -> list[int]:
        """The slots of all that has been run: of the prefix, then of what is not settled in it."""
        return self.slots + [node.slot for node in self.unsettled()]


class Trees:
    """
    What every backend keeps for the trees of a batch of prompts under one model.

    Args:
        model (`PreTrainedModel`): called as it is; nothing of it is changed.
        device (`torch.device`): where its inputs go.

    Attributes:
        rows (`list[Row]`): one per prompt.
        active (`list[int]`): the prompts that still need passes.
        num_forwards (`int`), num_tokens (`int`): what has been run so far.
        keeps_keys (`bool`): whether it keeps keys and values, and can start from those of a caller.
        rides_free (`bool`): whether a few more nodes cost a pass little.
    """

    keeps_keys = rides_free = True

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model, self.device = model, device
        self.rows: Sequence[Row] = []
        self.active: list[int] = []
        self.num_forwards = self.num_tokens = 0

    # What a backend adds to these: the passes, and what it keeps of them.

    @property
    def is_padded(self) -> bool:
        """Whether rows that need fewer nodes than others are filled up."""
        return False

    def prefill(self, prompts: list[list[int]], cache: KeysValues | None = None) -> list[Node]:
        """
        Read the prompts.

        Args:
            prompts (`list[list[int]]`): ids per row, unpadded, at least one each.
            cache (`KeysValues`, *optional*): keys and values of the first columns of the left-padded prompts.

        Returns:
            the roots, one per row.
        """
        raise NotImplementedError

    def run(self, wanted: Iterable[Node]) -> list[Node]:
        """Run these nodes, and those above them; returns the nodes newly run."""
        raise NotImplementedError

    def commit(self, index: int, path: list[Node]) -> None:
        """Make `path`, empty or not, part of row `index`'s prefix. What hangs below its end stays, all else goes."""
        raise NotImplementedError

    def keys_values(self, index: int) -> KeysValues | None:
        """A copy of the keys and values of row `index`'s committed tokens, as far as they have been run; `None` where
        the backend has none to give."""
        return None

    def drop(self, finished: set[int]) -> None:
        """These rows need no more passes and cost nothing from here on."""
        for index in finished.intersection(self.active):
            row = self.rows[index]
            _take_apart(row.pending[0] if row.pending else row.root)
            row.root.logits = row.root.reading = None  # of a tensor of the whole pass
        self.active = [index for index in self.active if index not in finished]

    def ids_to(self, node: Node) -> list[int]:
        """All ids of the node's row up to it."""
        row, below = self.rows[node.row], []
        while node.position > row.root.position and node.parent is not None:
            below.append(node.token)
            node = node.parent
        return row.ids[: node.position + 1] + below[::-1]

    def _settle(self, row: Row, path: list[Node]) -> list[Node]:
        """Append `path` to the row's prefix; returns the committed nodes that are newly settled: they have been run."""
        top = row.pending[0] if row.pending else row.root
        row.ids.extend(node.token for node in path)
        row.pending.extend(path)
        row.root = path[-1] if path else row.root
        num_settled = 0
        while num_settled < len(row.pending) and row.pending[num_settled].is_run:
            num_settled += 1
        settled, row.pending = row.pending[:num_settled], row.pending[num_settled:]
        kept = row.pending[0] if row.pending else row.root
        kept.parent = None
        if kept is not top:
            _take_apart(top, kept)
        return settled

    def _store(self, nodes: list[Node], logits: torch.Tensor) -> list[Node]:
        logits = logits.float()
        if not all(map(math.isfinite, logits.amax(-1).tolist())):
            raise ForwardError("its logits are NaN" if logits.isnan().any() else "its logits are infinite")
        for node, row in zip(nodes, logits, strict=True):
            node.logits = row
        return nodes


def _take_apart(top: Node, kept: Node | None = None) -> None:
    """Nodes refer to each other: those that are dead are parted, or their logits would wait for the collector."""
    dead = [top]
    for node in dead:  # grows as it goes
        dead.extend(child for child in node.children.values() if child is not kept)
        node.children = {}


def missing_nodes(nodes: Iterable[Node]) -> list[Node]:
    """The nodes not yet run among these and those above them, each once, parents first."""
    missing = {id(above): above for node in nodes for above in node.lineage() if not above.is_run}
    return list(missing.values())


def leaves_of(nodes: list[Node]) -> list[Node]:
    """Those with none of the others directly below them."""
    inner = {id(node.parent) for node in nodes}
    return [node for node in nodes if id(node) not in inner]
