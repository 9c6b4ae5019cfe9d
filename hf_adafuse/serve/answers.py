"""Turns the rounds of a call into the text and the fields of a reply.

[`GrowingText`] cuts the text at stop texts while its rounds come. The functions make the fields `adafuse` and
`logprobs`. `replies` puts them into bodies and chunks.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from typing import Any

from ..confidence.answer_text import cut_at
from ..confidence.word_confidence import text_confidence
from ..members.tools import Offer, ToolCall
from ..outputs import AdaFuseRound
from ..rounds.trace_text import short_name
from .calls import TokenLogProb


class GrowingText:
    """
    The text of a call as its rounds come, up to its stop text.

    Args:
        stops (`list[str]`): the stop texts.
        members (`list[str]`): the names of the members.
        offer (`Offer`, *optional*): the tools that the text may call. A call is no part of the answer in words.

    Attributes:
        rounds (`list[AdaFuseRound]`): the rounds that have come so far.
    """

    def __init__(self, stops: Sequence[str], members: Sequence[str], offer: Offer | None = None) -> None:
        self.rounds: list[AdaFuseRound] = []
        self._stops = list(stops)
        self._members = members
        self._offer = offer
        self._answer: tuple[str, list[ToolCall]] | None = None
        self._text = ""
        self._sent = 0
        self._num_words_sent = 0

    def restart(self) -> None:
        """Forget the rounds: the call is decoded again from its beginning. Text that has been sent stays sent."""
        self.rounds = []
        self._text = ""

    def add(self, rounds: Sequence[AdaFuseRound]) -> str:
        """Take new rounds. Returns the text that may be sent: all but what may be the beginning of a stop text."""
        self.rounds += rounds
        self._text += "".join(one.text for one in rounds)
        content = cut_at(self._text, self._stops)
        if len(content) == len(self._text):
            content = content[: len(content) - self._num_held()]
        if self._offer is not None:
            content = content[: self._offer.num_plain_characters(content)]
        return self._send(content)

    def end(self, rounds: Sequence[AdaFuseRound]) -> str:
        """Take all rounds of the finished text. Returns what is left to send."""
        self.rounds = list(rounds)
        self._text = "".join(one.text for one in rounds)
        self._answer = self._read()
        return self._send(self.content)

    @property
    def content(self) -> str:
        """The text of the answer."""
        return (self._answer or self._read())[0]

    @property
    def calls(self) -> list[ToolCall]:
        """The tool calls behind the text, once it has ended."""
        return [] if self._answer is None else self._answer[1]

    @property
    def whole(self) -> str:
        """The text of the answer with its tool calls."""
        return cut_at(self._text, self._stops)

    def _read(self) -> tuple[str, list[ToolCall]]:
        return (self.whole, []) if self._offer is None else self._offer.read(self.whole)

    def new_words(self) -> list[dict[str, Any]]:
        """The words that have been sent whole since this was last asked; all that are left once the text has ended."""
        words = self.words(self.sent)
        if self._answer is None and words != self.words(self._text)[: len(words)]:
            words.pop()  # the rest of it is held back, as it may begin a stop text
        new = words[self._num_words_sent :]
        self._num_words_sent = max(self._num_words_sent, len(words))
        return new

    def words(self, content: str | None = None) -> list[dict[str, Any]]:
        """
        The words of the answer, like `{"text": " Lima", "proposers": ["llama"], "confidence": 0.9}`. Joined, their
        texts are its content. `proposers` names the members that proposed the word. `confidence` is from 0 to 1, or
        `None` where it is not known.

        Args:
            content (`str`, *optional*): another beginning of the text, whose words are wanted instead.
        """
        left = len(self.content if content is None else content)
        words: list[dict[str, Any]] = []
        for one in self.rounds:
            proposers = [self._members[index] for index in proposers_of(one)]
            for word, confidence in zip_longest(one.words, one.confidences[: len(one.words)]):
                if left <= 0:
                    return words
                words.append({"text": word[:left], "proposers": proposers, "confidence": confidence})
                left -= len(word)
        return words

    @property
    def num_sent(self) -> int:
        """How many characters have been sent, also before a restart."""
        return self._sent

    @property
    def sent(self) -> str:
        """The text that has been sent."""
        return self._text[: self._sent]

    def _send(self, content: str) -> str:
        new = content[self._sent :]
        self._sent = max(self._sent, len(content))
        return new

    def _num_held(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop text."""
        longest = 0
        for stop in self._stops:
            most = min(len(stop) - 1, len(self._text))
            longest = max(longest, next((n for n in range(most, longest, -1) if self._text.endswith(stop[:n])), 0))
        return longest


def proposers_of(one: AdaFuseRound) -> list[int]:
    """The indices of the members that proposed what a round committed."""
    if one.winner is not None and one.candidates[one.winner].proposers:
        return list(one.candidates[one.winner].proposers)
    return [] if one.proposer is None else [one.proposer]


