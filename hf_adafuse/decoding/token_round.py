"""Rounds in which tokens are fused: each member says what it would say next, and one text is committed.

The main model writes its own tokens. An assistant with the same tokenizer takes them as they are; another reads the
text: what it has not yet taken as its own is its tail, in bytes, below the end of its prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from ..members.distributions import Distribution, split_character, tokens_of
from ..members.member import Member, Span
from ..members.passes import unread
from ..trees.nodes import Node
from .committed_text import CommittedText
from .member_weights import shares
from .pool import Candidate, Pool
from .progress import Prompt
from .requests import ForwardRequest, Requests
from .round import Round
from .strategies.token_strategy import NextToken, TokenStrategy
from .word_splitter import is_mid_character

# Per member, the bytes of its most likely text (`None`: the end), its token and its log-probability, if it was asked.
_Tops = list[list[tuple[bytes | None, int, float]] | None]


class TokenText(CommittedText):
    """
    The committed text of one prompt, where it grows by tokens of the main model.

    Args:
        members, prompt, should_stop, on_commit: as of [`CommittedText`].
        strategy (`TokenStrategy`): the method of the prompt.

    Attributes:
        tails (`list[bytes]`): per member, the end of the text that is not yet in its prefix.
    """

    author: ClassVar[int | None] = 0

    def __init__(
        self,
        members: Sequence[Member],
        prompt: Prompt,
        should_stop: Callable[[Prompt], str | None],
        on_commit: Callable[[Prompt, list[int]], None],
        strategy: TokenStrategy,
    ) -> None:
        super().__init__(members, prompt, should_stop, on_commit)
        self._strategy = strategy
        self.tails = [b""] * len(members)
        self._unshown: list[int] = []  # the main model's last tokens, while they end inside a character

    def node(self, member_index: int) -> Node:
        """The end of the text in a member's tree; of its prefix, where the member cannot write the text."""
        return self.end(member_index) or super().node(member_index)

    def end(self, member_index: int) -> Node | None:
        """The end of the text in a member's tree; `None` where the member cannot write the text."""
        member = self.members[member_index]
        if not self.tails[member_index]:
            return member.root(self.prompt.index)
        ids = tokens_of(member.vocabulary, self.tails[member_index])
        return None if ids is None else member.path(self.prompt.index, ids)[-1]

    def close(self) -> None:
        """Finish as in [`CommittedText`]. Put what is left of the text into every assistant's prefix, as far as the
        assistant can write it, and into the rounds."""
        super().close()
        for k in range(1, len(self.members)):
            self._flush_tail(k)
        if self._unshown:  # it ends inside a character
            last = self.prompt.rounds[-1]
            text = self.members[0].vocabulary.text(self._unshown)
            self.prompt.rounds[-1] = replace(
                last, text=last.text + text, words=[*last.words, text], confidences=[*last.confidences, None]
            )
            self._unshown = []

    def _words_taken(self, winner: Candidate, ids: list[int], num_taken: int) -> tuple[str, list[str]]:
        text = self._show(ids[:num_taken])
        return text, [text] if text else []

    def _show(self, ids: list[int]) -> str:
        """The text that these tokens of the main model add to what rounds show. Tokens that end inside a character add
        nothing, until its other bytes come."""
        self._unshown += ids
        if is_mid_character(self.data(self._unshown)):
            return ""
        text = self.members[0].vocabulary.text(self._unshown)
        self._unshown = []
        return text

    def _extend_assistants(self, pool: Pool, winner: Candidate) -> None:
        if winner.ids[0]:
            self._follow_all(winner.ids[0])

    def data(self, ids: list[int]) -> bytes:
        """What these tokens of the main model write."""
        return b"".join(map(self.members[0].vocabulary.piece, ids))

    def _follow_all(self, ids: list[int]) -> None:
        """The assistants take what has been committed, in one piece."""
        data = self.data(ids)
        for k in range(1, len(self.members)):
            self._follow(k, ids, data)

    def _follow(self, member_index: int, ids: list[int], data: bytes) -> None:
        """
        An assistant takes what has been committed: by the same ids where it has the main model's tokenizer, else by its
        bytes. Before a new word, and after as many tokens as a word may have, it first encodes its tail.

        Args:
            member_index (`int`): of the assistant.
            ids (`list[int]`): the main model's tokens.
            data (`bytes`): what they write.
        """
        if self.members[member_index].has_main_tokenizer:
            self.members[member_index].commit(self.prompt.index, ids)
            return
        tail = self.tails[member_index]
        is_apart = bool(tail.strip()) and (data[:1].isspace() or tail[-1:].isspace())
        if (is_apart or self._is_long(member_index)) and not split_character(tail)[1]:
            self._flush_tail(member_index)
        self.tails[member_index] += data
        if not (self._strategy.is_retokenized or split_character(self.tails[member_index])[1]):
            self._flush_tail(member_index)

    def _is_long(self, member_index: int) -> bool:
        """Whether a tail has as many tokens as a word may have: scripts without spaces."""
        tail = self.tails[member_index]
        ids = tokens_of(self.members[member_index].vocabulary, tail) if tail else None
        return ids is not None and len(ids) >= self._strategy.config.max_word_tokens

    def _flush_tail(self, member_index: int) -> None:
        """Encode an assistant's tail, and commit it to its prefix. Bytes that are no whole character are left out where
        its vocabulary has no tokens of them."""
        tail = self.tails[member_index]
        self.tails[member_index] = b""
        if tail:
            member = self.members[member_index]
            ids = tokens_of(member.vocabulary, tail)
            if ids is None:
                ids = tokens_of(member.vocabulary, split_character(tail)[0]) or []
            member.commit(self.prompt.index, ids)


