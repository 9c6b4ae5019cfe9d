"""The ways in which a member proposes, beside the words of `proposer`: greedy or sampled text up to a point."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence

from ...config import AdaFuseConfig
from ...members.member import Member
from ...members.vocabulary import Vocabulary
from ...outputs import cut_words
from ...trees.nodes import Node
from ..answer_stops import ids_up_to
from ..proposer import MOST_SILENT, GrowingWord, Proposal, Proposals, Proposer, TokenPicker, most_likely
from ..requests import Requests, merge_requests
from ..scoring import margin
from ..word_splitter import WordSplitter, is_mid_character


class DraftedText(Proposer):
    """
    Words until `is_enough`: greedy ones, or sampled ones where the call samples.

    Attributes:
        num_tokens (`int`, *optional*): those after which no further word is begun or finished; the first word is always
            whole.
        num_samples (`int`): how many texts are sampled, side by side.
        draft_sampler (`Callable`, *optional*): as of `set_draft_sampler`.
    """

    num_tokens: int | None = None
    num_samples = 1
    draft_sampler: Callable[[int], TokenPicker] | None = None

    def set_draft_sampler(self, sampler: Callable[[int], TokenPicker]) -> None:
        self.draft_sampler = sampler
        self.can_propose_ahead = False

    def propose(self, root: Node, useful: Sequence[Node] = ()) -> Requests[Proposals]:
        """Take words, as far as the text goes."""
        choices: list[TokenPicker] = [most_likely]
        if self.draft_sampler is not None:
            choices = [self.draft_sampler(root.prompt_index) for _ in range(self.num_samples)]
        texts = [self._text(root, useful, pick_token, number) for number, pick_token in enumerate(choices)]
        found = yield from merge_requests(self.member_index, texts)
        spans = [self.finished((root.prompt_index, number), words) for number, (words, _) in enumerate(found)]
        return Proposals(spans, found[0][1])

    def propose_unbranched(self, root: Node) -> Requests[Proposals]:
        """As `propose`: a text has no branches."""
        proposals: Proposals = yield from self.propose(root)
        return proposals

    def _text(
        self, root: Node, useful: Sequence[Node], pick_token: TokenPicker, number: int
    ) -> Requests[tuple[list[GrowingWord], list[float]]]:
        """The words of one text, and the margins at their beginnings."""
        node = root
        margins = list[float]()
        words = list[GrowingWord]()
        left = self.num_tokens
        while self.has_room(node):
            yield from self.read([node], useful)
            margins.append(margin(node.logprobs.top_log_probs))
            word = self.begin(node, pick_token(node))
            word.number = number
            while not self._grow(word, left if words else None, pick_token):
                yield from self.read([word.nodes[-1]], useful)
            is_over = left is not None and len(word.nodes) > left
            if words and (is_over or not word.is_done):
                break
            words.append(word)
            left = None if left is None else left - len(word.nodes)
            if word.ends or (left is not None and left <= 0) or _num_silent(words) >= MOST_SILENT:
                break
            node = word.nodes[-1]
            following = yield from self._following(word, useful, pick_token)
            if following is not None and self.is_enough((root.prompt_index, number), words, following):
                break
        return words, margins

    @abstractmethod
    def is_enough(self, text: tuple[int, int], words: list[GrowingWord], following: bytes) -> bool:
        """Whether a text, by its prompt's index and its number, ends after these words, before `following`."""

    def finished(self, text: tuple[int, int], words: list[GrowingWord]) -> Proposal:
        """What is proposed of a text, by its prompt's index and its number, that is made of these words."""
        return self.proposal(words)

    def _grow(self, word: GrowingWord, most: int | None, pick_token: TokenPicker) -> bool:
        """Extend a word as far as it has been read; whether it is done, or has more than `most` tokens."""
        self.extend_as_far_as_read(word, pick_token)
        return word.is_done or (most is not None and len(word.nodes) > most)

    def _following(self, word: GrowingWord, useful: Sequence[Node], pick_token: TokenPicker) -> Requests[bytes | None]:
        """What would come after a word; `None` where the text ends there."""
        node = word.nodes[-1]
        if not self.has_room(node):
            return b""
        yield from self.read([node], useful)
        token = pick_token(node)
        return None if token in self.eos_ids else self.piece(token)


