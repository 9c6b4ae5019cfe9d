"""A whole answer that the members write together before any of it is committed: by rounds below the committed text."""

from __future__ import annotations

from collections.abc import Sequence

from ..members.member import Member
from ..outputs import cut_words
from ..trees.nodes import Node
from .answer_stops import AnswerStops, ids_up_to
from .pool import Pool
from .progress import Prompt
from .round import WrittenText


class JointAnswer(WrittenText):
    """
    An answer that grows below the end of each member's prefix.

    Args:
        members (`list[Member]`): the main model first.
        prompt (`Prompt`): what the answer answers.
        stops (`AnswerStops`): where an answer ends.
    """

    def __init__(self, members: Sequence[Member], prompt: Prompt, stops: AnswerStops) -> None:
        super().__init__(members, prompt)
        self._stops = stops
        self._ids: list[list[int]] = [[] for _ in members]
        self._text = ""
        self._words: list[str] = []
        self._ends = False  # the members have ended it
        self._is_over = False

    def ids(self, member_index: int) -> list[int]:
        return self._ids[member_index]

    def node(self, member_index: int) -> Node:
        return self.members[member_index].path(self.prompt.index, self._ids[member_index])[-1]

    def goes_on(self) -> bool:
        """Whether the members have not ended the answer, and neither a context nor a stopping criterion ends it."""
        if self._is_over or any(member.room_after(self.node(k)) < 1 for k, member in enumerate(self.members)):
            return False
        return not (self._text and self._stops(self.prompt.index, self._text, self._ids[0]))

    def append(self, pool: Pool) -> None:
        """Go on with the winner; without one, nothing may come, and the answer is over."""
        winner = pool.winner
        if winner is None:
            self._is_over = True
            return
        self._text += winner.text
        self._words += winner.words
        self._ends = self._is_over = winner.ends
        self._ids = [[*ids, *pool.encode_for(k, winner)] for k, ids in enumerate(self._ids)]

    def close(self) -> None:
        """Keep the answer up to where a stopping criterion ends it: nobody judges what the caller does not get."""
        kept = self._stops.cut(self.prompt.index, self._text, self._ids[0])
        if kept is not None:
            pairs = zip(self.members, self._ids, strict=True)
            self._ids = [ids_up_to(member.vocabulary, ids, kept) for member, ids in pairs]
            self._words = cut_words(self._words, kept)
            self._text = kept
            self._ends = False

    def add_to(self, pool: Pool) -> None:
        """Put the answer into a pool, behind the members' own."""
        if self._text or self._ends:
            pool.add_text(self._text, tuple(self._words), self._ends, dict(enumerate(self._ids)))
