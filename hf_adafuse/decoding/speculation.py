"""What is read before a round asks for it, so that passes are saved. None of it changes a result.

A [`Prefetcher`] names the nodes that a member will probably read next: they come along in a pass that is run anyway.
[`propose_ahead`] lets the member that goes first propose a later round before this one is settled, as if its best
candidate had won. The others then read both rounds in one pass. If another candidate wins, that work was in vain.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..members.member import Member
from ..trees.nodes import Node
from ..trees.pass_policy import pays_ahead, policy_for
from .proposer import Proposals, Proposer
from .requests import Requests

_NUM_BUCKETS = 4


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
        if root.logprobs is None or not self._proposer.has_room(root):
            return []
        count = self._proposer.config.num_branches if self._proposer.is_uncertain(root) else 1
        best = list(zip(root.logprobs.top, root.logprobs.top_log_probs, strict=True))[:count]
        return [root.add_child(token) for token, p in best if p > -math.inf and token not in self._proposer.eos_ids]

    def add_greedy_nodes(self, node: Node) -> list[Node]:
        """The nodes with which it would greedily go on, as far as it has read; the last of them may be unread."""
        nodes = list[Node]()
        while node.logprobs is not None and self._proposer.has_room(node):
            token = node.logprobs.top[0]
            if token in self._proposer.eos_ids:
                break
            node = node.add_child(token)
            nodes.append(node)
        return nodes

    def greedy_text(self, end: Node) -> str:
        """The text with which it would go on after a node, as far as it has read: the others may read it
        too, before it is proposed."""
        nodes = self.add_greedy_nodes(end)
        return self._member.vocabulary.text([node.token for node in nodes])

    def add_likely_nodes(self, prompt_index: int) -> list[Node]:
        """
        The nodes that it will probably read first when it is asked next: the root, what follows it, what follows the
        ends of the candidates, should one of them win, and each greedily on. There are none where more of the text than
        its last token is unread: the member has not been asked of late, and may not be again.
        """
        root = self._member.root(prompt_index)
        if root.logprobs is None:
            return [root] if root.parent is None or root.parent.is_computed else []
        ends = [node for node in root.computed_descendants() if node.ends_candidate and node.logprobs is not None]
        return [node for end in (root, *ends) for node in self._add_frontier(end)]

    def add_later_nodes(self, end: Node, ids: list[int]) -> list[Node]:
        """The nodes of a text that may come into the pool later, as far as the context holds it."""
        return end.add_path(ids[: int(max(0, min(len(ids), self._member.room_after(end))))])

    def _add_frontier(self, end: Node) -> list[Node]:
        firsts = self.add_first_nodes(end)
        if unread := [node for node in firsts if node.logprobs is None]:
            return unread
        return [node for first in firsts[:1] for node in self.add_greedy_nodes(first)[-1:] if node.logprobs is None]


class AcceptanceStats:
    """How often a member's best candidate has won, by the margin at which its last word began."""

    def __init__(self) -> None:
        self._wins = {bucket: [1.0, 2.0] for bucket in range(_NUM_BUCKETS)}  # wins, rounds: a share of 0.5

    def add(self, margin: float, has_won: bool) -> None:
        """One round's outcome."""
        record = self._wins[_bucket(margin)]
        record[0] += has_won
        record[1] += 1

    def win_probability(self, margin: float) -> float:
        """The probability that the best candidate wins, given the margin of its last word."""
        wins, rounds = self._wins[_bucket(margin)]
        return wins / rounds


def propose_ahead(
    proposer: Proposer,
    end: Node,
    proposals: Proposals,
    sizes: list[int],
    others: list[Member],
    record: AcceptanceStats,
    is_last: Callable[[list[str]], bool],
) -> Requests[list[list[str]]]:
    """
    Propose the next rounds as if the best candidates had won, where that is likely to pay; not where the tree, and with
    it the cache, would grow too large.

    Args:
        proposer (`Proposer`): the proposer of the member that goes first.
        end (`Node`): the end of the text in that member's tree.
        proposals (`Proposals`): what it proposes in this round.
        sizes (`list[int]`): per pass of its turn, how many nodes it had to compute.
        others (`list[Member]`): the members that will score its proposals.
        record (`AcceptanceStats`): how often the first member's best candidate has won so far.
        is_last (`Callable`): `is_last(texts)` says whether no round can come after these texts.

    Returns:
        what it proposes, each as the texts of all rounds up to it.
    """
    member = proposer.member
    saved = sum(other.costs.seconds(2) for other in others)
    turn_cost = sum(map(member.costs.seconds, sizes))
    win_probability = 1.0  # that the best candidates of all rounds so far win
    chains = list[list[str]]()
    texts = list[str]()
    ids = list[int]()
    for _ in range(policy_for(member.device).max_rounds_ahead):
        best = proposals.spans[0]
        win_probability *= record.win_probability(proposals.margins[-1]) if proposals.margins else 0.0
        texts = [*texts, best.text]
        is_full = member.room_in_tree(end.prompt_index) < sum(sizes)
        cannot = best.ends or not best.ids or is_full or is_last(texts)
        if cannot or not pays_ahead(win_probability, turn_cost, saved):
            break
        ids += best.ids
        proposals = yield from proposer.propose(end.add_path(ids)[-1])
        chains += [[*texts, span.text] for span in proposals.spans]
    return chains


def _bucket(margin: float) -> int:
    return min(int(margin * _NUM_BUCKETS), _NUM_BUCKETS - 1)
