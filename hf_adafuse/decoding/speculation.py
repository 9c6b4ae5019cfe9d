"""How far the member that goes first proposes ahead of the round.

It may propose a later round before this one is settled, as if its best candidate had won. The others then read both
rounds in one pass. If another candidate wins, that work was in vain. Neither changes a result.
"""

from __future__ import annotations

from collections.abc import Callable

from ..members.member import Member
from ..trees.pass_policy import Policy, pays_ahead
from .proposer import Proposals, Proposer
from .requests import Requests

_NUM_BUCKETS = 4


class AcceptanceStats:
    """How often a member's best candidate has won, by the margin at which its last word began."""

    def __init__(self) -> None:
        self._wins = {bucket: [1.0, 2.0] for bucket in range(_NUM_BUCKETS)}  # wins, rounds: at first as good as a coin

    def add(self, margin: float, has_won: bool) -> None:
        """One round's outcome."""
        record = self._wins[_bucket(margin)]
        record[0] += has_won
        record[1] += 1

    def odds(self, margin: float) -> float:
        """That the best candidate wins, given the margin of its last word."""
        wins, rounds = self._wins[_bucket(margin)]
        return wins / rounds


def propose_ahead(
    proposer: Proposer,
    prompt_index: int,
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
        proposer (`Proposer`): of the member that goes first.
        prompt_index (`int`)
        proposals (`Proposals`): what it proposes in this round.
        sizes (`list[int]`): how many nodes its turn had to read, pass by pass.
        others (`list[Member]`): who will read what it proposes.
        record (`AcceptanceStats`): of whoever went first so far.
        is_last (`Callable`): whether no round can come after these texts.

    Returns:
        what it proposes, each as the texts of all rounds up to it.
    """
    member, chains, texts, ids = proposer.member, list[list[str]](), list[str](), list[int]()
    saved = sum(other.costs.seconds(2) for other in others)
    turn_cost, odds = sum(map(member.costs.seconds, sizes)), 1.0
    for _ in range(Policy.max_rounds_ahead):
        best = proposals.spans[0]
        odds *= record.odds(proposals.margins[-1]) if proposals.margins else 0.0
        texts = [*texts, best.text]
        is_full = member.room_in_tree(prompt_index) < sum(sizes)
        cannot = best.ends or not best.ids or is_full or is_last(texts)
        if cannot or not pays_ahead(odds, turn_cost, saved):
            break
        ids += best.ids
        proposals = yield from proposer.propose(member.path(prompt_index, ids)[-1])
        chains += [[*texts, span.text] for span in proposals.spans]
    return chains


def _bucket(margin: float) -> int:
    return min(int(margin * _NUM_BUCKETS), _NUM_BUCKETS - 1)
