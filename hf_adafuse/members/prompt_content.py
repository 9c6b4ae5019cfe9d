"""How far the content of a prompt moves a member's next token.

A member that makes something of a question expects another next token than behind the same prompt with its content left
out. A member that answers anything in the same words expects the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .chat_ending import ChatEnding, ending_of
from .prompt_nll import is_chat
from .vocabulary import Vocabulary


class PromptEvidence(NamedTuple):
    """
    What a prompt says about whom to trust, under one member.

    Attributes:
        nll (`float`): the member's NLL (nats per byte) of the prompt, or of the answers in it; see [`prompt_nll`]. NaN
            where there is no such text.
        divergence (`float`): how far the prompt's content moves the member's next token, in nats; see
            [`content_divergence`]. NaN where it was not asked for, or is not known.
        content_bytes (`int`): by how many bytes the prompt is longer than without that content; see [`content_bytes`].
            0 where the divergence is NaN.
        ends_as_chat (`bool`): whether the prompt ends as chats do under the member's template.
    """

    nll: float = math.nan
    divergence: float = math.nan
    content_bytes: int = 0
    ends_as_chat: bool = False


def without_content(text: str) -> str:
    """
    A prompt with its content left out: each line keeps its first word, the last line its last word, too, and " ..."
    stands for the words between. Space at the end stays.

    ```python
    >>> from hf_adafuse.members.prompt_content import without_content

    >>> without_content("Question: Who wrote Faust?\\nAnswer:")
    'Question: ...\\nAnswer:'
    >>> without_content("The capital of Peru is")
    'The ... is'

    ```
    """
    said = text.rstrip()
    *earlier, last = said.split("\n")
    lines = [_shortened(line, line.split()[1:]) for line in earlier]
    return "\n".join([*lines, _shortened(last, last.split()[1:-1], last.split()[-1:])]) + text[len(said) :]


def _shortened(line: str, left_out: Sequence[str], end: Sequence[str] = ()) -> str:
    return " ".join([line.split()[0], "...", *end]) if left_out else line


def ids_without_content(vocabulary: Vocabulary, endings: Sequence[ChatEnding], ids: list[int]) -> list[int] | None:
    """
    A member's ids of a prompt whose content is left out. `None` where the prompt has none, or has special tokens behind
    its beginning and does not end as chats do: where an answer is begun in it, say.

    Of a chat that is one with the message `"..."`: nothing that was said is left, not even by a system prompt. Of
    another text it is [`without_content`], with the special tokens that the prompt begins with.

    Args:
        vocabulary (`Vocabulary`): the member's.
        endings (`list[ChatEnding]`): how chats end under the member's template.
        ids (`list[int]`): the member's ids of the whole prompt.
    """
    ending = ending_of(ids, endings)
    if ending is not None:
        return None if ids == ending.empty_chat else ending.empty_chat
    if is_chat([vocabulary.piece(token) for token in ids], ids, vocabulary.unknown_id):
        return None
    text = vocabulary.prompt_text(ids)
    shortened = without_content(text)
    if shortened == text:
        return None
    shortened_ids = vocabulary.encode_prompt(shortened)
    return [*ids[: _text_start(vocabulary, ids)], *shortened_ids[_text_start(vocabulary, shortened_ids) :]] or None


def content_bytes(vocabulary: Vocabulary, ids: Sequence[int], ids_without: Sequence[int]) -> int:
    """
    By how many bytes of text a prompt is longer than the same prompt without its content, at least 0. What stands in
    place of the content, "..." or a chat with that message, counts: with each short line the difference is smaller.

    Args:
        vocabulary (`Vocabulary`): the member's.
        ids, ids_without (`list[int]`): the member's ids of both.
    """
    with_content, without = (sum(len(vocabulary.piece(token)) for token in each) for each in (ids, ids_without))
    return max(with_content - without, 0)


def _text_start(vocabulary: Vocabulary, ids: list[int]) -> int:
    return next((at for at, token in enumerate(ids) if vocabulary.piece(token)), len(ids))


def content_divergence(logits: torch.Tensor, logits_without_content: torch.Tensor) -> float:
    """
    How far a prompt's content moves the next token: the Kullback-Leibler divergence, in nats, of a member's next-token
    distribution behind the prompt from the one behind the prompt without its content. It is 0 where both are the same,
    and infinite where a token is possible behind the prompt only. It is the mean, over the tokens that the member
    expects, of the pointwise V-information of Ethayarajh et al. (arXiv 2110.08420).

    Args:
        logits, logits_without_content (`torch.Tensor` of shape `(vocab_size,)`): behind both, as the model gives them.
    """
    found, other = (each.to(logits.device).double().log_softmax(-1) for each in (logits, logits_without_content))
    probabilities = found.exp()
    terms = torch.where(probabilities > 0, probabilities * (found - other), 0.0)
    return max(float(terms.sum()), 0.0)