class TokenSegments(DraftedText):
    """So many tokens, cut at the end of a word."""

    def __init__(
        self, member_index: int, member: Member, config: AdaFuseConfig, splitter: WordSplitter, num_tokens: int
    ) -> None:
        super().__init__(member_index, member, config, splitter)
        self.num_tokens = num_tokens

    def is_enough(self, text: tuple[int, int], words: list[GrowingWord], following: bytes) -> bool:
        return False


class TextUnits(DraftedText):
    """
    Words until a predicate of the text and what would come next.

    Args:
        is_unit (`Callable`): `is_unit(text, following)`.
        num_words (`int`): the most words.
    """

    def __init__(
        self,
        member_index: int,
        member: Member,
        config: AdaFuseConfig,
        splitter: WordSplitter,
        is_unit: Callable[[str, str], bool],
        num_words: int,
    ) -> None:
        super().__init__(member_index, member, config, splitter)
        self._is_unit = is_unit
        self._num_words = num_words

    def is_enough(self, text: tuple[int, int], words: list[GrowingWord], following: bytes) -> bool:
        so_far = self.proposal(words).text
        return len(words) >= self._num_words or self._is_unit(so_far, following.decode("utf-8", "replace"))


class AnswerProposer(DraftedText):
    """
    Words to the end of the text, or until a stopping criterion of the call would end it.

    Args:
        member_index, member, config, splitter: as of [`Proposer`].
        num_samples (`int`, *optional*, defaults to 1): how many answers are sampled, where the call samples.
    """

    can_propose_ahead = False

    def __init__(
        self, member_index: int, member: Member, config: AdaFuseConfig, splitter: WordSplitter, num_samples: int = 1
    ) -> None:
        super().__init__(member_index, member, config, splitter)
        self.num_samples = num_samples
        # Per text, the main model's number of ids when it last grew, and how many tokens the member had written then.
        self._growth: dict[tuple[int, int], tuple[int, int]] = {}

    def begin(self, node: Node, token: int) -> GrowingWord:
        self._forget(node)
        return super().begin(node, token)

    def append(self, word: GrowingWord, token: int) -> None:
        self._forget(word.nodes[-1])
        super().append(word, token)

    def _forget(self, node: Node) -> None:
        if not self.keeps_logits(node.prompt_index):
            self.member.forget_passed(node)

    def is_enough(self, text: tuple[int, int], words: list[GrowingWord], following: bytes) -> bool:
        answer = self.proposal(words)
        is_stopped = self.stops(text[0], answer.text, self._main_ids(answer), number=text[1])
        return is_stopped or self._is_stuck(text, answer)

    def _is_stuck(self, text: tuple[int, int], answer: Proposal) -> bool:
        """Whether so many tokens have added nothing to the main model's ids of an answer, as where these ids cannot
        represent it: no criterion would ever be asked again."""
        if self.member.has_main_tokenizer:
            return False
        number = len(answer.ids)
        length = self.stops.length(answer.text)
        known_length, since = self._growth.get(text, (0, 0))
        if length > known_length or number < since:
            self._growth[text] = length, number
            return False
        return number - since >= MOST_SILENT

    def is_closed(self, word: GrowingWord) -> bool:
        """Also where a stopping criterion ends the answer inside the word: what follows is not read."""
        return super().is_closed(word) or self._is_stopped(word)

    def _following(self, word: GrowingWord, useful: Sequence[Node], pick_token: TokenPicker) -> Requests[bytes | None]:
        if self._is_stopped(word):
            return b""
        following = yield from super()._following(word, useful, pick_token)
        return following

    def _is_stopped(self, word: GrowingWord) -> bool:
        """Whether a stopping criterion surely ends the answer at the last token of this word, or before it. By the main
        model's ids that is known after each token. By others it is asked once a word, behind the space before it: many
        criteria look for a line break."""
        if is_mid_character(word.data):
            return False  # half a character is no end of a text
        last = word.nodes[-1]
        space = word.data[: len(word.data) - len(self.piece(last.token))]
        begins = space.isspace() and not word.data.isspace()
        if not (self.member.has_main_tokenizer or begins):
            return False
        index = last.prompt_index
        root = self.member.root(index)
        ids = [node.token for node in last.lineage() if node.position > root.position]
        if self.member.has_main_tokenizer:
            return self.stops.num_kept(index, ids, word.number) is not None
        return self.stops.surely_before(index, self.member.vocabulary.text(ids), word.number)

    def finished(self, text: tuple[int, int], words: list[GrowingWord]) -> Proposal:
        """The answer up to where a stopping criterion ends it: nobody judges what the caller does not get."""
        answer = self.proposal(words)
        if self.member.has_main_tokenizer:  # by ids: words with broken characters may decode otherwise than all ids do
            count = self.stops.num_kept(text[0], answer.ids, text[1])
            return answer if count is None else self.proposal(_first_tokens(words, count))
        kept = self.stops.cut(text[0], answer.text, number=text[1])
        if kept is None:
            return answer
        ids = ids_up_to(self.member.vocabulary, answer.ids, kept)
        return Proposal(tuple(cut_words(list(answer.words), kept)), tuple(ids), ends=False)

    def _main_ids(self, answer: Proposal) -> tuple[int, ...] | None:
        return answer.ids if self.member.has_main_tokenizer else None


