"""Token trees as data: a committed prefix, and the nodes below it.

The states of a node, as all docstrings call them:

| state | what it means | where it is kept |
|---|---|---|
| computed | a forward pass has run it, here or behind a server | `Node.is_computed` |
| read | its member has read its log-probabilities and best tokens; else it is unread | `Node.logprobs` is set |
| forgotten | read, and its scores are freed, but for those that were copied to the host | `NodeLogprobs.is_forgotten` |
| committed | its token is part of the text | `TokenTree.ids` |
| settled | committed and computed, as are all committed tokens before it | it has left the tree, or is `root` |
| pending | committed and not settled: it, or a committed token before it, is not computed | `TokenTree.pending` |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

# Of a node that no server has been asked about.
_NONE_KNOWN: Mapping[int, float] = MappingProxyType({})


class Node:
    """
    One token below (or at the end of) the committed prefix.

    Attributes:
        prompt_index (`int`): the prompt whose tree it is in.
        position (`int`): the number of tokens before it.
        is_computed (`bool`): whether a forward pass has run it, here or behind a server. Its logits may be freed
            again.
        logits (`torch.Tensor` of shape `(vocab_size,)`): the logits of the token after it, from when it is computed
            until they are freed; in the model's half precision, or in float32. The tensor is the node's own.
        logprobs (`NodeLogprobs` or `ServedLogprobs`): what its member has read off the logits: log-probabilities and
            the best tokens. `None` for an unread node.
        ends_candidate (`bool`): whether a candidate ends here, so that the next round may begin here.
        recurrent_state: under `RecurrentBackend`, what the model remembers of the text up to this token, where a chain
            of tokens ended here.
        known_log_probs (`dict[int, float]`): under a served member, the log-probabilities (nats) that the
            server has returned of tokens after this one, by token.
    """

    __slots__ = (
        "children",
        "ends_candidate",
        "is_computed",
        "known_log_probs",
        "logits",
        "logprobs",
        "parent",
        "position",
        "prompt_index",
        "recurrent_state",
        "token",
    )  # fmt: skip

    def __init__(self, token: int, parent: Node | None, prompt_index: int, position: int) -> None:
        self.token = token
        self.parent = parent
        self.prompt_index = prompt_index
        self.position = position
        self.is_computed = False
        self.ends_candidate = False
        self.children: dict[int, Node] = {}
        self.logits: torch.Tensor | None = None
        self.logprobs: Any = None
        self.recurrent_state: Any = None
        self.known_log_probs: Mapping[int, float] = _NONE_KNOWN

    def add_child(self, token: int) -> Node:
        """The child of this node with this token, made where there is none."""
        node = self.children.get(token)
        if node is None:
            node = self.children[token] = Node(token, self, self.prompt_index, self.position + 1)
        return node

    def add_path(self, tokens: Iterable[int]) -> list[Node]:
        """The chain of nodes of `tokens` below this one, made where there is none."""
        nodes = []
        node = self
        for token in tokens:
            node = node.add_child(token)
            nodes.append(node)
        return nodes

    def lineage(self) -> list[Node]:
        """This node and its ancestors from the tree's `top` on, top first."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def computed_descendants(self) -> list[Node]:
        """The computed descendants of this node whose ancestors below it are computed too, parents before children."""
        nodes = [child for child in self.children.values() if child.is_computed]
        for node in nodes:  # grows as it goes
            nodes.extend(child for child in node.children.values() if child.is_computed)
        return nodes


class TokenTree:
    """
    One prompt's tree under one model.

    Attributes:
        ids (`list[int]`): the committed ids.
        root (`Node`): the node of the last of them.
        pending (`list[Node]`): the pending nodes, in order; empty where all committed tokens are settled. The last of
            them is the root.
    """

    def __init__(self, prompt_index: int, ids: list[int]) -> None:
        self.ids = ids
        self.pending: list[Node] = []
        self.root = Node(ids[-1], None, prompt_index, len(ids) - 1)

    @property
    def top(self) -> Node:
        """The first pending node, or the root where there is none."""
        return self.pending[0] if self.pending else self.root

    def unsettled(self) -> list[Node]:
        """The computed nodes that are not settled, parents before children."""
        is_pending = bool(self.pending) and self.top.is_computed
        return ([self.top] if is_pending else []) + self.top.computed_descendants()

    def ids_to(self, node: Node) -> list[int]:
        """All ids up to a node."""
        return self.last_ids(node, node.position + 1)

    def last_ids(self, node: Node, number: int) -> list[int]:
        """The last `number` ids up to and with a node, or all."""
        below = list[int]()
        while len(below) < number and node.position > self.root.position and node.parent is not None:
            below.append(node.token)
            node = node.parent
        start = node.position + 1 - (number - len(below))
        return self.ids[max(0, start) : node.position + 1] + below[::-1]

    def commit(self, path: list[Node]) -> list[Node]:
        """
        Append `path` to the prefix. Nodes below its end stay, and all others are taken apart.

        Returns:
            the committed nodes that are newly settled.
        """
        top = self.top
        self.ids.extend(node.token for node in path)
        self.pending.extend(path)
        self.root = path[-1] if path else self.root
        num_settled = 0
        while num_settled < len(self.pending) and self.pending[num_settled].is_computed:
            num_settled += 1
        settled = self.pending[:num_settled]
        self.pending = self.pending[num_settled:]
        kept = self.top
        kept.parent = None
        if kept is not top:
            _take_apart(top, kept)
        return settled

    def close(self) -> None:
        """The prompt is finished: take all nodes below the prefix apart."""
        _take_apart(self.top)
        for node in {*self.pending, self.root}:  # they stay in the tree, which lasts as long as the call
            node.logits = node.logprobs = None


def _take_apart(top: Node, kept: Node | None = None) -> None:
    """Nodes refer to each other: those that are dead are parted, or their logits would wait for the collector."""
    dead = [top]
    for node in dead:  # grows as it goes
        dead.extend(child for child in node.children.values() if child is not kept)
        node.children = {}


def missing_nodes(nodes: Iterable[Node]) -> list[Node]:
    """The nodes among these and their ancestors that are not computed, each once, parents first."""
    missing = {id(above): above for node in nodes for above in node.lineage() if not above.is_computed}
    return list(missing.values())


def leaves_of(nodes: list[Node]) -> list[Node]:
    """The nodes among these that have none of the others as a child."""
    inner = {id(node.parent) for node in nodes}
    return [node for node in nodes if id(node) not in inner]
