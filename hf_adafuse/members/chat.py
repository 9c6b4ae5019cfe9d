"""Chat messages as each member's own prompt, through its own chat template. Knows tokenizers; no model.

Members were trained on different chat formats: a prompt that one template made is not what another member expects.

```python
>>> from transformers import AutoTokenizer
>>> from hf_adafuse import chat_inputs

>>> names = ["mistralai/Mistral-7B-Instruct-v0.3", "meta-llama/Llama-3.1-8B-Instruct"]
>>> messages = [{"role": "user", "content": "Who wrote Faust?"}]
>>> inputs = chat_inputs(messages, [AutoTokenizer.from_pretrained(name) for name in names])
>>> sorted(inputs), len(inputs["assistant_inputs"])  # ready for `model.generate(**inputs, ...)`
(['assistant_inputs', 'attention_mask', 'input_ids'], 1)

```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import BatchEncoding

_PROBE = "hf-adafuse"


def chat_inputs(
    messages: Sequence[Any],
    tokenizers: Sequence[Any],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Any] | None = None,
    **template_kwargs: Any,
) -> Any:
    """
    The inputs of all members for a chat, each rendered with the member's own chat template.

    Args:
        messages (`list[dict]` or `list[list[dict]]`): a conversation, or a batch of them; each message has a `role`.
        tokenizers (`list[PreTrainedTokenizerBase]`): one per member, the main model's first.
        add_generation_prompt (`bool`, *optional*): open an answer behind the last message. By default unless that
            message is continued.
        continue_final_message (`bool`, *optional*): go on from the text of the last message. By default where that is
            the assistant's.
        tools, documents, template_kwargs (*optional*): for every member's `apply_chat_template`.

    Returns:
        `BatchEncoding`: `input_ids` and `attention_mask` of shape `(batch_size, sequence_length)`, padded on the left,
        for the main model, and `assistant_inputs`, a list of the same for each assistant.

    Raises:
        ValueError: no conversation, a tokenizer without a chat template, or a template that refuses the messages.
    """
    opens, continues = add_generation_prompt, continue_final_message
    if opens and continues:
        raise ValueError(
            "`add_generation_prompt` must be False with `continue_final_message`, but is True. Choose one of the two."
        )
    template_kwargs |= {"tools": tools and list(tools), "documents": documents and list(documents)}
    conversations = _conversations(messages)
    _check_tokenizers(tokenizers)
    made = []
    for index, tokenizer in enumerate(tokenizers):
        rows = [_render(tokenizer, index, chat, opens, continues, template_kwargs) for chat in conversations]
        made.append(pad_left(rows, tokenizer))
    return BatchEncoding({**made[0], "assistant_inputs": made[1:]})


def pad_left(rows: Sequence[Sequence[int]], tokenizer: Any) -> Any:
    """
    Rows of ids as a left-padded `BatchEncoding`, whatever the tokenizer's own settings; it need not have padding.

    Raises:
        ValueError: all are empty.
    """
    filler = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
    width = max(map(len, rows))
    if not width:
        raise ValueError(
            "The prompts must be at least one token each, but all are empty (the main tokenizer adds no "
            "beginning-of-sequence token). Pass prompts."
        )
    ids = [[filler] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return BatchEncoding(
        {"input_ids": torch.tensor(ids, dtype=torch.long), "attention_mask": torch.tensor(mask, dtype=torch.long)}
    )


def loses_template(tokenizer: Any, prompt: Sequence[int], other: Any, is_same_vocabulary: bool) -> bool:
    """
    Whether `prompt` looks like a chat that the template of `tokenizer` made, and `other`, whose member is to read it
    in its own ids, has a template that would make another prompt.
    """
    template, others = getattr(tokenizer, "chat_template", None), getattr(other, "chat_template", None)
    if not template or not others:
        return False
    # The same template without special tokens is the same text, which the other member reads in its own ids.
    if template == others and (is_same_vocabulary or not _special_marks(tokenizer)):
        return False
    return _is_rendered(tokenizer, prompt)


def _ordinary_marks(tokenizer: Any) -> set[str | None]:
    """The special tokens of any text, chat or not."""
    return {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}


def _special_marks(tokenizer: Any) -> list[str]:
    """The special tokens that a chat template writes, those of any text left out."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()} - _ordinary_marks(tokenizer)
    return [token for token in added if token.strip() and token in str(tokenizer.chat_template)]


def _is_rendered(tokenizer: Any, prompt: Sequence[int]) -> bool:
    ordinary, marks = _ordinary_marks(tokenizer), _special_marks(tokenizer)
    try:  # what follows a user's message; templates without special tokens have nothing else to be known by
        probe = [{"role": "user", "content": _PROBE}]
        rendered = tokenizer.apply_chat_template(probe, tokenize=False, add_generation_prompt=True)
        marks.append(rendered.partition(_PROBE)[2].strip())
    except Exception:  # a template may refuse a bare user message in any way it likes: then nothing more is known
        pass
    text = tokenizer.decode(list(prompt), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return any(len(mark) > 2 and mark not in ordinary and mark in text for mark in marks)


def _conversations(messages: Sequence[Any]) -> list[list[Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(
            f"`messages` must be a list of messages or a list of such lists, but is {messages!r}. "
            'A message is {"role": ..., "content": ...}.'
        )
    batch = [messages] if isinstance(messages[0], Mapping) else messages
    for row, conversation in enumerate(batch):
        is_list = isinstance(conversation, Sequence) and not isinstance(conversation, (str, bytes))
        if not is_list or not conversation or not all(isinstance(m, Mapping) and "role" in m for m in conversation):
            raise ValueError(
                f"`messages` must be messages with a `role`, but has {conversation!r} as conversation {row}. "
                'A message is {"role": ..., "content": ...}.'
            )
    return [list(conversation) for conversation in batch]


def _check_tokenizers(tokenizers: Sequence[Any]) -> None:
    if isinstance(tokenizers, (str, bytes)) or not isinstance(tokenizers, Sequence) or not tokenizers:
        raise ValueError(
            "`tokenizers` must be a list with one tokenizer per member, but is "
            f"{'empty' if tokenizers == [] else type(tokenizers).__name__}. Put the main model's first."
        )
    for index, tokenizer in enumerate(tokenizers):
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"`tokenizers[{index}]` must have a chat template, but {_name(tokenizer)} has none. Set its "
                "`chat_template`, or pass that member's prompt yourself (`assistant_inputs`)."
            )


def _render(
    tokenizer: Any, index: int, chat: list[Any], opens: bool | None, continues: bool | None, options: dict[str, Any]
) -> list[int]:
    if continues is None:
        continues = not opens and chat[-1]["role"] == "assistant"
    options = {
        **options,
        "add_generation_prompt": not continues if opens is None else opens,
        "continue_final_message": continues,
    }
    try:
        rendered = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, **options)
    except ImportError:
        raise  # the template engine is missing: its message says what to install
    except Exception as error:  # a template says no with whatever exception it likes
        raise ValueError(
            f"The messages must suit every member's chat template, but that of `tokenizers[{index}]` "
            f"({_name(tokenizer)}) refuses them: {error}. Change the messages, or that member's `chat_template`."
        ) from error
    return list(rendered["input_ids"])


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
