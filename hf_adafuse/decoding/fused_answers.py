"""The answer that a method writes of the members' answers: on the table beside them, and in their place where it can be
committed. Writes nothing itself; knows members, scores and the pool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..members.member import Member
from .pool import Candidate, Pool
from .progress import Prompt
from .requests import Requests
from .round_runner import RoundRunner
from .selector import Selector


class FusedAnswers:
    """
    Puts fused answers in the place of winners.

    Args:
        members (`list[Member]`): the main model first.
        runner (`RoundRunner`), selector (`Selector`)
    """

    def __init__(self, members: Sequence[Member], runner: RoundRunner, selector: Selector) -> None:
        self._members = members
        self._runner = runner
        self._selector = selector

    def replace(self, prompt: Prompt, pool: Pool, winner: Candidate) -> Requests[Candidate]:
        """What is committed in the place of a winner; the winner itself where nothing is written, or where that cannot
        be committed."""
        text = self._selector.fused_text(prompt, pool, winner)
        if text is None:
            return winner
        # An answer ends; without such a token of the main model's, where its text does.
        fused = pool.add_text(text, self._selector.words(text), ends=bool(self._members[0].eos_ids))
        if fused.proposers:
            return fused if text and fused.dropped is None and fused.score < math.inf else winner
        if not text:
            fused.dropped = "nothing was written"
            return winner
        self._runner.drop_unfit(prompt, pool)
        if fused.dropped is not None:
            return winner
        scored = yield from self._runner.score(prompt, pool, [fused])
        return fused if self._selector.admits(prompt, fused, scored) else winner
