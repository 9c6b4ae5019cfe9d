"""The text of a prompt that the caller gets: the winner of each round becomes part of every member's prefix, as far as
nothing stops it, and is put on record.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from ..members.member import Member, MemberError
from ..outputs import AdaFuseRound, cut_words
from ..trees.nodes import Node
from .pool import Candidate, Pool
from .progress import Prompt
from .proposer import MOST_SILENT
from .round import WrittenText


class CommittedText(WrittenText):
    """
    The committed text of one prompt.

    Args:
        members (`list[Member]`): the members, the main model first.
        prompt (`Prompt`): the row of the batch that the text belongs to.
        should_stop (`Callable`), on_commit (`Callable`): as of [`Decoder`].
        takes_answers (`bool`, *optional*, defaults to `False`): whether a winner is a whole answer.
    """

    # Who counts as the proposer of a text that no member has proposed.
    author: ClassVar[int | None] = None

    def __init__(
        self,
        members: Sequence[Member],
        prompt: Prompt,
        should_stop: Callable[[Prompt], str | None],
        on_commit: Callable[[Prompt, list[int]], None],
        takes_answers: bool = False,
    ) -> None:
        super().__init__(members, prompt)
        self._takes_answers = takes_answers
        self._should_stop = should_stop
        self._on_commit = on_commit

    def goes_on(self) -> bool:
        """Whether the prompt is not finished, and each member's context has room for a further token."""
        return not self.prompt.is_finished and self._full_member() is None

    def append(self, pool: Pool) -> None:
        """
        Append the winner to the prefix of every member, as far as no stopping criterion fires. A winner that has been
        dropped finishes the prompt: nothing else may come, and it does not fit into a context.

        Raises:
            MemberError: the main model's grammar rules it out, as it does with all else.
        """
        for member, number in zip(self.members, pool.num_proposals, strict=True):
            member.num_proposals += number
        winner = pool.winner
        assert winner is not None  # the main model's own word is taken where nothing else may come
        if winner.dropped is None:
            self._commit(pool, winner)
        elif (outgrown := self.outgrown(pool, winner)) is not None:
            self._stop_at_context(outgrown)

    def ids(self, member_index: int) -> list[int]:
        return []

    def node(self, member_index: int) -> Node:
        return self.members[member_index].root(self.prompt.index)

    def close(self) -> None:
        """Finish a prompt that has filled a member's context, with a warning."""
        full = None if self.prompt.is_finished else self._full_member()
        if full is not None:
            self._stop_at_context(full)

    def _full_member(self) -> Member | None:
        """The first member whose context has no room for a further token."""
        return next((member for k, member in enumerate(self.members) if member.room_after(self.node(k)) < 1), None)

    def _commit(self, pool: Pool, winner: Candidate) -> None:
        """
        Append a winner to the caller's ids, put the round on record, and commit the winner to every member.

        Raises:
            MemberError: as of `append`.
        """
        main = self.members[0]
        prompt = self.prompt
        prompt.asks = "text" if self._takes_answers else "all"  # the time has not cut it when it was written
        ids = pool.encode_for(0, winner)
        end_token = winner.end_token
        if winner.ends and end_token is None:
            end_token = main.best_end(prompt.index, ids)
        for k in winner.proposers:
            self.members[k].num_wins += 1
        nodes = main.path(prompt.index, ids)
        tokens = ids if end_token is None else [*ids, end_token]
        pairs = zip(nodes, tokens, strict=False)
        if prompt.is_strict and any(node.logprobs and node.logprobs.forbids(token) for node, token in pairs):
            raise MemberError(main, "it has no word that its grammar and its other logits processors allow")
        num_taken = self._take(tokens, nodes, ends=end_token is not None)
        is_whole = num_taken == len(tokens)
        if end_token is not None and is_whole:
            prompt.finish("stop")
        prompt.rounds.append(self._record(pool, winner, ids, num_taken, is_whole))
        main.commit(prompt.index, ids[:num_taken], is_last=prompt.is_finished)
        self._on_commit(prompt, tokens[:num_taken])
        if is_whole:
            self._extend_assistants(pool, winner)
        if self._takes_answers and self.goes_on():
            prompt.asks = "time"
            if self._has_got_stuck(winner, num_taken) or self._should_stop(prompt) is not None:
                prompt.finish("length")

    def _has_got_stuck(self, winner: Candidate, num_taken: int) -> bool:
        """Whether an answer has added so little to the main model's ids that its members would write it over and
        over."""
        num_written = max((len(winner.ids.get(k, ())) for k in winner.proposers), default=0)
        return num_written - num_taken >= MOST_SILENT

    def _take(self, tokens: list[int], nodes: list[Node], ends: bool) -> int:
        """Take the tokens one by one until a criterion fires; returns how many were taken."""
        prompt = self.prompt
        for taken, (token, node) in enumerate(zip(tokens, nodes, strict=False), start=1):
            prompt.ids.append(token)
            if prompt.keeps_logits:
                assert node.logits is not None
                # Copies: whoever gets them may write into them.
                prompt.scores.append(node.logprobs.row.to(torch.float32, copy=True))
                prompt.logits.append(node.logits.to(torch.float32, copy=True))
            if (reason := self._should_stop(prompt)) is not None:
                # An end-of-sequence token that comes with the last token that the length allows is the end.
                prompt.finish("stop" if taken == len(tokens) and ends else reason)
                return taken
        return len(tokens)

    def _record(self, pool: Pool, winner: Candidate, ids: list[int], num_taken: int, is_whole: bool) -> AdaFuseRound:
        """A round as the caller sees it, of whose winner `num_taken` of the main model's `ids` were taken."""
        ranked = pool.ranked()
        text, words = self._words_taken(winner, ids, num_taken)
        return AdaFuseRound(
            text=text,
            words=words,
            ends=winner.ends and is_whole,
            proposer=min(winner.proposers, default=self.author),
            winner=ranked.index(winner) if winner in ranked else None,
            candidates=pool.trace(),
            margins=pool.margins,
            num_tokens=num_taken,
            is_whole=is_whole,
            weights=pool.weights,
            criterion=pool.criterion,
            highest_wins=pool.highest_wins,
            confidences=winner.confidences[: len(words)] + [None] * (len(words) - len(winner.confidences)),
            confidence=winner.confidence,
        )

    def _words_taken(self, winner: Candidate, ids: list[int], num_taken: int) -> tuple[str, list[str]]:
        """The text and the words of a winner up to the last of its tokens that was taken."""
        is_cut = num_taken < len(ids)
        text = self.members[0].vocabulary.text(ids[:num_taken]) if is_cut else winner.text
        return text, cut_words(list(winner.words), text)

    def _extend_assistants(self, pool: Pool, winner: Candidate) -> None:
        """The assistants take what has been committed as a whole."""
        for k, member in enumerate(self.members[1:], start=1):
            member.commit(self.prompt.index, pool.encode_for(k, winner))
        # What no member has proposed is a whole answer, also where no token says so.
        if not winner.proposers:
            self.prompt.finish("stop")

    def _stop_at_context(self, member: Member) -> None:
        """Finish the prompt, and warn that the text outgrows the context of a member."""
        self.prompt.finish("length")
        warnings.warn(
            f"Generation of prompt {self.prompt.index} stopped early: the text outgrows {member.limit} of "
            f"{member.name} ({member.max_length} tokens). What was generated is kept.",
            UserWarning,
            stacklevel=2,
        )