def _num_silent(words: Sequence[GrowingWord]) -> int:
    """How many tokens at the end of some words add no text: special tokens, without an end."""
    silent = itertools.takewhile(lambda word: not word.data, reversed(words))
    return sum(len(word.nodes) for word in silent)


def _first_tokens(words: Sequence[GrowingWord], count: int) -> list[GrowingWord]:
    """The words of the first `count` tokens, which may end inside one."""
    kept = list[GrowingWord]()
    for word in words:
        if count <= 0:
            break
        kept.append(GrowingWord(word.nodes[:count], is_done=True))
        count -= len(word.nodes)
    return kept


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
        splitter: WordSplitter,
        vocabularies: Sequence[Vocabulary],
    ) -> None:
        super().__init__(member_index, member, config, splitter)
        self._vocabularies = vocabularies

    def propose(self, root: Node, useful: Sequence[Node] = ()) -> Requests[Proposals]:
        yield from self.read([root], useful)
        margins = [margin(root.logprobs.top_log_probs)]
        word = self.begin(root, root.logprobs.top[0])
        while not word.is_done and not self._is_at_limit(word):
            last = word.nodes[-1]
            yield from self.read([last], useful)
            token = last.logprobs.top[0]
            if token in self.eos_ids or self._is_boundary(word, token):
                break
            self.append(word, token)
        if word.nodes:
            word.nodes[-1].ends_candidate = True
        return Proposals([self.proposal([word])], margins)

    def _is_at_limit(self, word: GrowingWord) -> bool:
        extra = 3 if is_mid_character(word.data) else 0
        return len(word.nodes) >= self.splitter.max_word_tokens + extra or not self.has_room(word.nodes[-1])

    def _is_boundary(self, word: GrowingWord, token: int) -> bool:
        text = self.member.vocabulary.text([node.token for node in word.nodes])
        both = self.member.vocabulary.text([*(node.token for node in word.nodes), token])
        if not text.strip() or not both.startswith(text) or "\ufffd" in both or both == text:
            return False
        # Space between two words belongs to either, as tokenizers go.
        gap = range(len(text.rstrip()), len(both) - len(both[len(text) :].lstrip()) + 1)
        return all(any(one.has_boundary(both, at) for at in gap) for one in self._vocabularies)
