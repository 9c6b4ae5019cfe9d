"""How chats end under a member's template: with what it puts behind the user's last message. By its end a prompt is
known for a chat.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from .chat import rendered_turn
from .vocabulary import Vocabulary

_MESSAGES = ("word", "other")  # two that no tokenizer ends alike


class ChatEnding(NamedTuple):
    """
    How a chat ends in which the model is to answer next.

    Attributes:
        closing (`list[int]`): the ids behind the user's last message, from the first that is no white space on.
        empty_chat (`list[int]`): the ids of a chat whose only message is `"..."`.
    """

    closing: list[int]
    empty_chat: list[int]


def ending_of(ids: list[int], endings: Sequence[ChatEnding]) -> ChatEnding | None:
    """Which of these endings a prompt has; `None` where it is no chat. Two of them may have one closing: then it is the
    one whose empty chat begins as the prompt does."""
    found = [ending for ending in endings if ids[-len(ending.closing) :] == ending.closing]
    return max(found, key=lambda ending: len(_shared(ending.empty_chat, ids)), default=None)


def chat_endings(tokenizer: Any, vocabulary: Vocabulary) -> list[ChatEnding]:
    """
    The endings of chats that a member's template has made, or the plain rendering, where there is no template.

    There are two where the template can ask the model to think, and not to. There is none where the template refuses a
    message, or puts nothing behind it but tokens that may end any text.

    Args:
        tokenizer (`PreTrainedTokenizerBase`), vocabulary (`Vocabulary`): the member's.
    """
    ends_of_any_text = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    endings: list[ChatEnding] = []
    for thinks in (False, True):
        try:
            one, other, empty_chat = (
                _ids(tokenizer, vocabulary, content, enable_thinking=thinks) for content in (*_MESSAGES, "...")
            )
        except (ValueError, ImportError):  # of a template that refuses the message, and without a template engine
            continue
        behind = _shared(one[::-1], other[::-1])[::-1]
        ending = ChatEnding(list(itertools.dropwhile(vocabulary.is_space, behind)), empty_chat)
        if one != other and not ends_of_any_text.issuperset(ending.closing) and ending not in endings:
            endings.append(ending)
    return endings


def _shared(one: list[int], other: list[int]) -> list[int]:
    """The ids that both begin with."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return [token for token, _ in pairs]


def _ids(tokenizer: Any, vocabulary: Vocabulary, content: str, **variables: Any) -> list[int]:
    text, has_template = rendered_turn(tokenizer, content, **variables)
    return vocabulary.encode_marks(text) if has_template else vocabulary.encode_prompt(text)
