"""Random draws: the words of a text, and whole drafts of members.

For each word a [`WordSampler`] first draws a member by its weight. That member then draws the word from its own
distribution. The text is a sample of the weighted mixture of the members' word distributions, whatever their
tokenizers.

A word ends when a member draws a token that begins another word. That token is dropped. The next word's first token is
drawn among the tokens that begin a word here, so a single member draws what ordinary sampling draws.

A [`DraftSampler`] draws a member's drafts token by token. Each draft has its own random numbers, derived from those of
the prompt. A draft does not depend on the length of other drafts, or on the order in which members take their turns.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..members.passes import unread
from ..trees.nodes import Node
from .proposer import GrowingWord, Proposer, TokenPicker
from .requests import ForwardRequest, Requests


class WordSampler:
    """
    Draws the words of one prompt.

    Args:
        prompt_index (`int`): the prompt.
        proposers (`list[Proposer]`): one per member.
        weights (`list[float]`): how much each member counts.
        draws (`list[Callable]`): per member, `draw(node, numbers, allow)` gives a token after a node that has been
            read. It is drawn by random numbers from 0 to 1 among the tokens that `allow` lets through, or among all
            where `allow` lets none through.
        is_greedy (`bool`): whether nothing is drawn: all words are those of the member that counts most, the first of
            equals.
        numbers (`Iterator[float]`): the random numbers of the prompt, from 0 to 1.
    """

    def __init__(
        self,
        prompt_index: int,
        proposers: Sequence[Proposer],
        weights: Sequence[float],
        draws: Sequence[Callable[[Node, Iterator[float], Callable[[int], bool] | None], int]],
        is_greedy: bool,
        numbers: Iterator[float],
    ) -> None:
        self._prompt_index = prompt_index
        self._proposers = proposers
        self._draws = draws
        self._is_greedy = is_greedy
        self._numbers = numbers
        self.weights = weights
        self._last: bytes | None = None  # the last word, where that might go on

    def sample(self, member_index: int | None = None) -> Requests[tuple[int, GrowingWord]]:
        """The word that a member draws, and the member's index; of one drawn by its weight where it is not given."""
        if member_index is None:
            member_index = self._draw_member()
        proposer = self._proposers[member_index]
        word = GrowingWord()
        node = proposer.member.root(self._prompt_index)
        while not word.is_done:
            if missing := unread([node]):
                yield ForwardRequest(member_index, missing)
            self._grow(word, node, member_index)
            node = word.nodes[-1] if word.nodes else node
        return member_index, word

    def keep(self, member_index: int, word: GrowingWord) -> None:
        """The word becomes part of the text."""
        is_over = word.ends or self._proposers[member_index].is_closed(word)
        self._last = None if is_over else word.data

    def _grow(self, word: GrowingWord, node: Node, member_index: int) -> None:
        """Draw a token after `node`, the end of the word so far; the word is done where it begins another one."""
        proposer, last = self._proposers[member_index], self._last
        allow = None
        if not word.nodes and last is not None:
            # The last word must end before the token, else the token would go on with that word.
            allow = lambda token: proposer.bytes_end_before(last, token)  # noqa: E731
        token = self._draws[member_index](node, self._numbers, allow)
        if not word.nodes:
            begun = proposer.begin(node, token)
            word.nodes = begun.nodes
            word.data = begun.data
            word.end_token = begun.end_token
            word.is_done = begun.is_done
        elif proposer.ends_before(word, token):
            word.is_done = True
        else:
            proposer.append(word, token)
        word.is_done = word.is_done or proposer.is_closed(word)

    def _draw_member(self) -> int:
        """The index of a member, drawn by its weight."""
        weights = self.weights
        if self._is_greedy:
            return weights.index(max(weights))
        bounds = list(itertools.accumulate(weights))
        number = next(self._numbers) * bounds[-1]
        return min(bisect.bisect_right(bounds, number), len(bounds) - 1)


class DraftSampler:
    """
    Draws the drafts of one member.

    Args:
        member_index (`int`): the number of the member.
        draw (`Callable`): `draw(node, numbers, None)`: a token after a node that has been read, by random numbers.
        numbers (`Callable`): `numbers(prompt_index)`: the random numbers of a prompt.
    """

    def __init__(self, member_index: int, draw: Callable[..., int], numbers: Callable[[int], Any]) -> None:
        self._member_index = member_index
        self._draw = draw
        self._numbers = numbers
        self._counts: Counter[int] = Counter()  # of the drafts of each prompt

    def __call__(self, prompt_index: int) -> TokenPicker:
        """What draws the tokens of a new draft: after each node one, however often it is asked."""
        numbers: Iterator[float] = self._numbers(prompt_index).branch(self._member_index, self._counts[prompt_index])
        self._counts[prompt_index] += 1
        drawn: dict[Node, int] = {}

        def pick_token(node: Node) -> int:
            if node not in drawn:
                drawn[node] = self._draw(node, numbers, None)
            return drawn[node]

        return pick_token
