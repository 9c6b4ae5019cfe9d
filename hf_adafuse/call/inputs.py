"""Reads and checks the inputs that `generate()` hands to its decoding method: ids without padding, a mask, a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..members.processor_request import ProcessorRequest
from ..members.prompts import unpadded_rows
from ..transformers_compat import CACHE_ARGUMENTS, CACHE_NAME, NO_IMAGES, given_cache, num_cached
from ..trees.kv_cache import AdaFuseCache, KeysValues, adopt_cache, kept_beginnings

# What `generate()` hands over that AdaFuse makes itself or has no use for.
_EXPECTED = {
    *CACHE_ARGUMENTS,
    "attention_mask",
    "position_ids",
    "cache_position",
    "logits_to_keep",
    "use_cache",
    "tokenizer",
    "assistant_tokenizer",
}


@dataclass(frozen=True)
class GenerateInputs:
    """
    The arguments that `generate()` hands to its decoding method.

    Args:
        input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`): the main model's ids of the
            prompts, padded on the left.
        processors (`ProcessorRequest`): which logits processors the call asks for.
        stopping_criteria (`StoppingCriteriaList`): the criteria of the call.
        generation_config (`GenerationConfig`): prepared by `generate()`.
        streamer (*optional*)
        model_kwargs (`dict`): the rest.
    """

    input_ids: torch.Tensor
    processors: ProcessorRequest
    stopping_criteria: Any
    generation_config: Any
    streamer: Any
    model_kwargs: dict[str, Any]

    @property
    def returns_dict(self) -> bool:
        return bool(self.generation_config.return_dict_in_generate)

    @property
    def returns_cache(self) -> bool:
        return self.returns_dict and self.generation_config.use_cache is not False

    @property
    def gives_scores(self) -> bool:
        return self.returns_dict and bool(self.generation_config.output_scores)


@dataclass(frozen=True)
class MainInputs:
    """
    The main model's inputs.

    Attributes:
        padded (`list[list[int]]`): the ids of each prompt as the caller sees them.
        prompts (`list[list[int]]`): the same without their padding.
        past: the caller's cache; `None` where it holds nothing.
        cache (`KeysValues`, *optional*): its keys and values of the first columns of the left-padded prompts.
        cached_length (`int`): how many tokens the longest text had when these were computed.
        continues_earlier_call (`list[bool]`): per prompt, whether it is the text with which the call that returned
            `past` ended.
    """

    padded: list[list[int]]
    prompts: list[list[int]]
    past: Any
    cache: KeysValues | None
    cached_length: int
    continues_earlier_call: list[bool]


def read_inputs(call: GenerateInputs, model: Any) -> MainInputs:
    """
    Read the inputs of a call of the main model.

    Raises:
        ValueError: they cannot be used.
    """
    ids, kwargs = call.input_ids, call.model_kwargs
    _check_arguments(ids, kwargs, call.streamer, model)
    mask = kwargs.get("attention_mask")
    prompts = unpadded_rows(ids, mask, "input_ids")
    _check_positions(ids, mask, kwargs.get("position_ids"))
    past = given_cache(kwargs)
    if isinstance(past, AdaFuseCache) and past.texts:
        return _with_known_ids(ids.tolist(), prompts, past, model)
    num_columns = num_cached(past)
    nowhere = [False] * len(prompts)
    if num_columns == 0:
        return MainInputs(ids.tolist(), prompts, past, None, 0, nowhere)
    cache = _read_cache(past, num_columns, ids)
    num_padding = ids.shape[1] - max(map(len, prompts))
    rest = [(keys[:, :, num_padding:], values[:, :, num_padding:]) for keys, values in cache]
    cached = rest if num_columns > num_padding else None
    return MainInputs(ids.tolist(), prompts, past, cached, num_columns - num_padding, nowhere)


def _with_known_ids(padded: list[list[int]], prompts: list[list[int]], past: AdaFuseCache, model: Any) -> MainInputs:
    """Inputs with a cache that knows its ids: what the prompts do not begin with is left out of it."""
    _check_batch_size(len(past.texts), len(prompts))
    is_usable = all(prompts) and past.may_be_of(model)
    cache = kept_beginnings(past.rows(), prompts) if is_usable else None
    continues_earlier_call = [text.ids == ids for text, ids in zip(past.texts, prompts, strict=True)]
    return MainInputs(padded, prompts, past, cache, max(text.length for text in past.texts), continues_earlier_call)


def _read_cache(past: Any, num_columns: int, ids: torch.Tensor) -> KeysValues:
    cache = adopt_cache(past, num_columns)
    _check_batch_size(len(past.layers[0].keys), len(ids))
    if num_columns >= ids.shape[1]:
        raise ValueError(
            f"`{CACHE_NAME}` must hold fewer tokens than `input_ids`, but holds {num_columns} of {ids.shape[1]}. "
            "Pass all ids, the last one not in the cache."
        )
    return cache


def _check_batch_size(cached: int, given: int) -> None:
    if cached != given:
        raise ValueError(
            f"`{CACHE_NAME}` must be of the batch size of `input_ids`, {given}, but is of {cached}. Pass the cache of "
            "the same prompts."
        )


def _check_arguments(input_ids: torch.Tensor, model_kwargs: dict[str, Any], streamer: Any, model: Any) -> None:
    if "inputs_embeds" in model_kwargs:
        raise ValueError("`inputs_embeds` must be left out with AdaFuse, but is given. Pass `input_ids`.")
    unexpected = sorted(
        name
        for name, value in model_kwargs.items()
        if name not in _EXPECTED and value is not None and value is not False and not _says_nothing(name, value, model)
    )
    if unexpected:
        raise ValueError(
            f"The inputs must be `input_ids` and `attention_mask` with AdaFuse, but also hold {unexpected}. "
            "Leave them out."
        )
    if input_ids.shape[1] == 0:
        raise ValueError("`input_ids` must hold at least one token, but is empty. Pass a prompt.")
    if streamer is not None and len(input_ids) > 1:
        raise ValueError(
            f"`streamer` must be used with one prompt, but there are {len(input_ids)}. Leave it out, or call in turn."
        )


def _says_nothing(name: str, value: Any, model: Any) -> bool:
    """Whether an argument says what is so without it: that there are no images, or all tokens are of the first type.
    In a model that has neither, like GPT-2, a type of 0 changes the text."""
    has_types = model.config.get_text_config() is not model.config or hasattr(model.config, "type_vocab_size")
    names = (*NO_IMAGES, "token_type_ids") if has_types else NO_IMAGES
    return name in names and not (value.any() if isinstance(value, torch.Tensor) else value)


def _check_positions(input_ids: torch.Tensor, mask: torch.Tensor | None, given: torch.Tensor | None) -> None:
    if given is None:
        return
    mask = torch.ones_like(input_ids) if mask is None else mask
    usual = (mask.long().cumsum(-1) - 1)[:, -given.shape[-1] :]
    # Multimodal models have several axes; those of a text alone are equal.
    axes: Any = given.to(mask.device).reshape(-1, *given.shape[-2:]) if given.dim() > 1 else []
    if not len(axes) or any(
        axis.shape != usual.shape or not torch.equal(axis[usual >= 0], usual[usual >= 0]) for axis in axes
    ):
        raise ValueError("`position_ids` must count the unpadded tokens from 0, but are others. Leave them out.")
