"""Calls a model's `forward`: which arguments it takes, and under which name it takes and returns its cache."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..kernels.small_batch_linear import with_small_batch_linears
from ..transformers_compat import cache_argument, execution_device, has_compiled_parts, is_spread_out, returned_cache
from .adapters import AdaptedModel, base_model
from .backend import ForwardError
from .model_facts import cached_while_unchanged

_DROPOUTS = (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d, torch.nn.AlphaDropout)
# Positions of these models count from the padding id + 1.
_OFFSET_POSITION_MODELS = {
    "camembert",
    "data2vec-text",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}


def position_offset(config: Any) -> int:
    """The position of a model's first token."""
    is_offset = getattr(config, "model_type", None) in _OFFSET_POSITION_MODELS
    return (config.pad_token_id or 0) + 1 if is_offset else 0


def max_length(config: Any) -> int | None:
    """
    The most tokens that the positions of a model with this text config allow; `None` where any number goes.

    Positions that are looked up in a table end with it. Rotary ones go on for ever: `max_position_embeddings` says how
    long the texts of the training were, and with YaRN it is even what the factor is applied to. Only where frequencies
    follow the length of the text (`"dynamic"`) may none go beyond: keys cached before would be wrong from there on.
    """
    return None if _ropes(config) and not has_dynamic_frequencies(config) else trained_length(config)


def trained_length(config: Any) -> int | None:
    """The most tokens in the texts on which a model with this text config was trained, where the config says so."""
    for name in ("max_position_embeddings", "max_seq_len"):
        length = getattr(config, name, None)
        if length is not None:
            return int(length) - position_offset(config) if length > 0 else None
    return None


def has_dynamic_frequencies(config: Any) -> bool:
    """Whether a model with this text config takes other rotary frequencies for each length beyond its context."""
    return any("dynamic" in str(rope.get("rope_type")) for rope in _ropes(config))


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The rotary settings of a text config: one, or one for each kind of layer."""
    ropes = getattr(config, "rope_parameters", None) or {}
    of_layers = [rope for rope in ropes.values() if isinstance(rope, dict)]
    return of_layers or ([ropes] if ropes else [])


def frequency_switch(config: Any) -> int | None:
    """
    The number of tokens beyond which a model with this text config reads all of a text by other rotary frequencies
    (LongRoPE), if it does: keys cached before are then of no use, nor may one pass hold texts of both kinds.
    """
    ropes = [rope for rope in _ropes(config) if rope.get("rope_type") == "longrope"]
    lengths = [rope["original_max_position_embeddings"] for rope in ropes]
    return min(lengths, default=None)


@cached_while_unchanged
def device_of(model: Any) -> torch.device:
    """The device of a model's inputs."""
    return execution_device(model)


def is_checkpointed(model: Any) -> bool:
    """Whether a model, as it is now, recomputes its layers for gradients: then it keeps no keys and values."""
    return bool(model.training) and any(getattr(part, "gradient_checkpointing", False) for part in model.modules())


def has_dropout(model: Any) -> bool:
    """Whether a model's logits are random as it is: it, or a layer in it, is in training mode and drops some
    activations then. Some models drop by a function, which only their config tells."""
    dropouts = [module for module in model.modules() if isinstance(module, _DROPOUTS)]
    if any(module.training and module.p > 0 for module in dropouts):
        return True
    rates = [value for name, value in vars(model.config.get_text_config()).items() if "drop" in name]
    return bool(model.training) and any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)


def _takes_columns(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether a `forward` with these parameters takes the columns after which it shall give logits. Some models take
    the number of last columns alone; those that take columns say so in their annotation."""
    parameter = parameters.get("logits_to_keep")
    return parameter is not None and "Tensor" in str(parameter.annotation)


class ModelCall:
    """
    Calls a model with the arguments that its `forward` takes, and leaves out those that it does not.

    Args:
        model (`PreTrainedModel`): called as it is; nothing of it is changed.
        is_set_up (`bool`): whether the first pass sets up nothing on the model. RWKV rescales its weights then, and
            notes that on itself: that pass must be its own, not that of its twin with the quick layers.

    Attributes:
        is_compiled (`bool`): whether torch compiles the model or a part of it.
        cache_argument (`str`, *optional*): the name of the argument that takes the cache or the recurrent state; `None`
            where there is none.
        can_leave_out_logits (`bool`): whether the model computes logits after some columns alone. Not where its parts
            are on several devices, since the columns would come to the wrong one.
    """

    def __init__(self, model: Any, is_set_up: bool = False) -> None:
        self.model = model
        self._is_set_up = is_set_up
        self.is_compiled = has_compiled_parts(model)
        base = base_model(base_model(model))  # inside an adapter, inside PEFT's wrapper
        parameters = inspect.signature(base.forward).parameters
        self._names = set(parameters)
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            self._names |= set(inspect.signature(getattr(base, "base_model", base).forward).parameters)
        self.can_leave_out_logits = _takes_columns(parameters) and not is_spread_out(base)
        self.cache_argument = cache_argument(parameters) or cache_argument(self._names)
        self.offset = position_offset(model.config.get_text_config())

    @functools.cached_property
    def _quick(self) -> Any:
        # An adapter is switched on and off on the model itself.
        return self.model if isinstance(self.model, AdaptedModel) else with_small_batch_linears(self.model)

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        memory: Any = None,
        use_memory: bool = True,
        columns: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """
        The logits after `ids`, and the memory that holds them too; the model makes its own where it is given none. With
        `columns` the logits are those after these columns of `ids`. A model that can does not compute the others.

        Raises:
            ForwardError: whatever the model raises.
        """
        use_memory = use_memory and self.cache_argument is not None
        given: dict[str, Any] = {"input_ids": ids, "use_cache": use_memory, "return_dict": True}
        given["attention_mask"] = mask
        if positions is not None:
            given["position_ids"] = positions + self.offset
        if use_memory:
            given[self.cache_argument or ""] = memory
        is_last = columns is not None and list(columns) == [ids.shape[1] - 1]
        if is_last:
            given["logits_to_keep"] = 1
        elif columns is not None and self.can_leave_out_logits:
            given["logits_to_keep"] = torch.tensor(columns, device="cpu")
        given = {name: value for name, value in given.items() if name in self._names and value is not None}
        if self.is_compiled and (ids.is_cuda or "torch._inductor.cudagraph_trees" in sys.modules):
            # Else each compiled part might free what the one before it gave. All threads have this mark in common: a
            # model that is compiled in parts must not be run beside another on a second GPU.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        try:
            output = (self._quick if self._is_set_up else self.model)(**given)
            logits = output.logits if hasattr(output, "logits") else output[0]
        except Exception as error:
            raise ForwardError(f"{type(error).__name__}: {error}") from error
        self._is_set_up = True
        if columns is not None and logits.shape[1] != len(columns):  # the model gives all
            logits = logits[:, torch.tensor(columns, device=logits.device)]
        if self.is_compiled:
            logits = logits.clone()  # a CUDA graph writes those of its next run over them
        returned = returned_cache(output, self.cache_argument) if self.cache_argument else None
        return logits, memory if returned is None else returned
