"""How one member proposes: greedy words, branches, beams (sections 3.2 and 3.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..config import AdaFuseConfig
from ..members.member import Member, Span
from ..members.passes import unread
from ..trees.nodes import Node
from .answer_stops import AnswerStops
from .requests import ForwardRequest, Requests
from .scoring import margin
from .word_splitter import WordSplitter

# So many tokens that add nothing to a text end it.
MOST_SILENT = 128
# Gives a member's token after a node that has been read: the most likely one, or one that is drawn.
TokenPicker = Callable[[Node], int]


def most_likely(node: Node) -> int:
    """The most likely token after a node."""
    token: int = node.logprobs.top[0]
    return token


@dataclass(frozen=True)
class Proposal:
    """
    A span as its proposer sees it.

    Args:
        words (`tuple[str]`): its words. Joined, they give its text.
        ids (`tuple[int]`): the span in the proposer's own tokens.
        ends (`bool`): whether the text ends after it.
    """

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

    Args:
        spans (`list[Proposal]`): its spans, the best branch first.
        margins (`list[float]`): the margin p(1) - p(2) at the start of each of its words, as far as it read them.
    """

    spans: list[Proposal]
    margins: list[float]


@dataclass
class GrowingWord:
    """
    A word while it is extended.

    Args:
        nodes (`tuple[Node]`): the nodes of its tokens so far.
        data (`bytes`): the bytes of these tokens.
        end_token (`int`, *optional*): the end-of-sequence id, where the text ends with the word.
        is_done (`bool`): whether the word is complete.
        text (`str`, *optional*): its text, kept when it has been asked for of a complete word.
        number (`int`): which text it is in, where several are written side by side.
    """

    nodes: tuple[Node, ...] = ()
    data: bytes = b""
    end_token: int | None = None
    is_done: bool = False
    text: str | None = None
    number: int = 0

    @property
    def ends(self) -> bool:
        """Whether the text ends with it."""
        return self.end_token is not None


