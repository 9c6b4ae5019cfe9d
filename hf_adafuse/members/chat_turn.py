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
    """How a prompt ends, where it ends as a chat does: of several ways the one whose chats begin as the prompt does."""
    ending_so = [turn for turn in turns if ids[-len(turn.closing) :] == turn.closing]
    return max(ending_so, key=lambda turn: len(_shared(turn.empty_chat, ids)), default=None)


def chat_turns(tokenizer: Any, vocabulary: Vocabulary) -> list[ChatTurn]:
    """
    How chats end that a member's template, or the plain rendering, has made: without thinking and with it, where the
    template can say so. Empty where the template takes no message, or puts nothing behind it that tells a chat.

    Args:
        tokenizer (`PreTrainedTokenizerBase`), vocabulary (`Vocabulary`): the member's.
    """
    # With these alone any text may end.
    ordinary = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    turns: list[ChatTurn] = []
    for thinks in (False, True):
        try:
            one, other, empty_chat = (
                _ids(tokenizer, vocabulary, content, enable_thinking=thinks) for content in (*_MESSAGES, "...")
            )
        except (ValueError, ImportError):  # of a template that refuses the message, and without a template engine
            continue
        behind = _shared(one[::-1], other[::-1])[::-1]
        turn = ChatTurn(list(itertools.dropwhile(vocabulary.is_space, behind)), empty_chat)
        if one != other and not ordinary.issuperset(turn.closing) and turn not in turns:
            turns.append(turn)
    return turns


def _shared(one: list[int], other: list[int]) -> list[int]:
    """The ids that both begin with."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return [token for token, _ in pairs]


def _ids(tokenizer: Any, vocabulary: Vocabulary, content: str, **variables: Any) -> list[int]:
    text, has_template = rendered_turn(tokenizer, content, **variables)
    return vocabulary.encode_marks(text) if has_template else vocabulary.encode_prompt(text)
