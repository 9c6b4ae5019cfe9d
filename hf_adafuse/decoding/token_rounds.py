"""Rounds in which tokens are fused: each member says what it would say next, and one text is committed.

The main model writes its own tokens. An assistant with the same tokenizer takes them as they are; another reads the
text: what it has not yet taken as its own is its tail, in bytes, below the end of its prefix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..members.distributions import Distribution, split_character, tokens_of
from ..members.member import Member, Span
from ..members.passes import unread
from ..outputs import AdaFuseCandidate, AdaFuseRound
from ..trees.nodes import Node
from .committer import Committer
from .member_weights import shares
from .progress import Prompt
from .requests import ForwardRequest, Requests
from .strategies.token_strategy import NextToken, TokenStrategy
from .words import is_mid_character


class TokenRounds:
    """
    The rounds of one prompt.

    Args:
        members (`list[Member]`): the main model first.
        prompt (`Prompt`)
        strategy (`TokenStrategy`): of the prompt.
        weights (`list[float]`): of the members.
        committer (`Committer`)
    """

    def __init__(
        self,
        members: Sequence[Member],
        prompt: Prompt,
        strategy: TokenStrategy,
        weights: Sequence[float],
        committer: Committer,
    ) -> None:
        self._members = members
        self._prompt = prompt
        self._strategy = strategy
        self._weights = weights
        self._committer = committer
        self._tails = [b""] * len(members)  # per member, the text that is not yet in its prefix
        self._unshown: list[int] = []  # the main model's last tokens, while they end inside a character
        main = members[0].vocabulary
        self._shares = [member.vocabulary.is_same_as(main) for member in members]

    def node(self, member_index: int) -> Node | None:
        """Where a member stands: the end of the text; `None` where it cannot write it."""
        member = self._members[member_index]
        if not self._tails[member_index]:
            return member.root(self._prompt.index)
        ids = tokens_of(member.vocabulary, self._tails[member_index])
        return None if ids is None else member.path(self._prompt.index, ids)[-1]

    def run_round(self) -> Requests[None]:
        """Ask the members for what comes next, and commit it."""
        distributions: list[Distribution | None] = [None] * len(self._members)
        for k, member in enumerate(self._members):
            node = self.node(k)
            if node is None or (k > 0 and distributions[0] is not None and not self._strategy.asks(distributions[0])):
                continue
            if missing := unread([node]):
                yield ForwardRequest(k, missing)
            distributions[k] = Distribution(member, node.reading)
            member.num_proposals += 1
        yield from self._fuse(distributions)

    def _fuse(self, distributions: Sequence[Distribution | None]) -> Requests[None]:
        """Commit what the method chooses; where the main model can say none of it, its own most likely token."""
        found = self._strategy.choose(distributions, self._weights)
        if not isinstance(found, list) or not all(isinstance(one, NextToken) for one in found):
            raise TypeError(
                f"What {type(self._strategy).__name__}.choose gives must be a list of NextToken, but is {found!r}. "
                "Mend the method."
            )
        for winner in found:
            if (yield from self._can_say(winner)):
                self._commit(winner, found, distributions)
                return
        token = self._members[0].root(self._prompt.index).reading.top[0]
        is_end = token in self._members[0].eos_ids
        own = NextToken(None if is_end else b"", [] if is_end else [token], 0.0, [None] * len(self._members))
        self._commit(own, [own], distributions)

    def _can_say(self, candidate: NextToken) -> Requests[bool]:
        """Whether the main model may write a text of several tokens, by its processors and its context."""
        main, ids = self._members[0], list(candidate.ids)
        if len(ids) > main.room_after(main.root(self._prompt.index)):
            return False
        if candidate.data is not None and not ids:
            return False  # nothing would be said, for ever
        if len(ids) < 2:
            return True
        span = Span(ids, False)
        if needed := main.needed_to_score(self._prompt.index, [span]):
            yield ForwardRequest(0, needed)
        path = main.path(self._prompt.index, ids)
        return not any(node.reading.forbids(token) for node, token in zip(path, ids, strict=False))

    def _commit(
        self, winner: NextToken, found: Sequence[NextToken], distributions: Sequence[Distribution | None]
    ) -> None:
        main = self._members[0]
        tops = [None if one is None else one.top(1) for one in distributions]
        proposers = [k for k, top in enumerate(tops) if top and top[0][0] == winner.data]
        end_token = main.root(self._prompt.index).reading.best_of(main.eos_ids) if winner.data is None else None

        def record(num_taken: int, is_whole: bool) -> AdaFuseRound:
            text = self._shown(list(winner.ids)[:num_taken])
            # The main model's own token, where all others were ruled out, has not been scored.
            is_scored = winner.score < math.inf and any(value is not None for value in winner.log_probs)
            probability = min(math.exp(-winner.score), 1.0) if is_scored else None
            return AdaFuseRound(
                text=text,
                words=[text] if text else [],
                ends=winner.data is None and is_whole,
                proposer=min(proposers, default=0),
                winner=list(found).index(winner),
                candidates=[_candidate(one, tops) for one in found],
                margins=[[] for _ in self._members],
                num_tokens=num_taken,
                is_whole=is_whole,
                weights=shares(self._weights),
                criterion=self._strategy.criterion,
                highest_wins=self._strategy.highest_wins,
                confidences=[probability] if text else [],
            )

        for k in proposers:
            self._members[k].num_wins += 1
        is_whole = self._committer.commit_ids(self._prompt, list(winner.ids), end_token, record)
        if is_whole and winner.ids:
            data = b"".join(map(main.vocabulary.piece, winner.ids))
            for k in range(1, len(self._members)):
                self._follow(k, list(winner.ids), data)

    def _follow(self, member_index: int, ids: list[int], data: bytes) -> None:
        """An assistant takes what has been committed."""
        if self._shares[member_index]:
            self._members[member_index].commit(self._prompt.index, ids)
            return
        tail = self._tails[member_index]
        is_apart = bool(tail.strip()) and (data[:1].isspace() or tail[-1:].isspace())
        if (is_apart or self._is_long(member_index)) and not split_character(tail)[1]:
            self._flush_tail(member_index)
        self._tails[member_index] += data
        if not (self._strategy.is_retokenized or split_character(self._tails[member_index])[1]):
            self._flush_tail(member_index)

    def finish(self) -> None:
        """The text is over: all of it is in every member's prefix, as far as it can be written, and in the rounds."""
        for k in range(1, len(self._members)):
            self._flush_tail(k)
        if self._unshown:  # it ends inside a character
            last = self._prompt.rounds[-1]
            text = self._members[0].vocabulary.text(self._unshown)
            self._prompt.rounds[-1] = replace(
                last, text=last.text + text, words=[*last.words, text], confidences=[*last.confidences, None]
            )
            self._unshown = []

    def _is_long(self, member_index: int) -> bool:
        """Whether a tail has as many tokens as a word may have: scripts without spaces."""
        tail = self._tails[member_index]
        ids = tokens_of(self._members[member_index].vocabulary, tail) if tail else None
        return ids is not None and len(ids) >= self._strategy.config.max_word_tokens

    def _flush_tail(self, member_index: int) -> None:
        tail, self._tails[member_index] = self._tails[member_index], b""
        if tail:
            member = self._members[member_index]
            ids = tokens_of(member.vocabulary, tail)
            if ids is None:
                ids = tokens_of(member.vocabulary, split_character(tail)[0]) or []
            member.commit(self._prompt.index, ids)

    def _shown(self, ids: list[int]) -> str:
        """The text that these tokens of the main model add, once its characters are whole."""
        vocabulary, self._unshown = self._members[0].vocabulary, [*self._unshown, *ids]
        if is_mid_character(b"".join(map(vocabulary.piece, self._unshown))):
            return ""
        text, self._unshown = vocabulary.text(self._unshown), []
        return text


def _candidate(one: NextToken, tops: Sequence[Sequence[tuple[bytes | None, int, float]] | None]) -> AdaFuseCandidate:
    text = "" if one.data is None else one.data.decode("utf-8", "replace")
    return AdaFuseCandidate(
        text=text,
        words=[text] if text else [],
        ends=one.data is None,
        proposers=[k for k, top in enumerate(tops) if top and top[0][0] == one.data],
        nlls=[None if value is None else -value for value in one.log_probs],
        score=one.score,
        decided_by=[math.exp(-one.score)],
    )
