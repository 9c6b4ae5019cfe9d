"""The last step of a round: the winner becomes part of every member's prefix, as far as nothing stops it, and is put on
record. Chooses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..members.member import Member, MemberError
from ..outputs import AdaFuseRound, cut_words
from ..trees.nodes import Node
from .pool import Candidate, Pool
from .progress import Prompt


class Committer:
    """
    Commits winners.

    Args:
        members (`list[Member]`): the main model first.
        should_stop (`Callable`): asked after each new token of a prompt; gives the reason to stop, or `None`.
        on_commit (`Callable`): told a prompt and its new ids after each round.
    """

    def __init__(
        self,
        members: Sequence[Member],
        should_stop: Callable[[Prompt], str | None],
        on_commit: Callable[[Prompt, list[int]], None],
    ) -> None:
        self._members = members
        self._should_stop = should_stop
        self._on_commit = on_commit

    def commit(self, prompt: Prompt, pool: Pool, winner: Candidate) -> None:
        """
        Append the winner to the prefix of every member, as far as no stopping criterion fires.

        Raises:
            MemberError: the main model's grammar rules it out, as it does with all else.
        """
        main = self._members[0]
        ids = pool.encode_for(0, winner)
        end_token = winner.end_token
        if winner.ends and end_token is None:
            end_token = main.best_end(prompt.index, ids)

        def record(num_taken: int, is_whole: bool) -> AdaFuseRound:
            text = winner.text if num_taken >= len(ids) else main.vocabulary.text(ids[:num_taken])
            return _record(pool, winner, text, num_taken, is_whole)

        for k in sorted(winner.proposers):
            self._members[k].num_wins += 1
        if self.commit_ids(prompt, ids, end_token, record):
            for k, member in enumerate(self._members[1:], start=1):
                member.commit(prompt.index, pool.encode_for(k, winner))
        # What a method writes itself is a whole answer, also where no token says so.
        if not winner.proposers:
            prompt.finish("stop")

    def commit_ids(
        self, prompt: Prompt, ids: list[int], end_token: int | None, record: Callable[[int, bool], AdaFuseRound]
    ) -> bool:
        """
        Append ids to the main model's prefix, as far as no stopping criterion fires; the other members' are the
        caller's to extend.

        Args:
            prompt (`Prompt`), ids (`list[int]`)
            end_token (`int`, *optional*): the end-of-sequence token after them.
            record (`Callable`): the round, by the number of tokens taken and whether they are all.

        Returns:
            whether all were taken.

        Raises:
            MemberError: the main model's grammar rules them out.
        """
        main = self._members[0]
        nodes = main.path(prompt.index, ids)
        tokens = ids if end_token is None else [*ids, end_token]
        pairs = zip(nodes, tokens, strict=False)
        if prompt.is_strict and any(node.reading and node.reading.forbids(token) for node, token in pairs):
            raise MemberError(main, "it has no word that its grammar and its other logits processors allow")
        num_taken = self._append(prompt, tokens, nodes, ends=end_token is not None)
        is_whole = num_taken == len(tokens)
        if end_token is not None and is_whole:
            prompt.finish("stop")
        prompt.rounds.append(record(num_taken, is_whole))
        main.commit(prompt.index, ids[:num_taken])
        self._on_commit(prompt, tokens[:num_taken])
        return is_whole

    def _append(self, prompt: Prompt, tokens: list[int], nodes: list[Node], ends: bool) -> int:
        """Take the tokens one by one until a criterion fires; returns how many were taken."""
        for taken, (token, node) in enumerate(zip(tokens, nodes, strict=False), start=1):
            prompt.ids.append(token)
            if prompt.keeps_logits:
                assert node.logits is not None
                # Copies: whoever gets them may write into them.
                prompt.scores.append(node.reading.row.to(torch.float32, copy=True))
                prompt.logits.append(node.logits.to(torch.float32, copy=True))
            if (reason := self._should_stop(prompt)) is not None:
                # An end-of-sequence token that comes with the last token that the length allows is the end.
                prompt.finish("stop" if taken == len(tokens) and ends else reason)
                return taken
        return len(tokens)


def _record(pool: Pool, winner: Candidate, text: str, num_taken: int, is_whole: bool) -> AdaFuseRound:
    ranked, words = pool.ranked(), cut_words(list(winner.words), text)
    return AdaFuseRound(
        text=text,
        words=words,
        ends=winner.ends and is_whole,
        proposer=min(winner.proposers, default=None),
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
