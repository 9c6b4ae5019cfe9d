"""Which of `generate()`'s logits processors act on which member, and on what ids.

Flags that name no ids act on every member over its own ids; flags that name ids, `prefix_allowed_tokens_fn` and the
user's own processors speak the main vocabulary and act through the main model alone. `assistant_logits_processor`
speaks the vocabulary of one assistant, a grammar that of each member. Sampling's warpers act on none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PrefixConstrainedLogitsProcessor

from ..transformers_compat import make_processors, set_prepared_eos_ids
from .processors import ProcessorStep, PromptProcessors
from .stateful_processors import check_copyable, is_per_row, is_stateful

# Flags that name no ids of the main vocabulary, so that they mean the same to every member.
_SHARED_FLAGS = (
    "repetition_penalty",
    "encoder_repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "min_new_tokens",
    "exponential_decay_length_penalty",
    "remove_invalid_values",
    "renormalize_logits",
)


@dataclass(frozen=True)
class ProcessorRequest:
    """
    The logits processors that a call of `generate()` asks for, kept until the prompts are known.

    Args:
        generation_config (`GenerationConfig`): its flags.
        prefix_allowed_tokens_fn (`Callable`, *optional*): of `generate()`.
        custom (`list`): the user's own processors for the main model.
        assistants (`list`): the user's own processors for each assistant.
    """

    generation_config: GenerationConfig
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None
    custom: Sequence[Any]
    assistants: Sequence[Sequence[Any]] = ()

    def check(self, num_assistants: int) -> None:
        """
        Refuse processors that cannot be called or copied.

        Raises:
            ValueError: what cannot be called, an object that cannot be copied, or not a list for each assistant.
        """
        _check(_each(self.custom), "logits_processor")
        if self.assistants and len(self.assistants) != num_assistants:
            raise ValueError(
                f"`assistant_logits_processor` must be one list of processors per assistant model, but is "
                f"{len(self.assistants)} for {num_assistants} assistant models. Use [] for one that has none."
            )
        _check(_each(self.assistants), "assistant_logits_processor")


def main_processors(
    model: Any,
    request: ProcessorRequest,
    padded: list[list[int]],
    prompts: list[list[int]],
    device: torch.device,
    grammar: Any = None,
) -> list[PromptProcessors]:
    """
    The main model's processors of each prompt.

    Args:
        model (`PreTrainedModel`): any, with the methods of `generate()`.
        request (`ProcessorRequest`): which processors the call asks for.
        padded (`list[list[int]]`), prompts (`list[list[int]]`): the ids of each prompt, with and without padding.
        device (`torch.device`): the device of the ids that processors get.
        grammar (*optional*): a processor over the ids without padding.
    """
    made = []
    for index, (row, prompt) in enumerate(zip(padded, prompts, strict=True)):
        num_padding = len(row) - len(prompt)
        config = copy.copy(request.generation_config)
        config.max_length = config.max_length - num_padding
        if config.min_new_tokens is not None and config.min_length is not None:
            config.min_length = config.min_length - num_padding
        replaced = {type(processor) for processor in request.custom}
        flags = [one for one in _from_flags(model, config, prompt, device) if type(one) not in replaced]
        steps = [ProcessorStep(processor, [prompt]) for processor in [*([] if grammar is None else [grammar]), *flags]]
        if request.prefix_allowed_tokens_fn is not None:
            allowed = PrefixConstrainedLogitsProcessor(_for_row(request.prefix_allowed_tokens_fn, index), 1)
            steps.append(ProcessorStep(allowed, [row]))
        steps += _custom(request.custom, padded, index)
        made.append(PromptProcessors(steps, len(prompt)))
    return made


def assistant_processors(
    model: Any,
    request: ProcessorRequest,
    number: int,
    eos_ids: list[int],
    prompts: list[tuple[list[int], list[int]]],
    device: torch.device,
    grammar: Any = None,
) -> list[PromptProcessors]:
    """
    An assistant's processors: those made from the flags that name no ids, over its own ids, and those that the user
    gave for it.

    Args:
        model (`PreTrainedModel`), request (`ProcessorRequest`), device (`torch.device`), grammar (*optional*): as in
            [`main_processors`].
        number (`int`): its place among the assistants.
        eos_ids (`list[int]`): its end-of-sequence ids.
        prompts (`list[tuple]`): the ids of each prompt without padding: its own, and the main model's, in which
            `min_length` is counted.
    """
    given = request.generation_config
    config = GenerationConfig(**{name: value for name in _SHARED_FLAGS if (value := getattr(given, name)) is not None})
    config.num_beams = 1
    set_prepared_eos_ids(config, eos_ids, device)
    if not eos_ids:
        config.exponential_decay_length_penalty = None
    custom = request.assistants[number] if request.assistants else ()
    width = max(len(prompt) for prompt, _ in prompts)
    padded = [[0] * (width - len(prompt)) + prompt for prompt, _ in prompts]
    made = []
    for index, (prompt, main_prompt) in enumerate(prompts):
        if given.min_new_tokens is None:  # else `generate()` has derived `min_length` from it
            config.min_new_tokens = max((given.min_length or 0) - len(main_prompt), 0) or None
        flags = _from_flags(model, config, prompt, device)
        steps = [ProcessorStep(processor, [prompt]) for processor in [*([] if grammar is None else [grammar]), *flags]]
        made.append(PromptProcessors([*steps, *_custom(custom, padded, index)], len(prompt)))
    return made


def _custom(processors: Sequence[Any], padded: list[list[int]], index: int) -> list[ProcessorStep]:
    """The user's processors for one prompt: those that may be made for the whole batch are called with it."""
    steps = []
    for one in _each(processors):
        needs_batch = is_stateful(one) or is_per_row(one)
        steps.append(ProcessorStep(one, padded, index) if needs_batch else ProcessorStep(one, [padded[index]]))
    return steps


def _each(processors: Sequence[Any]) -> list[Any]:
    """Those of a list and of the lists in it."""
    return [each for one in processors for each in (_each(one) if isinstance(one, (list, tuple)) else [one])]


def _check(processors: list[Any], argument: str) -> None:
    for one in processors:
        if not callable(one):
            raise ValueError(
                f"`{argument}` must be processors, which can be called, but {one!r} cannot. Derive it from "
                "`LogitsProcessor`."
            )
    check_copyable([one for one in processors if is_stateful(one)], argument)


def _from_flags(model: Any, config: GenerationConfig, prompt: list[int], device: torch.device) -> LogitsProcessorList:
    config.do_sample = False  # temperature, top-k and top-p touch neither margins nor NLL
    return LogitsProcessorList(make_processors(model, config, prompt, device))


def _for_row(function: Callable[[int, torch.Tensor], list[int]], row: int) -> Callable[[int, torch.Tensor], list[int]]:
    return lambda _, ids: function(row, ids)
