"""Encodes texts for all members: `input_ids` for the main model, `assistant_inputs` for the others. `chat` does the
same for conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import BatchEncoding

from .vocabulary import vocabulary_of


def text_inputs(texts: str | Sequence[str], tokenizers: Sequence[Any]) -> Any:
    """
    The inputs of all members for texts that are to go on, each text encoded by the member's own tokenizer.

    `tokenizer(text)` alone is not enough. An assistant then gets the text that the main tokenizer makes of its ids,
    without what that tokenizer does not keep (a line break, say). And a tokenizer that appends its end token to every
    text (`add_eos_token`) gives its model a text that has ended: here that token is left out.

    ```python
    >>> from transformers import AutoTokenizer
    >>> from hf_adafuse import text_inputs

    >>> names = ["mistralai/Mistral-7B-Instruct-v0.3", "meta-llama/Llama-3.1-8B-Instruct"]
    >>> inputs = text_inputs(["Who wrote Faust?"], [AutoTokenizer.from_pretrained(name) for name in names])
    >>> sorted(inputs), len(inputs["assistant_inputs"])  # ready for `model.generate(**inputs, ...)`
    (['assistant_inputs', 'attention_mask', 'input_ids'], 1)

    ```

    Args:
        texts (`str` or `list[str]`): the prompts.
        tokenizers (`list[PreTrainedTokenizerBase]`): one per member, the main model's first.

    Returns:
        `BatchEncoding`: `input_ids` and `attention_mask` of shape `(batch_size, sequence_length)`, padded on the left,
        for the main model, and `assistant_inputs`, a list of the same for each assistant.

    Raises:
        ValueError: no texts, no tokenizers, or a text without a single token for the main model.
    """
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"`texts` must be a text or a list of texts, but is {texts!r}. Pass the prompts as text.")
    check_tokenizer_list(tokenizers)
    main, *others = ([vocabulary_of(tokenizer).encode_prompt(text) for text in texts] for tokenizer in tokenizers)
    if not any(main):
        raise ValueError(
            "The prompts must be at least one token each, but all are empty (the main tokenizer adds no "
            "beginning-of-sequence token). Pass prompts."
        )
    assistants = [pad_left(rows, tokenizer) for rows, tokenizer in zip(others, tokenizers[1:], strict=True)]
    return BatchEncoding({**pad_left(main, tokenizers[0]), "assistant_inputs": assistants})


def pad_left(rows: Sequence[Sequence[int]], tokenizer: Any) -> Any:
    """Rows of ids as a left-padded `BatchEncoding`. The tokenizer's own padding side makes no difference, and it need
    not have a padding token."""
    filler = padding_id(tokenizer) or 0
    width = max(map(len, rows))
    ids = [[filler] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return BatchEncoding(
        {
            "input_ids": torch.tensor(ids, dtype=torch.long, device="cpu"),
            "attention_mask": torch.tensor(mask, dtype=torch.long, device="cpu"),
        }
    )


def padding_id(tokenizer: Any) -> int | None:
    """The id that fills up rows: the tokenizer's padding token, else its end of sequence, else `None`."""
    return next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), None)


def check_tokenizer_list(tokenizers: Any) -> None:
    """Raises `ValueError` where `tokenizers` is not a list of at least one tokenizer."""
    is_list = isinstance(tokenizers, Sequence) and not isinstance(tokenizers, (str, bytes))
    if not is_list or not tokenizers:
        raise ValueError(
            "`tokenizers` must be a list with one tokenizer per member, but is "
            f"{'empty' if is_list else type(tokenizers).__name__}. Put the main model's first."
        )
    for index, tokenizer in enumerate(tokenizers):
        if not callable(tokenizer) or not hasattr(tokenizer, "encode"):
            raise ValueError(
                f"`tokenizers[{index}]` must be a tokenizer, but is {tokenizer!r}. Load it with AutoTokenizer."
            )