def adafuse_field(
    text: GrowingText, members: Sequence[str], rounds: Any, shows_rounds: bool, alone: dict[str, str] | None
) -> dict[str, Any]:
    """
    The field `adafuse` of an answer: its confidence, its words, and which share of them each member proposed.

    Args:
        text (`GrowingText`): the finished text.
        members (`list[str]`): the names of the members, the main one first.
        rounds (`AdaFuseRounds`): the rounds that the call returned, with its confidence and thoughts.
        shows_rounds (`bool`): whether the field has all rounds with their candidates.
        alone (`dict[str, str]`, *optional*): each member's own answer by its name, where the request asked for them.
    """
    words = text.words()
    all_words = text.words(text.whole) if text.calls else words
    counts = Counter(name for word in all_words for name in word["proposers"])
    # A score is that of the text without the stop text. A probability is that of the whole answer.
    is_of_call = rounds is not None and (rounds.is_calibrated or text.whole == rounds.text)
    found: dict[str, Any] = {
        "confidence": rounds.confidence if is_of_call else text_confidence([word["confidence"] for word in all_words]),
        "words": words,
        "members": list(members),
        "shares": {name: counts[name] / len(all_words) if all_words else 0.0 for name in members},
    }
    if text.calls:
        found["call_words"] = all_words[len(words) :]
    thoughts = getattr(rounds, "thoughts", None)
    if thoughts and any(thoughts):
        found["thoughts"] = dict(zip(members, thoughts, strict=True))
    if alone is not None:
        found["alone"] = alone
    if shows_rounds:
        found["rounds"] = [round_of(one, members) for one in text.rounds]
    return found


def round_of(one: AdaFuseRound, members: Sequence[str]) -> dict[str, Any]:
    """A round as JSON values, in which members stand by their names instead of their indices."""
    return {
        "text": one.text,
        "words": one.words,
        "confidences": one.confidences,
        "ends": one.ends,
        "proposers": [members[index] for index in proposers_of(one)],
        "winner": one.winner,
        "criterion": one.criterion,
        "highest_wins": one.highest_wins,
        "weights": dict(zip(members, one.weights, strict=False)),
        "margins": dict(zip(members, one.margins, strict=False)),
        "candidates": [
            {
                "text": each.text,
                "ends": each.ends,
                "proposers": [members[index] for index in each.proposers],
                "score": each.score,
                "decided_by": each.decided_by,
                "nlls": dict(zip(members, each.nlls, strict=False)),
                "dropped": None if each.dropped is None else short_name(each.dropped),
                "note": each.note,
            }
            for each in one.candidates
        ],
    }


def chat_log_probs(tokens: Sequence[tuple[TokenLogProb, int]]) -> dict[str, Any]:
    """The field `logprobs` of a chat's answer: an entry for each token, as of [`tokens_within`]."""
    return {
        "content": [
            {**_token(one.data, one.log_prob), "top_logprobs": [_token(*pair) for pair in one.top]} for one, _ in tokens
        ],
        "refusal": None,
    }


def text_log_probs(tokens: Sequence[tuple[TokenLogProb, int]]) -> dict[str, Any]:
    """The field `logprobs` of a completion: lists with an element for each token, as of [`tokens_within`]."""
    return {
        "tokens": [_shown(one.data) for one, _ in tokens],
        "token_logprobs": [one.log_prob for one, _ in tokens],
        "top_logprobs": [{_shown(data): value for data, value in one.top} for one, _ in tokens],
        "text_offset": [start for _, start in tokens],
    }


def tokens_within(tokens: Sequence[TokenLogProb], content: str) -> list[tuple[TokenLogProb, int]]:
    """The tokens of the main model that begin within the content, each with the number of the character in which it
    begins: that of its first byte. Bytes that are no UTF-8 are read as U+FFFD."""
    if content.isascii():  # a character is a byte, which saves time
        starts = accumulate((len(one.data) for one in tokens), initial=0)
        return [pair for pair in zip(tokens, starts, strict=False) if pair[1] < len(content)]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    kept = []
    number = 0  # of characters that are whole before the token
    for one in tokens:
        with_first = number + len(decoder.decode(one.data[:1]))
        is_open = bool(decoder.getstate()[0])  # the first byte may be one of a character that goes on
        start = max(number, with_first + is_open - 1)  # a token without bytes begins where the next one does
        if start >= len(content):
            break
        kept.append((one, start))
        number = with_first + len(decoder.decode(one.data[1:]))
    return kept


def _token(data: bytes, log_prob: float) -> dict[str, Any]:
    return {"token": _shown(data), "logprob": log_prob, "bytes": list(data)}


def _shown(data: bytes) -> str:
    return data.decode("utf-8", "replace")
