"""How one member proposes: greedy words, branches, beams (sections 3.2 and 3.3). Knows one vocabulary and one tree's
nodes; no cache, other member or score.

A proposal is a *walk*: a generator that yields the nodes it must read next and returns its result. Whoever drives the
walks runs what they ask for, many walks in one forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from .config import AdaFuseConfig
from .scoring import margin
from .token_nodes import Node
from .vocabulary import Vocabulary
from .words import WordRule

T = TypeVar("T")
Walk = Generator[list[Node], None, T]


@dataclass(frozen=True)
class Proposal:
    """A span as its proposer sees it: its words, the proposer's own ids, and whether it ends the sequence."""

    words: tuple[str, ...]
    ids: tuple[int, ...]
    ends: bool

    @property
    def text(self) -> str:
        return "".join(self.words)


@dataclass(frozen=True)
class Proposals:
    """
    What one member proposes in one round.

    Attributes:
        spans (`list[Proposal]`): best branch first.
        margins (`list[float]`): at the start of each word, as far as it read them.
    """

    spans: list[Proposal]
    margins: list[float]


@dataclass(frozen=True)
class _Word:
    nodes: tuple[Node, ...]
    ends: bool = False


def in_step(walks: list[Walk[T]]) -> Walk[list[T]]:
    """Several walks as one: the nodes they ask for at the same time are run together."""
    results: dict[int, T] = {}
    wanted: dict[int, list[Node]] = {}

    def advance(index: int) -> None:
        try:
            wanted[index] = next(walks[index])
        except StopIteration as stop:
            results[index] = stop.value
            wanted.pop(index, None)

    for index in range(len(walks)):
        advance(index)
    while wanted:
        yield [node for nodes in wanted.values() for node in nodes]
        for index in list(wanted):
            advance(index)
    return [results[index] for index in range(len(walks))]


def read(node: Node) -> Walk[Any]:
    """The member's reading of a node, run first where it has not been."""
    if node.reading is None:
        yield [node]
    return node.reading


