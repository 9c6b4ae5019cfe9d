"""What a member is likely to need next, so that it can be read in a pass that is run anyway. None of it changes a
result.
"""

from __future__ import annotations

import math

from ..trees.nodes import Node
from .proposer import Proposer


class Prefetcher:
    """
    The nodes that one member will probably read.

    Args:
        proposer (`Proposer`): the member's.
    """

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self._member = proposer.member

    def add_first_nodes(self, root: Node) -> list[Node]:
        """The nodes that a proposal from a root will surely read first; none where the root has not been read."""
        if root.reading is None or not self._proposer.has_room(root):
            return []
        count = self._proposer.config.num_branches if self._proposer.is_uncertain(root) else 1
        best = list(zip(root.reading.top, root.reading.top_log_probs, strict=True))[:count]
        return [root.add_child(token) for token, p in best if p > -math.inf and token not in self._proposer.eos_ids]

    def add_greedy_nodes(self, node: Node) -> list[Node]:
        """The nodes with which it would greedily go on, as far as it has read; the last of them may be unread."""
        nodes = list[Node]()
        while node.reading is not None and self._proposer.has_room(node):
            token = node.reading.top[0]
            if token in self._proposer.eos_ids:
                break
            node = node.add_child(token)
            nodes.append(node)
        return nodes

    def greedy_text(self, prompt_index: int) -> str:
        """The text with which it would go on, as far as it has read: a draft for the others."""
        nodes = self.add_greedy_nodes(self._member.root(prompt_index))
        return self._member.vocabulary.text([node.token for node in nodes])

    def add_likely_nodes(self, prompt_index: int) -> list[Node]:
        """
        The nodes that it will probably read first when it is asked next: the root, what follows it, what follows the
        ends of the candidates, should one of them win, and each greedily on.
        """
        root = self._member.root(prompt_index)
        if root.reading is None:
            return [root]
        ends = [node for node in root.run_descendants() if node.ends_candidate and node.reading is not None]
        return [node for end in (root, *ends) for node in self._add_frontier(end)]

    def add_draft(self, prompt_index: int, ids: list[int]) -> list[Node]:
        """The nodes of a text that may come on the table, as far as the context holds it."""
        root = self._member.root(prompt_index)
        return root.add_path(ids[: int(max(0, min(len(ids), self._member.room_after(root))))])

    def _add_frontier(self, end: Node) -> list[Node]:
        firsts = self.add_first_nodes(end)
        if unread := [node for node in firsts if node.reading is None]:
            return unread
        return [node for first in firsts[:1] for node in self.add_greedy_nodes(first)[-1:] if node.reading is None]
