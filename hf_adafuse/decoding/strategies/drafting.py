"""The ways in which a member proposes, beside the words of `proposer`: greedy text up to a point. Knows one member's
nodes and pieces of text, and other tokenizers as text; no cache, other member's text or score.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from ...config import AdaFuseConfig
from ...members.member import Member
from ...members.vocabulary import Vocabulary
from ...trees.nodes import Node
from ..proposer import GrowingWord, Proposals, Proposer
from ..requests import Requests
from ..scoring import margin
from ..words import WordRule, is_mid_character


class GreedyText(Proposer):
    """Greedy words until `is_enough`; a part of a word where `num_tokens` or `breaks_word` say so."""

    # The tokens after which no further word is begun or finished; the first word is always whole.
    num_tokens: int | None = None

    def propose(self, root: Node, useful: Sequence[Node] = ()) -> Requests[Proposals]:
        """Take greedy words, as far as the text goes."""
        node, margins, words = root, list[float](), list[GrowingWord]()
        left = self.num_tokens
        while self.has_room(node):
            yield from self.read([node], useful)
            margins.append(margin(node.reading.top_log_probs))
            word = self.begin(node, node.reading.top[0])
            while not self._grow(word, left if words else None):
                yield from self.read([word.nodes[-1]], useful)
            is_over = left is not None and len(word.nodes) > left
            if words and (is_over or not word.is_done):
                break
            words.append(word)
            left = None if left is None else left - len(word.nodes)
            if word.ends or (left is not None and left <= 0):
                break
            node = word.nodes[-1]
            following = yield from self._following(node, useful)
            if following is not None and self.is_enough(root.prompt_index, words, following):
                break
        return Proposals([self.proposal(words)], margins)

    @abstractmethod
    def is_enough(self, prompt_index: int, words: list[GrowingWord], following: bytes) -> bool:
        """Whether the text ends after these words, where `following` would come next."""

    def _grow(self, word: GrowingWord, most: int | None) -> bool:
        """Extend a word as far as it has been read; whether it is done, or has more than `most` tokens."""
        self.extend_as_far_as_read(word)
        return word.is_done or (most is not None and len(word.nodes) > most)

    def _following(self, node: Node, useful: Sequence[Node]) -> Requests[bytes | None]:
        """What would come after a node; `None` where the text ends there."""
        if not self.has_room(node):
            return b""
        yield from self.read([node], useful)
        token = node.reading.top[0]
        return None if token in self.eos_ids else self.piece(token)


class TokenSegments(GreedyText):
    """So many greedy tokens, cut at the end of a word."""

    def __init__(
        self, member_index: int, member: Member, config: AdaFuseConfig, rule: WordRule, num_tokens: int
    ) -> None:
        super().__init__(member_index, member, config, rule)
        self.num_tokens = num_tokens

    def is_enough(self, prompt_index: int, words: list[GrowingWord], following: bytes) -> bool:
        return False


class TextUnits(GreedyText):
    """
    Greedy words until a predicate of the text and what would come next.

    Args:
        is_unit (`Callable`): `is_unit(text, following)`.
        num_words (`int`): the most words.
    """

    def __init__(
        self,
        member_index: int,
        member: Member,
        config: AdaFuseConfig,
        rule: WordRule,
        is_unit: Callable[[str, str], bool],
        num_words: int,
    ) -> None:
        super().__init__(member_index, member, config, rule)
        self._is_unit, self._num_words = is_unit, num_words

    def is_enough(self, prompt_index: int, words: list[GrowingWord], following: bytes) -> bool:
        text = self.proposal(words).text
        return len(words) >= self._num_words or self._is_unit(text, following.decode("utf-8", "replace"))


class Answers(GreedyText):
    """
    Greedy words to the end of the text, or until a stopping criterion of the call would end it.

    Args:
        speaks_main (`bool`): whether its ids are the main model's too.
    """

    looks_ahead = False

    def __init__(
        self, member_index: int, member: Member, config: AdaFuseConfig, rule: WordRule, speaks_main: bool
    ) -> None:
        super().__init__(member_index, member, config, rule)
        self._speaks_main = speaks_main

    def is_enough(self, prompt_index: int, words: list[GrowingWord], following: bytes) -> bool:
        answer = self.proposal(words)
        return self.stops(prompt_index, answer.text, answer.ids if self._speaks_main else None)


def answers_of(member_index: int, members: Sequence[Member], config: AdaFuseConfig, rule: WordRule) -> Answers:
    """How one of these members, the main model first, answers."""
    member = members[member_index]
    return Answers(member_index, member, config, rule, member.vocabulary.is_same_as(members[0].vocabulary))


class CommonBoundaries(Proposer):
    """
    The shortest run of greedy tokens that ends at a word boundary of all tokenizers: no member's tokenization of the
    text and what would come next has a token across its end, and there a word ends as that tokenizer sees words
    (`word_ids`; what it splits a text into before it makes tokens). At most `max_word_tokens` tokens.
    """

    def __init__(
        self,
        member_index: int,
        member: Member,
        config: AdaFuseConfig,
        rule: WordRule,
        vocabularies: Sequence[Vocabulary],
    ) -> None:
        super().__init__(member_index, member, config, rule)
        self._vocabularies = vocabularies

    def propose(self, root: Node, useful: Sequence[Node] = ()) -> Requests[Proposals]:
        yield from self.read([root], useful)
        margins = [margin(root.reading.top_log_probs)]
        word = self.begin(root, root.reading.top[0])
        while not word.is_done and not self._is_at_limit(word):
            last = word.nodes[-1]
            yield from self.read([last], useful)
            token = last.reading.top[0]
            if token in self.eos_ids or self._is_boundary(word, token):
                break
            self.append(word, token)
        if word.nodes:
            word.nodes[-1].ends_candidate = True
        return Proposals([self.proposal([word])], margins)

    def _is_at_limit(self, word: GrowingWord) -> bool:
        extra = 3 if is_mid_character(word.data) else 0
        return len(word.nodes) >= self.rule.max_word_tokens + extra or not self.has_room(word.nodes[-1])

    def _is_boundary(self, word: GrowingWord, token: int) -> bool:
        text = self.member.vocabulary.text([node.token for node in word.nodes])
        both = self.member.vocabulary.text([*(node.token for node in word.nodes), token])
        if not text.strip() or not both.startswith(text) or "\ufffd" in both or both == text:
            return False
        # Space between two words belongs to either, as tokenizers go.
        gap = range(len(text.rstrip()), len(both) - len(both[len(text) :].lstrip()) + 1)
        return all(any(one.has_boundary(both, at) for at in gap) for one in self._vocabularies)
