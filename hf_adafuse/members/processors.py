"""Which of `generate()`'s logits processors act on which member, and on what ids. Knows no tree, text or word.

Flags that name no ids act on every member over its own ids; flags that name ids, `prefix_allowed_tokens_fn` and the
user's own processors speak the main vocabulary and act through the main model alone. Sampling's warpers act on none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PrefixConstrainedLogitsProcessor

from ..host_internals import make_processors, set_prepared_eos_ids

# Flags that name no ids of the main vocabulary, so that they mean the same to every member.
_SHARED_FLAGS = (
    "repetition_penalty",
    "encoder_repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "min_length",
    "min_new_tokens",
    "exponential_decay_length_penalty",
    "remove_invalid_values",
    "renormalize_logits",
)


@dataclass
class RowProcessors:
    """
    The processors of one prompt under one member.

    Args:
        flags (`LogitsProcessorList`): made from flags; they see the row without its padding, as if it were alone.
        custom (`LogitsProcessorList`): the user's; they see the row as passed to `generate()`, padding and all.
        padding (`list[int]`): the padding of the row.
    """

    flags: LogitsProcessorList
    custom: LogitsProcessorList
    padding: list[int]

    def __bool__(self) -> bool:
        return bool(self.flags or self.custom)

    def __call__(self, ids: list[list[int]], scores: torch.Tensor) -> torch.Tensor:
        """Process `scores` of shape `(num_rows, vocab_size)`; `ids` are as many rows of equal length."""
        rows = torch.tensor(ids, device=scores.device)
        scores = self.flags(rows, scores.clone())
        if self.custom:
            padding = torch.tensor([self.padding] * len(ids), dtype=rows.dtype, device=rows.device)
            scores = self.custom(torch.cat([padding, rows], dim=1), scores)
        return scores


@dataclass
class ProcessorRequest:
    """What `generate()` was asked to process logits with, kept until the rows are known."""

    generation_config: GenerationConfig
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None
    custom: LogitsProcessorList


def main_processors(
    model: Any, request: ProcessorRequest, padded: list[list[int]], prompts: list[list[int]], device: torch.device
) -> list[RowProcessors]:
    """The main model's processors, one set per row of the batch."""
    rows = []
    for index, (row, prompt) in enumerate(zip(padded, prompts, strict=True)):
        padding = row[: len(row) - len(prompt)]
        config = copy.copy(request.generation_config)
        config.max_length = config.max_length - len(padding)
        if config.min_new_tokens is not None and config.min_length is not None:
            config.min_length = config.min_length - len(padding)
        flags = _from_flags(model, config, prompt, device)
        replaced = {type(processor) for processor in request.custom}
        flags = LogitsProcessorList(processor for processor in flags if type(processor) not in replaced)
        custom = LogitsProcessorList(request.custom)
        if request.prefix_allowed_tokens_fn is not None:
            custom.insert(0, PrefixConstrainedLogitsProcessor(_for_row(request.prefix_allowed_tokens_fn, index), 1))
        rows.append(RowProcessors(flags, custom, padding))
    return rows


def assistant_processors(
    model: Any, request: ProcessorRequest, eos_ids: list[int], prompts: list[list[int]], device: torch.device
) -> list[RowProcessors]:
    """An assistant's processors: those made from the flags that name no ids, over its own ids."""
    given = request.generation_config
    config = GenerationConfig(**{name: value for name in _SHARED_FLAGS if (value := getattr(given, name)) is not None})
    config.num_beams = 1
    set_prepared_eos_ids(config, eos_ids, device)
    if not eos_ids:
        config.exponential_decay_length_penalty = None
    if config.min_new_tokens is not None:
        config.min_length = None  # `generate()` derives it from the main model's prompt
    return [RowProcessors(_from_flags(model, config, prompt, device), LogitsProcessorList(), []) for prompt in prompts]


def _from_flags(model: Any, config: GenerationConfig, prompt: list[int], device: torch.device) -> LogitsProcessorList:
    config.do_sample = False  # temperature, top-k and top-p touch neither margins nor NLL
    return LogitsProcessorList(make_processors(model, config, prompt, device))


def _for_row(function: Callable[[int, torch.Tensor], list[int]], row: int) -> Callable[[int, torch.Tensor], list[int]]:
    return lambda _, ids: function(row, ids)
