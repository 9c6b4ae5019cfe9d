"""Rounds in which the main model drafts tokens, the others verify them, and a token is fused where they disagree.

A draft of three tokens in the tokens of a verifier with another tokenizer. At each of its places a token of the
verifier begins where a drafted one does:

    draft      " pos" "ition" " is"
    verifier   " position"    " is"
    places     0      -       1
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..members.distributions import Distribution, split_character, tokens_of
from ..outputs import AdaFuseCandidate, AdaFuseRound
from ..trees.nodes import Node
from .member_weights import shares
from .requests import ForwardRequest, Requests, of_each
from .scoring import span_nll
from .strategies.safe import DRAFTED, SAFE
from .token_rounds import TokenRounds


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
        """Of tokens, the end of the text among them."""
        return len(self.ids) + self.ends


@dataclass
class _Reading:
    """
    A draft in a verifier's tokens.

    Args:
        ids (`list[int]`): the text that is not yet in its prefix, and the draft.
        nodes (`list[Node]`): the root and the nodes of the ids.
        places (`list[int]`): per decision of the draft, how many of the ids are before it; `None` where no token of the
            verifier begins, or it has none.
    """

    ids: list[int]
    nodes: list[Node]
    places: list[int | None]


class VerifiedRounds(TokenRounds):
    """The rounds of one prompt, of a [`SAFE`] strategy."""

    _strategy: SAFE

    def run_round(self) -> Requests[None]:
        """One cycle: draft, verify, commit what is kept, and fuse the first token that is not."""
        draft = yield from self._drafted()
        verifiers = range(1, len(self._members))
        draft = self._shortened(draft)
        readings = {k: self._reading(k, draft) for k in verifiers}
        main = [Distribution(self._members[0], node.reading) for node in draft.nodes[: draft.num_decisions]]
        asked = [at for at in range(draft.num_decisions) if self._is_asked(at, draft, main[at], readings)]
        if asked:
            devices = [self._members[k].device_key for k in verifiers]
            yield from of_each([self._read(k, readings[k], asked) for k in verifiers], devices)
        for at in asked:
            others = [self._distribution(k, readings[k], at) for k in verifiers]
            if not self._keeps(at, draft, main[at], others, readings):
                break
        else:
            self._commit_draft(draft)
            return
        if at and not self._commit_draft(_Draft(draft.ids[:at], draft.nodes[: at + 1], ends=False)):
            return
        for k, _ in enumerate(others, start=1):
            self._members[k].num_proposals += 1
        self._members[0].num_proposals += 1
        yield from self._fuse([main[at], *others])

    def _drafted(self) -> Requests[_Draft]:
        main, prompt = self._members[0], self._prompt
        most = self._strategy.num_tokens
        if prompt.max_length is not None:
            most = max(1, min(most, prompt.max_length - len(prompt.ids)))
        nodes = [main.root(prompt.index)]
        while len(nodes) <= most and main.room_after(nodes[-1]) >= 1:
            if nodes[-1].reading is None:
                yield ForwardRequest(0, [nodes[-1]])
            token = nodes[-1].reading.top[0]
            if token in main.eos_ids:
                return _Draft([node.token for node in nodes[1:]], nodes, ends=True)
            nodes.append(nodes[-1].add_child(token))
        return _Draft([node.token for node in nodes[1:]], nodes, ends=False)

    def _shortened(self, draft: _Draft) -> _Draft:
        """As much of a draft as every verifier's context holds, but one token at least."""
        for length in range(len(draft.ids), 1, -1):
            if all(self._holds(k, draft.ids[:length]) for k in range(1, len(self._members))):
                return (
                    draft if length == len(draft.ids) else _Draft(draft.ids[:length], draft.nodes[: length + 1], False)
                )
        return draft if len(draft.ids) < 2 else _Draft(draft.ids[:1], draft.nodes[:2], False)

    def _holds(self, member_index: int, ids: list[int]) -> bool:
        member = self._members[member_index]
        return len(self._own_ids(member_index, ids)) <= member.room_after(member.root(self._prompt.index))

    def _own_ids(self, member_index: int, ids: list[int]) -> list[int]:
        """The text that is not yet in a verifier's prefix, and these tokens of the main model, in its own tokens; where
        they end inside a character of which it has no parts, up to that."""
        if self._shares[member_index]:
            return ids
        data = self._tails[member_index] + self._data(ids)
        vocabulary = self._members[member_index].vocabulary
        own = tokens_of(vocabulary, data)
        return own if own is not None else tokens_of(vocabulary, split_character(data)[0]) or []

    def _data(self, ids: list[int]) -> bytes:
        return b"".join(map(self._members[0].vocabulary.piece, ids))

    def _reading(self, member_index: int, draft: _Draft) -> _Reading:
        member, ids = self._members[member_index], self._own_ids(member_index, draft.ids)
        if not self._holds(member_index, draft.ids):
            ids = []
        nodes = member.path(self._prompt.index, ids)
        if self._shares[member_index]:
            return _Reading(ids, nodes, [*range(len(ids) + 1)][: draft.num_decisions])
        tail = self._tails[member_index]
        whole, ends = tail + self._data(draft.ids), {0: 0}
        pieces = itertools.accumulate(map(member.vocabulary.piece, ids), initial=b"")
        for number, written in enumerate(pieces):
            if not whole.startswith(written):
                break
            ends.setdefault(len(written), number)
        starts = [len(tail + self._data(draft.ids[:at])) for at in range(draft.num_decisions)]
        return _Reading(ids, nodes, [ends.get(start) for start in starts])

    def _is_asked(self, at: int, draft: _Draft, main: Distribution, readings: dict[int, _Reading]) -> bool:
        """Whether the verifiers are asked about a decision of the draft: where all have a boundary and a token after
        it, and what they say can change it."""
        is_end = at == len(draft.ids)
        if not readings or not (is_end or self._data([draft.ids[at]])) or not self._strategy.asks(main):
            return False
        for reading in readings.values():
            place = reading.places[at] if at < len(reading.places) else None
            if place is None or (place == len(reading.ids)) != is_end:
                return False
        return not self._strategy.keeps_alone(self._log_prob(main, None if is_end else draft.ids[at]), self._weights)

    def _read(self, member_index: int, reading: _Reading, asked: Sequence[int]) -> Requests[None]:
        nodes = {id(node): node for node in (reading.nodes[reading.places[at] or 0] for at in asked)}
        if missing := [node for node in nodes.values() if node.reading is None]:
            yield ForwardRequest(member_index, missing)

    def _distribution(self, member_index: int, reading: _Reading, at: int) -> Distribution:
        return Distribution(self._members[member_index], reading.nodes[reading.places[at] or 0].reading)

    def _keeps(
        self,
        at: int,
        draft: _Draft,
        main: Distribution,
        others: Sequence[Distribution],
        readings: dict[int, _Reading],
    ) -> bool:
        """Whether a decision of the draft stays, of those about which the verifiers are asked."""
        is_end = at == len(draft.ids)
        own = [None if is_end else reading.ids[reading.places[at] or 0] for reading in readings.values()]
        pairs = list(zip(others, own, strict=True))
        log_probs = [self._log_prob(other, token) for other, token in pairs]
        likeliest = [other.reading.top[0] in (other.eos_ids if token is None else [token]) for other, token in pairs]
        first = self._log_prob(main, None if is_end else draft.ids[at])
        return self._strategy.keeps([first, *log_probs], likeliest, self._weights)

    def _log_prob(self, member: Distribution, token: int | None) -> float:
        return member.end_log_prob if token is None else member.log_prob(token)

    def _commit_draft(self, draft: _Draft) -> bool:
        """Commit drafted tokens; whether the text goes on after them, as far as stopping criteria say."""
        main = self._members[0]
        read = zip(draft.nodes, draft.ids, strict=False)
        log_probs = [Distribution(main, node.reading).log_prob(token) for node, token in read]
        end_token = draft.nodes[-1].reading.top[0] if draft.ends else None

        def record(num_taken: int, is_whole: bool) -> AdaFuseRound:
            pairs = [
                (self._shown([token]), value) for token, value in zip(draft.ids[:num_taken], log_probs, strict=False)
            ]
            words = [text for text, _ in pairs if text]
            nll = span_nll(log_probs) or 0.0
            whole = "".join(words) if num_taken >= len(draft.ids) else main.vocabulary.text(draft.ids)
            candidate = AdaFuseCandidate(
                text=whole,
                words=[whole] if whole else [],
                ends=draft.ends,
                proposers=[0],
                nlls=[nll, *[None] * (len(self._members) - 1)],
                score=nll,
                decided_by=[nll],
            )
            return AdaFuseRound(
                text="".join(words),
                words=words,
                ends=draft.ends and is_whole,
                proposer=0,
                winner=0,
                candidates=[candidate],
                margins=[[] for _ in self._members],
                num_tokens=num_taken,
                is_whole=is_whole,
                weights=shares(self._weights),
                criterion=DRAFTED,
                confidences=[min(math.exp(value), 1.0) for text, value in pairs if text],
            )

        main.num_proposals += 1
        main.num_wins += 1
        is_whole = self._committer.commit_ids(self._prompt, draft.ids, end_token, record)
        if is_whole:
            for token in draft.ids:
                data = self._data([token])
                for k in range(1, len(self._members)):
                    self._follow(k, [token], data)
        return is_whole and not self._prompt.is_finished
