"""Rounds in which the main model drafts tokens, the others verify them, and a token is fused where they disagree.

A draft of three tokens in the tokens of a verifier with another tokenizer. There is a boundary where a token of the
verifier begins where a drafted one does. The number of a boundary is that of the verifier's tokens before it:

    draft         " pos" "ition" " is"
    verifier      " position"    " is"
    boundaries        0      -       1
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..members.distributions import Distribution, split_character, tokens_of
from ..members.passes import unread
from ..trees.nodes import Node
from .member_weights import shares
from .pool import Candidate, Pool
from .requests import ForwardRequest, Requests, run_on_each_member
from .scoring import span_nll
from .strategies.safe import DRAFTED, SAFE
from .token_round import TokenRound, TokenText


@dataclass
class _Draft:
    """
    What the main model would write.

    Args:
        ids (`list[int]`): its tokens.
        nodes (`list[Node]`): the root and the nodes of the ids.
        ends (`bool`): whether the text ends after them.
    """

    ids: list[int]
    nodes: list[Node]
    ends: bool

    @property
    def num_decisions(self) -> int:
        """The number of tokens, the end of the text among them."""
        return len(self.ids) + self.ends


@dataclass
class _RetokenizedDraft:
    """
    A draft in a verifier's tokens.

    Args:
        ids (`list[int]`): the text that is not yet in its prefix, and the draft.
        nodes (`list[Node]`): the root and the nodes of the ids.
        boundaries (`list[int]`): per decision of the draft, how many of the ids are before it; `None` where no token of
            the verifier begins, or it has none.
    """

    ids: list[int]
    nodes: list[Node]
    boundaries: list[int | None]

    def boundary(self, at: int) -> int | None:
        """The number of ids before decision `at` of the draft; `None` where there is no boundary."""
        return self.boundaries[at] if at < len(self.boundaries) else None

    def node_before(self, at: int) -> Node:
        """The node at the boundary before decision `at`, which must have one."""
        return self.nodes[self._known_boundary(at)]

    def token(self, at: int) -> int:
        """The verifier's own token that begins at decision `at`, which must have a boundary."""
        return self.ids[self._known_boundary(at)]

    def _known_boundary(self, at: int) -> int:
        boundary = self.boundary(at)
        assert boundary is not None  # `VerifiedRound._is_asked` says `False` of other decisions
        return boundary


class VerifiedText(TokenText):
    """
    The committed text of one prompt, where drafted tokens and fused ones follow each other.

    Args: as of [`TokenText`].

    Attributes:
        next_distributions (`list[Distribution]`, *optional*): per member, its distribution of the token after the text,
            where a draft was read beyond the end of the text. That token is fused in the next round.
    """

    next_distributions: list[Distribution | None] | None = None

    def goes_on(self) -> bool:
        """Whether a further round may be run, as in [`CommittedText`]. Where the members' next tokens are known, the
        room in their contexts does not matter: nothing more is read."""
        return super().goes_on() if self.next_distributions is None else not self.prompt.is_finished

    def own_ids(self, member_index: int, ids: list[int]) -> list[int]:
        """The text that is not yet in a verifier's prefix, and these tokens of the main model, in its own tokens; where
        they end inside a character of which it has no parts, up to that."""
        if self.members[member_index].has_main_tokenizer:
            return ids
        data = self.tails[member_index] + self.data(ids)
        vocabulary = self.members[member_index].vocabulary
        own = tokens_of(vocabulary, data)
        return own if own is not None else tokens_of(vocabulary, split_character(data)[0]) or []

    def holds(self, member_index: int, ids: list[int]) -> bool:
        """Whether a verifier's context holds these tokens of its own behind its prefix."""
        member = self.members[member_index]
        return len(ids) <= member.room_after(member.root(self.prompt.index))

    def _words_taken(self, winner: Candidate, ids: list[int], num_taken: int) -> tuple[str, list[str]]:
        """The text that was taken, and its tokens as words of their own where it was drafted. The winner gets the
        confidences of these tokens."""
        if not winner.log_probs:
            return super()._words_taken(winner, ids, num_taken)
        pairs = [
            (self._show([token]), value) for token, value in zip(ids[:num_taken], winner.log_probs[0], strict=False)
        ]
        words = [text for text, _ in pairs if text]
        winner.confidences = [min(math.exp(value), 1.0) for text, value in pairs if text]
        winner.text = "".join(words) if num_taken >= len(ids) else self.members[0].vocabulary.text(ids)
        winner.words = (winner.text,) if winner.text else ()
        return "".join(words), words

    def _extend_assistants(self, pool: Pool, winner: Candidate) -> None:
        if not winner.log_probs:
            super()._extend_assistants(pool, winner)
            return
        for token in winner.ids[0]:
            self._follow_all([token])


