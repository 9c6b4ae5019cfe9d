"""Makes and checks each member's ids of the prompts of a call. An assistant without inputs of its own reads the text of
the main model's ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.utils import logging

from ..trees.backend import as_tensor
from ..trees.model_call import has_dynamic_frequencies
from .chat import is_same_text, loses_template
from .model_handle import ModelHandle

logger = logging.get_logger(__name__)

_REMEDY = (
    "Make the inputs of all members with `hf_adafuse.text_inputs(texts, [tokenizer, *assistant_tokenizers])`, or pass "
    "texts to `hf_adafuse.AdaFuseEnsemble`."
)


def assistant_prompts(
    handles: Sequence[ModelHandle], main_prompts: list[list[int]], given: Sequence[Any] | None, repeats: int = 1
) -> list[list[list[int]]]:
    """
    Per assistant, its ids of each prompt: as given; the main model's when the tokenizers are identical; else the
    decoded prompt, encoded with the assistant's own special tokens. `repeats` is how often each of the main model's
    prompts comes in a row, where several texts are sampled of one.
    """
    main, *assistants = handles
    if given is not None and not isinstance(given, (list, tuple)):
        raise ValueError(f"`assistant_inputs` must be a list, but is a {type(given).__name__}. Give one per assistant.")
    if given is not None and len(given) != len(assistants):
        raise ValueError(
            f"`assistant_inputs` must be one per assistant model, but is {len(given)} for {len(assistants)} "
            "assistant models. Use None in the list for a prompt to be made from the main model's."
        )
    prompts = []
    for index, assistant in enumerate(assistants):
        if given is not None and given[index] is not None:
            rows = _given_rows(given[index], index, len(main_prompts) // repeats, assistant)
            rows = [row for row in rows for _ in range(repeats)]
        elif assistant.has_main_tokenizer:
            rows = [list(ids) for ids in main_prompts]
        else:
            texts = [main.vocabulary.prompt_text(ids) for ids in main_prompts]
            rows = [assistant.vocabulary.encode_prompt(text) for text in texts]
        prompts.append(rows)
    return prompts


def warn_of_damaged_prompts(
    handles: Sequence[ModelHandle], prompts: Sequence[list[list[int]]], derived: Sequence[int]
) -> None:
    """
    Warn, once for each case, where a member does not read the prompt that the caller means.

    Args:
        handles (`list[ModelHandle]`): the main model first.
        prompts (`list[list[list[int]]]`): per member and prompt, the member's ids.
        derived (`list[int]`): the assistants, by number, whose prompts have been made of the main model's ids.
    """
    main, main_prompts = handles[0], prompts[0]
    for k, other in enumerate(handles):
        ends = other.vocabulary.appended
        is_given = k not in derived
        if is_given and ends and any(len(ids) > len(ends) and ids[-len(ends) :] == ends for ids in prompts[k]):
            logger.warning_once(
                f"The prompt of {other.name} ends with {other.tokenizer.decode(ends)!r}, which its tokenizer appends "
                f"to every text: the model reads a text that has ended. {_REMEDY}"
            )
        if k == 0:
            continue
        pairs = [(main.tokenizer, ids, other.tokenizer, own) for ids, own in zip(main_prompts, prompts[k], strict=True)]
        if any(loses_template(*pair) and (not is_given or is_same_text(*pair)) for pair in pairs):
            logger.warning_once(
                f"The prompt looks like a chat that the main model's chat template has rendered, but {other.name} has "
                "a template of its own and gets only the text of that prompt. Make the inputs of all members with "
                "`hf_adafuse.chat_inputs(messages, [tokenizer, *assistant_tokenizers])`, or use "
                '`pipeline("adafuse-text-generation", ...)` (`hf_adafuse.AdaFusePipeline`).'
            )
    if any(not handles[k].has_main_tokenizer for k in derived):
        lost = main.vocabulary.lost_in_prompts
        if not lost and any(map(main.vocabulary.has_unknown, main_prompts)):
            lost = ["characters that are not in its vocabulary"]
        if lost:
            logger.warning_once(
                "The other members get the prompt as the main model's tokenizer decodes it, and that tokenizer "
                f"({type(main.tokenizer).__name__} of {main.tokenizer.name_or_path or 'no name'}) does not keep "
                f"{', '.join(lost)}: where the prompt had any, the others do not read them. {_REMEDY}"
            )


def check_prompts(handle: ModelHandle, prompts: list[list[int]]) -> None:
    """Refuse prompts that the model cannot read."""
    size = handle.vocabulary.vocab_size
    for row, ids in enumerate(prompts):
        outside = [token for token in ids if token < 0 or (size is not None and token >= size)]
        if outside:
            raise ValueError(
                f"The prompt of {handle.name} must be ids from 0 to {(size or 0) - 1}, but has {outside[0]} in "
                f"row {row}. Tokenize it with that member's own tokenizer."
            )
        if not ids:
            raise ValueError(
                f"The prompt of {handle.name} must be at least one token, but is empty in row {row} (its "
                "tokenizer adds no beginning-of-sequence token). Pass a prompt, or its ids in `assistant_inputs`."
            )
        if handle.max_length is not None and len(ids) > handle.max_length:
            follow = has_dynamic_frequencies(handle.model.config.get_text_config())
            reason = "; beyond, its dynamic rotary frequencies follow the length of the text" if follow else ""
            raise ValueError(
                f"The prompt of {handle.name} must be at most {handle.max_length} tokens "
                f"(`max_position_embeddings`{reason}), but is {len(ids)} tokens in row {row}. Shorten it."
            )
    switch = handle.frequency_switch
    lengths = [len(ids) for ids in prompts]
    if switch is not None and min(lengths) <= switch < max(lengths):
        raise ValueError(
            f"The prompts of {handle.name} must be all of at most {switch} tokens or all longer, for there its "
            f"rotary frequencies change, but are of {lengths} tokens. Pass them in two calls."
        )


def unpadded_rows(ids: torch.Tensor, mask: torch.Tensor | None, name: str) -> list[list[int]]:
    """The rows of a left-padded batch without their padding."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(
            f"`{name}` must be integers, but is of type {ids.dtype}. Pass the tokenizer's output as it is."
        )
    rows: list[list[int]] = ids.tolist()
    if mask is None:
        return rows
    if tuple(mask.shape) != tuple(ids.shape):
        raise ValueError(
            f"The attention mask of `{name}` must be of the shape of its ids {tuple(ids.shape)}, but is of shape "
            f"{tuple(mask.shape)}. Pass the tokenizer's output as it is."
        )
    counts = mask.bool().sum(-1).tolist()
    left_padded = torch.arange(ids.shape[1], device=mask.device) >= ids.shape[1] - mask.bool().sum(-1, keepdim=True)
    if not torch.equal(mask.bool(), left_padded):
        raise ValueError(
            f"`{name}` must be padded on the left, but is padded on the right or has holes. "
            'Set `tokenizer.padding_side = "left"`.'
        )
    return [row[len(row) - count :] for row, count in zip(rows, counts, strict=True)]