class Proposer:
    """
    Proposes spans for one member: greedy words, and branches at an uncertain word (sections 3.2 and 3.3).

    Args:
        member_index (`int`): the number of the member. 0 is the main model.
        member (`Member`): the member.
        config (`AdaFuseConfig`): says how long spans are, and where they branch.
        splitter (`WordSplitter`): says where a word ends.

    Attributes:
        can_propose_ahead (`bool`): whether it may propose more than one round at a time.
        stops (`AnswerStops`): says where the call's stopping criteria end a whole answer. Set by [`RoundFactory`].
        keeps_logits (`Callable`): `keeps_logits(prompt_index)` says whether the logits after a token are needed once
            the next token is there.
    """

    can_propose_ahead = True
    stops: AnswerStops

    def __init__(self, member_index: int, member: Member, config: AdaFuseConfig, splitter: WordSplitter) -> None:
        self.member_index = member_index
        self.member = member
        self.config = config
        self.splitter = splitter
        self.piece = member.vocabulary.piece
        self.eos_ids = set(member.eos_ids)
        self.keeps_logits: Callable[[int], bool] = lambda prompt_index: True

    def set_draft_sampler(self, sampler: Callable[[int], TokenPicker]) -> None:
        """
        The call samples whole texts. This proposer takes greedy words all the same; [`DraftedText`] draws its texts.

        Args:
            sampler (`Callable`): `sampler(prompt_index)` gives the function that draws the tokens of one text.
        """

    def propose(self, root: Node, useful: Sequence[Node] = ()) -> Requests[Proposals]:
        """
        Take greedy words while they are confident, and branch at the first that is not. This is a generator: it yields
        a [`ForwardRequest`] for the nodes that it must know.

        Args:
            root (`Node`): the end of the prefix.
            useful (`list[Node]`, *optional*): further nodes that may be computed in the same passes.

        Returns:
            [`Proposals`]: what the member proposes.
        """
        node = root
        margins = list[float]()
        words = list[GrowingWord]()
        branches = list[GrowingWord]()
        while len(words) < self.config.max_words and self.has_room(node):
            yield from self.read([node], useful)
            margins.append(margin(node.logprobs.top_log_probs))
            if self.is_uncertain(node):
                explore = self._beams if self.config.exploration == "beam" else self._branches
                branches = yield from explore(node, useful)
                break
            (word,) = yield from self._extend([self.begin(node, node.logprobs.top[0])], useful)
            words.append(word)
            if word.ends:
                break
            node = word.nodes[-1]
        spans = [[*words, branch] for branch in branches] or [words]
        return Proposals([self.proposal(span) for span in spans], margins)

    def propose_unbranched(self, root: Node) -> Requests[Proposals]:
        """What it proposes where no other member is asked: greedy words. A branch would have nobody to prefer it."""
        words, margins = yield from self._greedy_words(root)
        return Proposals([self.proposal(words)] if words else [], margins)

    def propose_certain(self, root: Node, least: float) -> Requests[Proposal | None]:
        """Greedy words, `max_words` at most, while the first token of each has at least this probability; `None` where
        the first word's has not."""
        words, _ = yield from self._greedy_words(root, least)
        return self.proposal(words) if words else None

    def _greedy_words(self, root: Node, least: float = 0.0) -> Requests[tuple[list[GrowingWord], list[float]]]:
        """As many words as `propose_certain` says, and the margin at the start of each."""
        words, margins = list[GrowingWord](), list[float]()
        node = root
        while len(words) < self.config.max_words and self.has_room(node):
            yield from self.read([node])
            if math.exp(node.logprobs.top_log_probs[0]) < least:
                break
            margins.append(margin(node.logprobs.top_log_probs))
            word = yield from self.greedy_word(node)
            words.append(word)
            if word.ends:
                break
            node = word.nodes[-1]
        return words, margins

    def propose_word(self, root: Node) -> Requests[Proposal]:
        """The greedy word alone: the last resort when every candidate is forbidden."""
        word = yield from self.greedy_word(root)
        return self.proposal([word])

    def greedy_word(self, node: Node) -> Requests[GrowingWord]:
        """The greedy word after a node."""
        yield from self.read([node])
        (word,) = yield from self._extend([self.begin(node, node.logprobs.top[0])])
        return word

    def log_probs(self, root: Node, words: Sequence[GrowingWord]) -> Requests[list[float]]:
        """The log-probability (nats) of each token of words after the end of the prefix, and of the end of the text
        where it ends with them."""
        span = Span([node.token for word in words for node in word.nodes], any(word.ends for word in words))
        if needed := self.member.needed_to_score(root.prompt_index, [span]):
            yield ForwardRequest(self.member_index, needed)
        (values,) = self.member.log_probs(root.prompt_index, [span])
        return values

    def has_room(self, node: Node) -> bool:
        """Whether the member's context holds one more token after this node."""
        return self.member.room_after(node) >= 1

    def is_uncertain(self, node: Node) -> bool:
        """Whether the word that begins after this node, which has been read, is explored."""
        adaptive = self.config.commitment == "adaptive"
        return adaptive and margin(node.logprobs.top_log_probs) < self.config.margin_threshold

    def read(self, nodes: list[Node], useful: Sequence[Node] = ()) -> Requests[None]:
        """Wait until these nodes have been read."""
        if missing := unread(nodes):
            yield ForwardRequest(self.member_index, missing, useful)

    def _branches(self, node: Node, useful: Sequence[Node]) -> Requests[list[GrowingWord]]:
        """The `num_branches` most likely first tokens, each extended greedily to the end of its word."""
        top, log_probs = node.logprobs.top, node.logprobs.top_log_probs
        allowed = [token for token, value in zip(top, log_probs, strict=True) if value > -math.inf]
        firsts = (allowed or top[:1])[: self.config.num_branches]
        words = yield from self._extend([self.begin(node, token) for token in firsts], useful)
        return words

    def begin(self, node: Node, token: int) -> GrowingWord:
        """The word that begins with `token` after `node`."""
        if token in self.eos_ids:
            return GrowingWord(end_token=token, is_done=True)
        return GrowingWord((node.add_child(token),), self.piece(token))

    def _extend(self, words: list[GrowingWord], useful: Sequence[Node] = ()) -> Requests[list[GrowingWord]]:
        """Extend the words greedily to their ends, all at the same time."""
        while True:
            for word in words:
                self.extend_as_far_as_read(word)
            waiting = [word.nodes[-1] for word in words if not word.is_done]
            if not waiting:
                return words
            yield from self.read(waiting, useful)

    def extend_as_far_as_read(self, word: GrowingWord, pick_token: TokenPicker = most_likely) -> None:
        """Extend a word, greedily by default, as far as its tokens have been read."""
        while not word.is_done:
            last = word.nodes[-1]
            if self.is_closed(word):
                word.is_done = True
            elif last.logprobs is None:
                return
            elif self.ends_before(word, pick_token(last)):
                word.is_done = True
            else:
                self.append(word, pick_token(last))
        if word.nodes:
            word.nodes[-1].ends_candidate = True

    def append(self, word: GrowingWord, token: int) -> None:
        """Extend a word by a token."""
        word.nodes = (*word.nodes, word.nodes[-1].add_child(token))
        word.data += self.piece(token)

    def _beams(self, node: Node, useful: Sequence[Node]) -> Requests[list[GrowingWord]]:
        """
        Token-level beam search cut to the word: the `num_branches` hypotheses of highest log-probability, each extended
        by tokens that carry on its word until its greedy next token would end it (Appendix F).
        """
        width = self.config.num_branches
        beams = [(value, self.begin(node, token)) for token, value in node.logprobs.best(width)]
        while True:
            yield from self.read([w.nodes[-1] for _, w in beams if not w.is_done and not self.is_closed(w)], useful)
            for _, word in beams:
                word.is_done = word.is_done or self._is_complete(word)
            if all(word.is_done for _, word in beams):
                return [word for _, word in beams]
            grown = [longer for score, word in beams for longer in self._extensions(score, word)]
            beams = sorted(grown, key=lambda beam: -beam[0])[:width]

    def _extensions(self, score: float, word: GrowingWord) -> list[tuple[float, GrowingWord]]:
        """
        The hypotheses that go on with one: each longer by one of the likeliest tokens that carry on its word. A word
        that is done, or that no token carries on, stays as it is.

        Args:
            score (`float`): the log-probability (nats) of the hypothesis.
            word (`GrowingWord`): its word, which has been read.

        Returns:
            log-probabilities and words.
        """
        if word.is_done:
            return [(score, word)]
        last = word.nodes[-1]
        onward = last.logprobs.best(self.config.num_branches, lambda token: not self.ends_before(word, token))
        if not onward:
            word.is_done = True
            return [(score, word)]
        longer = []
        for token, log_prob in onward:
            extended = GrowingWord(word.nodes, word.data)
            self.append(extended, token)
            longer.append((score + log_prob, extended))
        return longer

    def _is_complete(self, word: GrowingWord) -> bool:
        return self.is_closed(word) or self.ends_before(word, word.nodes[-1].logprobs.top[0])

    def is_closed(self, word: GrowingWord) -> bool:
        """Whether the word ends whatever follows: by its trailing space, its length or the member's context."""
        return self.splitter.is_closed(word.data, len(word.nodes)) or not self.has_room(word.nodes[-1])

    def ends_before(self, word: GrowingWord, token: int) -> bool:
        """Whether the word ends where `token` would come next."""
        return self.bytes_end_before(word.data, token)

    def bytes_end_before(self, data: bytes, token: int) -> bool:
        """Whether a word of these bytes ends where `token` would come next."""
        return self.splitter.is_complete(data, None if token in self.eos_ids else self.piece(token))

    def proposal(self, words: list[GrowingWord]) -> Proposal:
        """The span that these words make."""
        texts = tuple(self._text_of(word) for word in words if word.nodes)
        ids = tuple(node.token for word in words for node in word.nodes)
        return Proposal(texts, ids, any(word.ends for word in words))

    def _text_of(self, word: GrowingWord) -> str:
        if word.text is None or not word.is_done:  # asked after each word of a long answer
            word.text = self.member.vocabulary.text([node.token for node in word.nodes])
        return word.text