@dataclass(eq=False)
class VerifiedRound(TokenRound[VerifiedText]):
    """
    Runs rounds of two kinds in turn: one commits the drafted tokens that are kept, the next one fuses the token after
    them.

    Args:
        members, strategy, weights: as of [`TokenRound`].
    """

    strategy: SAFE

    def run(self, text: VerifiedText) -> Requests[Pool]:
        """Draft and verify, where that has not been done. Commit what is kept of the draft; where nothing is kept, fuse
        a token."""
        if text.next_distributions is None:
            kept = yield from self._draft_and_verify(text)
            if kept.num_decisions:
                return self._draft_pool(kept)
        pool = yield from super().run(text)
        return pool

    def _next_distributions(self, text: VerifiedText) -> Requests[list[Distribution | None]]:
        """The distributions that the verification of the draft has left. Nothing is read again."""
        yield from ()
        distributions = text.next_distributions
        assert distributions is not None  # a token is fused only where a draft has been verified
        text.next_distributions = None
        return distributions

    def _draft_and_verify(self, text: VerifiedText) -> Requests[_Draft]:
        """Draft and verify; returns what is kept of the draft. After it a token is fused, unless all is kept."""
        draft = yield from self._write_draft(text)
        draft = self._shorten(text, draft)
        verifiers = range(1, len(self.members))
        retokenized = {k: self._retokenize(text, k, draft) for k in verifiers}
        main = [Distribution(self.members[0], node.logprobs) for node in draft.nodes[: draft.num_decisions]]
        asked = [at for at in range(draft.num_decisions) if self._is_asked(text, at, draft, main[at], retokenized)]
        if asked:
            devices = [self.members[k].device_key for k in verifiers]
            yield from run_on_each_member([self._read(k, retokenized[k], asked) for k in verifiers], devices)
        for at in asked:
            others = [self._distribution(k, retokenized[k], at) for k in verifiers]
            if not self._keeps(at, draft, main[at], others, retokenized):
                text.next_distributions = [main[at], *others]
                return _Draft(draft.ids[:at], draft.nodes[: at + 1], ends=False)
        return draft

    def _draft_pool(self, draft: _Draft) -> Pool:
        """Drafted tokens as the winner of a round."""
        main = self.members[0]
        pairs = zip(draft.nodes, draft.ids, strict=False)
        log_probs = [Distribution(main, node.logprobs).log_prob(token) for node, token in pairs]
        nll = span_nll(log_probs) or 0.0
        candidate = Candidate(
            text="",  # it follows from how much is taken
            words=(),
            ends=draft.ends,
            ids={0: draft.ids},
            order=(0, 0),
            proposers=[0],
            log_probs={0: log_probs},
            nlls={0: nll},
            score=nll,
            decided_by=[nll],
            end_token=draft.nodes[-1].logprobs.top[0] if draft.ends else None,
        )
        pool = Pool([member.vocabulary for member in self.members])
        pool.fill([candidate])
        pool.winner = candidate
        pool.num_proposals[0] = 1
        pool.weights = shares(self.weights)
        pool.criterion = DRAFTED
        return pool

    def _write_draft(self, text: VerifiedText) -> Requests[_Draft]:
        """What the main model would write next, up to where it would end the text; all but its last token is read."""
        main, prompt = self.members[0], text.prompt
        most = self.strategy.num_tokens
        if prompt.max_length is not None:
            most = max(1, min(most, prompt.max_length - len(prompt.ids)))
        nodes = [main.root(prompt.index)]
        while len(nodes) <= most and main.room_after(nodes[-1]) >= 1:
            if nodes[-1].logprobs is None:
                yield ForwardRequest(0, [nodes[-1]])
            token = nodes[-1].logprobs.top[0]
            if token in main.eos_ids:
                return _Draft([node.token for node in nodes[1:]], nodes, ends=True)
            nodes.append(nodes[-1].add_child(token))
        return _Draft([node.token for node in nodes[1:]], nodes, ends=False)

    def _shorten(self, text: VerifiedText, draft: _Draft) -> _Draft:
        """As much of a draft as every verifier's context holds, but one token at least."""
        verifiers = range(1, len(self.members))
        ids = draft.ids
        while len(ids) > 1 and not all(text.holds(k, text.own_ids(k, ids)) for k in verifiers):
            ids = ids[:-1]
        return draft if ids == draft.ids else _Draft(ids, draft.nodes[: len(ids) + 1], ends=False)

    def _retokenize(self, text: VerifiedText, member_index: int, draft: _Draft) -> _RetokenizedDraft:
        """A draft in the tokens of a verifier. Where the verifier's context does not hold it, it has no boundaries."""
        member = self.members[member_index]
        ids = text.own_ids(member_index, draft.ids)
        if not text.holds(member_index, ids):
            ids = []  # it has no boundaries, and is not asked
        nodes = member.path(text.prompt.index, ids)
        if member.has_main_tokenizer:
            return _RetokenizedDraft(ids, nodes, [*range(len(ids) + 1)][: draft.num_decisions])
        tail = text.tails[member_index]
        whole = tail + text.data(draft.ids)
        ends = {0: 0}  # by number of bytes, after how many of the verifier's ids one ends there
        pieces = itertools.accumulate(map(member.vocabulary.piece, ids), initial=b"")
        for number, written in enumerate(pieces):
            if not whole.startswith(written):
                break
            ends.setdefault(len(written), number)
        starts = [len(tail + text.data(draft.ids[:at])) for at in range(draft.num_decisions)]
        return _RetokenizedDraft(ids, nodes, [ends.get(start) for start in starts])

    def _is_asked(
        self,
        text: VerifiedText,
        at: int,
        draft: _Draft,
        main: Distribution,
        retokenized: dict[int, _RetokenizedDraft],
    ) -> bool:
        """Whether the verifiers are asked about a decision of the draft: where all have a boundary and a token after
        it, and what they say can change it."""
        is_end = at == len(draft.ids)
        if not retokenized or not (is_end or text.data([draft.ids[at]])) or not self.strategy.asks(main):
            return False
        for one in retokenized.values():
            boundary = one.boundary(at)
            if boundary is None or (boundary == len(one.ids)) != is_end:
                return False
        return not self.strategy.keeps_alone(self._log_prob(main, None if is_end else draft.ids[at]), self.weights)

    def _read(self, member_index: int, draft: _RetokenizedDraft, asked: Sequence[int]) -> Requests[None]:
        """A verifier reads the draft up to the last decision about which it is asked."""
        if missing := unread(draft.node_before(at) for at in asked):
            yield ForwardRequest(member_index, missing)

    def _distribution(self, member_index: int, draft: _RetokenizedDraft, at: int) -> Distribution:
        """What a verifier would say at decision `at` of the draft."""
        return Distribution(self.members[member_index], draft.node_before(at).logprobs)

    def _keeps(
        self,
        at: int,
        draft: _Draft,
        main: Distribution,
        others: Sequence[Distribution],
        retokenized: dict[int, _RetokenizedDraft],
    ) -> bool:
        """Whether a decision of the draft stays, of those about which the verifiers are asked."""
        is_end = at == len(draft.ids)
        own = [None if is_end else one.token(at) for one in retokenized.values()]
        pairs = list(zip(others, own, strict=True))
        log_probs = [self._log_prob(other, token) for other, token in pairs]
        likeliest = [other.logprobs.top[0] in (other.eos_ids if token is None else [token]) for other, token in pairs]
        first = self._log_prob(main, None if is_end else draft.ids[at])
        return self.strategy.keeps([first, *log_probs], likeliest, self.weights)

    def _log_prob(self, member: Distribution, token: int | None) -> float:
        """The log-probability (nats) of a token, or of the end of the text (`None`), under a member."""
        return member.end_log_prob if token is None else member.log_prob(token)