def _given_rows(inputs: Any, index: int, num_rows: int, assistant: ModelHandle) -> list[list[int]]:
    name = f"assistant_inputs[{index}]"
    if not isinstance(inputs, Mapping) and not hasattr(inputs, "keys"):
        inputs = {"input_ids": inputs}
    others = map(str, inputs.keys())
    images = sorted(key for key in others if key.startswith(("pixel_", "image_", "input_features")))
    if images:
        raise ValueError(
            f"`{name}` must hold `input_ids` and `attention_mask` alone, but also holds {images}. Assistants read "
            "text; make the model that sees images the main one."
        )
    try:
        ids = as_tensor(inputs["input_ids"])
        mask = inputs.get("attention_mask")
        mask = None if mask is None else as_tensor(mask)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"`{name}` must hold `input_ids` and `attention_mask` as tensors, but cannot be read as such ({error}). "
            "Pass the output of the assistant's tokenizer, padded on the left."
        ) from error
    if ids.dim() == 1:
        ids, mask = ids[None], mask[None] if mask is not None and mask.dim() == 1 else mask
    if ids.dim() != 2 or len(ids) != num_rows:
        raise ValueError(
            f"`{name}` must hold {num_rows} prompts, like the main model's, but is of shape {tuple(ids.shape)}. "
            "Tokenize the same prompts with the assistant's tokenizer."
        )
    padding = assistant.tokenizer.pad_token_id
    if mask is None and padding is not None and padding not in assistant.own_eos_ids():
        mask = ids != padding  # as `generate()` infers it
    return unpadded_rows(ids, mask, name)
