"""Where the user's messages stand in a chat that a member's own template has made: found in its ids."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from .chat import rendered_ids
from .vocabulary import Vocabulary

_MESSAGES = ("word", "other")  # two that no tokenizer begins or ends alike


class ChatTurn(NamedTuple):
    """
    What a chat template puts around the user's message.

    Attributes:
        opening (`list[int]`): the ids before the message, wherever in a chat it stands.
        closing (`list[int]`): the ids behind the last message, from the first that is no white space up to where the
            answer begins.
        ellipsis (`list[int]`): the ids of `"..."` as the last message, and of what is behind it.
    """

    opening: list[int]
    closing: list[int]
    ellipsis: list[int]

    def without_content(self, ids: list[int]) -> list[int] | None:
        """
        A chat without its content: what stands before the first message of the user's (a system prompt), `"..."` in
        place of all messages, and what stands behind the last one. `None` where `ids` are no such chat.
        """
        openings, closings = _places(ids, self.opening), _places(ids, self.closing)
        # The last closing follows the last message: where it does not, that message and its closing share a token.
        if not openings or not closings or openings[-1] + len(self.opening) > closings[-1]:
            return None
        return [*ids[: openings[0] + len(self.opening)], *self.ellipsis, *ids[closings[-1] + len(self.closing) :]]


def chat_turns(tokenizer: Any, vocabulary: Vocabulary) -> list[ChatTurn]:
    """
    What a member's template, or the plain rendering, puts around a message: without thinking where the template can say
    so, and as it does by default. Empty for a template that takes no conversation, or puts nothing around a message.

    Args:
        tokenizer (`PreTrainedTokenizerBase`), vocabulary (`Vocabulary`): the member's.
    """
    turns = []
    for variables in ({"enable_thinking": False}, {}):
        try:
            one, other, ellipsis, later = (
                rendered_ids(tokenizer, messages, **variables)
                for messages in (*([message] for message in (*_MESSAGES, "...")), [_MESSAGES[1], "yes", _MESSAGES[0]])
            )
        except (ValueError, ImportError):  # of a template that refuses these, and without a template engine
            continue
        before = one[: min(_num_shared(one, other), _num_shared(one, ellipsis))]
        num_behind = _num_shared(one[::-1], other[::-1])
        num_shared = _num_shared(before[::-1], later[: len(later) - (len(one) - len(before))][::-1])
        opening = before[len(before) - num_shared :]
        closing = list(itertools.dropwhile(vocabulary.is_space, one[len(one) - num_behind :]))
        if opening and closing:
            turns.append(ChatTurn(opening, closing, ellipsis[len(before) :]))
    return turns


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _places(ids: list[int], part: list[int]) -> list[int]:
    """Where `part` stands in `ids`."""
    return [at for at, token in enumerate(ids) if token == part[0] and ids[at : at + len(part)] == part]
