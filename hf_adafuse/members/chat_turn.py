"""What a member's chat template puts behind a message of the user's: by it a prompt is known for a chat."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from .chat import rendered_turn
from .vocabulary import Vocabulary

_MESSAGES = ("word", "other")  # two that no tokenizer ends alike


class ChatTurn(NamedTuple):
    """
    How a chat ends in which the model is to answer.

    Attributes:
        closing (`list[int]`): the ids behind the user's last message, from the first that is no white space on.
        empty_chat (`list[int]`): the ids of a chat whose only message is `"..."`.
    """

    closing: list[int]
    empty_chat: list[int]


def chat_like(ids: list[int], turns: Sequence[ChatTurn]) -> ChatTurn | None:
    """How a prompt ends, where it ends as a chat does."""
    return next((turn for turn in turns if ids[-len(turn.closing) :] == turn.closing), None)


def chat_turns(tokenizer: Any, vocabulary: Vocabulary) -> list[ChatTurn]:
    """
    How chats end that a member's template, or the plain rendering, has made: without thinking and with it, where the
    template can say so. Empty where the template takes no message, or puts nothing behind it.

    Args:
        tokenizer (`PreTrainedTokenizerBase`), vocabulary (`Vocabulary`): the member's.
    """
    turns: list[ChatTurn] = []
    for thinks in (False, True):
        try:
            one, other, empty_chat = (
                _ids(tokenizer, vocabulary, content, enable_thinking=thinks) for content in (*_MESSAGES, "...")
            )
        except (ValueError, ImportError):  # of a template that refuses the message, and without a template engine
            continue
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one[::-1], other[::-1], strict=False))
        behind = [token for token, _ in pairs][::-1]
        turn = ChatTurn(list(itertools.dropwhile(vocabulary.is_space, behind)), empty_chat)
        if one != other and turn.closing and turn not in turns:
            turns.append(turn)
    return turns


def _ids(tokenizer: Any, vocabulary: Vocabulary, content: str, **variables: Any) -> list[int]:
    text, has_template = rendered_turn(tokenizer, content, **variables)
    return vocabulary.encode_marks(text) if has_template else vocabulary.encode_prompt(text)