T = TypeVar("T", bound=TokenText)


@dataclass(eq=False)
class TokenRound(Round[T]):
    """
    Runs rounds each of which fuses the members' next-token distributions.

    Args:
        members (`list[Member]`): the members, the main model first.
        strategy (`TokenStrategy`): the method of the prompt.
        weights (`list[float]`): how much each member counts.
    """

    strategy: TokenStrategy
    weights: Sequence[float]

    def propose(self, text: T, pool: Pool) -> Requests[None]:
        """What the method makes of the members' distributions: candidates with their scores, best first."""
        distributions = yield from self._next_distributions(text)
        pool.num_proposals = [int(one is not None) for one in distributions]
        found = self.strategy.choose(distributions, self.weights)
        if not isinstance(found, list) or not all(isinstance(one, NextToken) for one in found):
            raise TypeError(
                f"What {type(self.strategy).__name__}.choose gives must be a list of NextToken, but is {found!r}. "
                "Mend the method."
            )
        self._tops: _Tops = [None if one is None else one.top(1) for one in distributions]
        pool.fill([self._candidate(one) for one in found])
        pool.weights = shares(self.weights)
        pool.criterion = self.strategy.criterion
        pool.highest_wins = self.strategy.highest_wins

    def _next_distributions(self, text: T) -> Requests[list[Distribution | None]]:
        """What each member would say next; `None` of one that is not asked, or cannot write the text so far."""
        distributions: list[Distribution | None] = [None] * len(self.members)
        for k, member in enumerate(self.members):
            node = text.end(k)
            if node is None or (k > 0 and distributions[0] is not None and not self.strategy.asks(distributions[0])):
                continue
            if missing := unread([node]):
                yield ForwardRequest(k, missing)
            distributions[k] = Distribution(member, node.logprobs)
        return distributions

    def score(self, text: T, pool: Pool) -> Requests[None]:
        """Nothing is left to do: the distributions have every token's probability."""
        yield from ()

    def choose(self, text: T, pool: Pool) -> Requests[Candidate | None]:
        """The best that the main model can say; where it can say none of it, its own most likely token."""
        for candidate in pool.ranked():
            if (yield from self._can_say(text, candidate)):
                return candidate
        main = self.members[0]
        token = text.node(0).logprobs.top[0]
        is_end = token in main.eos_ids
        own = NextToken(None if is_end else b"", [] if is_end else [token], 0.0, [None] * len(self.members))
        candidate = self._candidate(own)
        pool.fill([candidate])
        return candidate

    def _can_say(self, text: T, candidate: Candidate) -> Requests[bool]:
        """Whether the main model may write a text of several tokens, by its processors and its context."""
        main = self.members[0]
        prompt_index = text.prompt.index
        ids = candidate.ids[0]
        if len(ids) > main.room_after(text.node(0)):
            return False
        if not ids and not candidate.ends:
            return False  # nothing would be said, for ever
        if len(ids) < 2:
            return True
        span = Span(ids, False)
        if needed := main.needed_to_score(prompt_index, [span]):
            yield ForwardRequest(0, needed)
        path = main.path(prompt_index, ids)
        return not any(node.logprobs.forbids(token) for node, token in zip(path, ids, strict=False))

    def _candidate(self, one: NextToken) -> Candidate:
        """What may come next, as the trace shows it."""
        text = "" if one.data is None else one.data.decode("utf-8", "replace")
        # The main model's own token, where all others were ruled out, has not been scored.
        is_scored = one.score < math.inf and any(value is not None for value in one.log_probs)
        return Candidate(
            text=text,
            words=(text,) if text else (),
            ends=one.data is None,
            ids={0: list(one.ids)},
            order=(0, 0),
            proposers=[k for k, top in enumerate(self._tops) if top and top[0][0] == one.data],
            nlls={k: None if value is None else -value for k, value in enumerate(one.log_probs)},
            score=one.score,
            decided_by=[math.exp(-one.score)],
            confidences=[min(math.exp(-one.score), 1.0) if is_scored else None],
        )