class Proposer:
    """
    Proposes for one member.

    Args:
        vocabulary (`Vocabulary`): the member's.
        eos_ids (`set[int]`): its end-of-sequence ids.
        max_length (`int`, *optional*): the most tokens its context holds.
        config (`AdaFuseConfig`)
        rule (`WordRule`)
    """

    def __init__(
        self, vocabulary: Vocabulary, eos_ids: set[int], max_length: int | None, config: AdaFuseConfig, rule: WordRule
    ) -> None:
        self.vocabulary, self.eos_ids, self.max_length = vocabulary, eos_ids, max_length
        self.config, self.rule = config, rule

    def propose(self, root: Node) -> Walk[Proposals]:
        """Take greedy words while they are confident; branch at the first that is not (section 3.2 and 3.3)."""
        node, margins = root, list[float]()
        words, tails = list[_Word](), list[_Word]()
        while len(words) < self.config.max_words and self.has_room(node):
            reading = yield from read(node)
            margins.append(margin(reading.top_log_probs))
            if self._is_uncertain(node):
                explore = self._beams if self.config.exploration == "beam" else self._branches
                tails = yield from explore(node)
                break
            word = yield from self._greedy_word(node, reading.top[0])
            words.append(word)
            if word.ends:
                break
            node = word.nodes[-1]
        spans = [[*words, tail] for tail in tails] or [words]
        return Proposals([self._proposal(span) for span in spans], margins)

    def propose_word(self, root: Node) -> Walk[Proposal]:
        """The greedy word alone: the last resort when every candidate is forbidden."""
        reading = yield from read(root)
        word = yield from self._greedy_word(root, reading.top[0])
        return self._proposal([word])

    def first_nodes(self, root: Node) -> list[Node]:
        """The nodes that a proposal from a root already read will surely read first."""
        if root.reading is None or not self.has_room(root):
            return []
        count = self.config.num_branches if self._is_uncertain(root) else 1
        best = list(zip(root.reading.top, root.reading.top_log_probs, strict=True))[:count]
        return [root.child(token) for token, p in best if p > -math.inf and token not in self.eos_ids]

    def riders(self, root: Node) -> list[Node]:
        """
        The nodes that are likely to be read first when this member is asked next: the root, what follows it, what
        follows the ends of the candidates, should one of them win, and each greedily on. None of them is needed yet.
        """
        if root.reading is None:
            return [root]
        ends = [node for node in root.run_descendants() if node.is_end and node.reading is not None]
        return [rider for end in (root, *ends) for rider in self._frontier(end)]

    def _frontier(self, end: Node) -> list[Node]:
        firsts = self.first_nodes(end)
        if unread := [node for node in firsts if node.reading is None]:
            return unread
        return [node for first in firsts[:1] for node in self.foreseen(first)[-1:] if node.reading is None]

    def foreseen(self, root: Node) -> list[Node]:
        """The nodes with which it would greedily go on, as far as it has read; the last of them may be unread."""
        nodes, node = list[Node](), root
        while node.reading is not None and self.has_room(node) and node.reading.top[0] not in self.eos_ids:
            node = node.child(node.reading.top[0])
            nodes.append(node)
        return nodes

    def has_room(self, node: Node) -> bool:
        """Whether the member's context holds one more token after this node."""
        return self.max_length is None or node.position + 1 < self.max_length

    def _is_uncertain(self, node: Node) -> bool:
        adaptive = self.config.commitment == "adaptive"
        return adaptive and margin(node.reading.top_log_probs) < self.config.margin_threshold

    def _branches(self, node: Node) -> Walk[list[_Word]]:
        """The `num_branches` most likely first tokens, each extended greedily to the end of its word."""
        reading = node.reading
        allowed = [t for t, p in zip(reading.top, reading.top_log_probs, strict=True) if p > -math.inf]
        firsts = (allowed or reading.top[:1])[: self.config.num_branches]
        words = yield from in_step([self._greedy_word(node, token) for token in firsts])
        return words

    def _greedy_word(self, node: Node, token: int) -> Walk[_Word]:
        """The word that begins with `token` after `node`, extended greedily to its end."""
        if token in self.eos_ids:
            return _Word((), ends=True)
        nodes = [node.child(token)]
        data = self.vocabulary.piece(token)
        while not self._is_cut(data, nodes):
            following = (yield from read(nodes[-1])).top[0]
            if self._ends_before(data, following):
                break
            nodes.append(nodes[-1].child(following))
            data += self.vocabulary.piece(following)
        nodes[-1].is_end = True
        return _Word(tuple(nodes))

    def _beams(self, node: Node) -> Walk[list[_Word]]:
        """
        Token-level beam search cut to the word: the `num_branches` hypotheses of highest log-probability, each extended
        by tokens that carry on its word until its greedy next token would end it (Appendix F).
        """
        width = self.config.num_branches
        reading = node.reading
        beams: list[tuple[float, _Word, bool]] = []
        for token, log_prob in reading.best(width):
            word = _Word((), ends=True) if token in self.eos_ids else _Word((node.child(token),))
            beams.append((log_prob, word, word.ends))
        while True:
            open_words = [
                word for _, word, done in beams if not done and not self._is_cut(self._data(word), word.nodes)
            ]
            unread = [word.nodes[-1] for word in open_words if word.nodes[-1].reading is None]
            if unread:
                yield unread
            beams = [(score, word, done or self._is_done(word)) for score, word, done in beams]
            if all(done for _, _, done in beams):
                return [word for _, word, _ in beams]
            beams = sorted((new for beam in beams for new in self._extensions(*beam)), key=lambda beam: -beam[0])[
                :width
            ]

    def _extensions(self, score: float, word: _Word, done: bool) -> list[tuple[float, _Word, bool]]:
        if done:
            return [(score, word, done)]
        data, last = self._data(word), word.nodes[-1]
        onward = last.reading.best(self.config.num_branches, lambda token: not self._ends_before(data, token))
        if not onward:
            return [(score, word, True)]
        return [(score + log_prob, _Word((*word.nodes, last.child(token))), False) for token, log_prob in onward]

    def _is_done(self, word: _Word) -> bool:
        data = self._data(word)
        if word.ends or self._is_cut(data, word.nodes):
            return True
        return self._ends_before(data, word.nodes[-1].reading.top[0])

    def _is_cut(self, data: bytes, nodes: Any) -> bool:
        """Whether the word ends whatever follows: by its trailing space, its length or the member's context."""
        return self.rule.is_closed(data, len(nodes)) or not self.has_room(nodes[-1])

    def _ends_before(self, data: bytes, token: int) -> bool:
        if token in self.eos_ids:
            return self.rule.is_complete(data, None)
        return self.rule.is_complete(data, self.vocabulary.piece(token))

    def _data(self, word: _Word) -> bytes:
        return b"".join(self.vocabulary.piece(node.token) for node in word.nodes)

    def _proposal(self, words: list[_Word]) -> Proposal:
        ids = [[node.token for node in word.nodes] for word in words]
        texts = tuple(self.vocabulary.text(word) for word in ids if word)
        return Proposal(texts, tuple(token for word in ids for token in word), any(word.ends for word in words))
