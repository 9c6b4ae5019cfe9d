"""A model with one of its PEFT adapters active, as a member of its own. All members of one base model share its
weights.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..transformers_compat import (
    ADAPTER_SWITCHES,
    adapter_configs,
    adapters_of,
    has_adapter_of_each_row,
    is_adapter_layer,
    unwrapped,
)
from .model_facts import cached_while_unchanged


class AdaptedModel:
    """
    A model as it is with one of its adapters active: called like the model, and in all else the model itself.

    Each call switches the adapter on and, also after an error, what was active before on again; gradient flags stay
    as they are. Two threads must not call one model with different adapters at the same time.

    Args:
        model (`PreTrainedModel` or `PeftModel`): with LoRA or another adapter that acts inside its layers.
        adapter (`str`, *optional*): the adapter's name; `None` for the model without any.
    """

    def __init__(self, model: Any, adapter: str | None) -> None:
        self.model = base_model(model)
        self.adapter = adapter

    def check(self, argument: str) -> AdaptedModel:
        """
        Returns itself.

        Raises:
            ValueError: no adapter of that name, or adapters merged into the weights; `argument` is what to call it.
        """
        names = sorted({name for layer in self._layers for name in adapters_of(layer)})
        if not names or (self.adapter is not None and self.adapter not in names):
            raise ValueError(
                f"`{argument}` must name an adapter in the layers of its {type(self.model).__name__}, {names}, or "
                f"None, but names {self.adapter!r}. Load the adapter first."
            )
        merged = sorted({name for layer in self._layers for name in layer.merged_adapters})
        if merged:
            raise ValueError(
                f"`{argument}` must be of a model whose adapters are apart from it, but {merged} are merged. Call "
                "`unmerge_adapter()`, or pass the model alone."
            )
        return self

    @functools.cached_property
    def _layers(self) -> list[Any]:
        return [module for module in self.model.modules() if is_adapter_layer(module)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._active():
            return self.model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        with self._active():
            return self.model.generate(*args, **kwargs)

    @contextmanager
    def _active(self) -> Iterator[None]:
        active, disabled = ADAPTER_SWITCHES
        # Some layers have a switch of their own only once it has been moved: they shall not have one after us.
        before = [
            {name: vars(layer)[name] for name in ADAPTER_SWITCHES if name in vars(layer)} for layer in self._layers
        ]
        try:
            for layer in self._layers:
                held = self.adapter is not None and self.adapter in adapters_of(layer)
                setattr(layer, disabled, not held)  # a layer that is not of this adapter is as it is without any
                if held:
                    setattr(layer, active, [self.adapter])
            yield
        finally:
            for layer, switches in zip(self._layers, before, strict=True):
                for name in ADAPTER_SWITCHES:
                    vars(layer).pop(name, None)
                vars(layer).update(switches)

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # not there while it is being copied
            raise AttributeError(name)
        return getattr(self.model, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AdaptedModel) and self.model is other.model and self.adapter == other.adapter

    def __hash__(self) -> int:
        return hash((id(self.model), self.adapter))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.model).__name__}, {self.adapter!r})"


def adapted(model: Any, argument: str) -> Any:
    """A pair (model, adapter) as an [`AdaptedModel`], checked anew where it is one; any other model as it is."""
    if isinstance(model, AdaptedModel):
        return AdaptedModel(model.model, model.adapter).check(argument)
    if not isinstance(model, tuple):
        return model
    if len(model) != 2 or not isinstance(model[0], torch.nn.Module) or not isinstance(model[1], str | None):
        shown = tuple(type(part).__name__ if isinstance(part, torch.nn.Module) else part for part in model)
        raise ValueError(
            f"`{argument}` must be a model or a pair (model, adapter's name or None), but is {shown}. Load the model "
            "first."
        )
    problem = adapter_problem(model[0])
    if problem is not None:
        raise ValueError(f"`{argument}` must answer to token ids alone, but {problem}")
    return AdaptedModel(*model).check(argument)


def base_model(model: Any) -> Any:
    """The model itself, where it comes with an adapter or wrapped by PEFT."""
    return model.model if isinstance(model, AdaptedModel) else unwrapped(model)


def weak_reference(model: Any) -> Callable[[], Any]:
    """A weak reference to a model; with an adapter, one that lives as long as the model behind it."""
    if not isinstance(model, AdaptedModel):
        return weakref.ref(model)
    reference, adapter = weakref.ref(model.model), model.adapter

    def revive() -> AdaptedModel | None:
        alive = reference()
        return None if alive is None else AdaptedModel(alive, adapter)

    return revive


def model_fingerprint(model: Any) -> Any:
    """What else than its weights the keys and values of a model follow from: the type and the device of the weights,
    and its adapter, or the adapters that are switched on."""
    weights = next(base_model(model).parameters(), None)
    placed = () if weights is None else (weights.dtype, weights.device)
    return (*placed, model.adapter) if isinstance(model, AdaptedModel) else (*placed, *_switches(base_model(model)))


@cached_while_unchanged
def _switches(model: Any) -> list[str]:
    """How the switches of adapters inside a model stand, each way once."""
    layers = [module for module in model.modules() if is_adapter_layer(module)]
    return sorted({str([getattr(layer, switch) for switch in ADAPTER_SWITCHES]) for layer in layers})


def adapter_problem(model: Any) -> str | None:
    """What makes a model with adapters need more than token ids, or `None`; with a remedy."""
    configs = adapter_configs(model)
    if any(getattr(config, "is_prompt_learning", False) for config in configs):
        return "uses prompt learning (PEFT). Use LoRA, or merge the adapter."
    if any(getattr(config, "alora_invocation_tokens", None) for config in configs):
        return "uses activated LoRA (PEFT), which begins inside the prompt. Use ordinary LoRA."
    if configs and any(has_adapter_of_each_row(module) for module in model.modules()):
        return "has `adapter_names`, an adapter for each row. Leave them out: make a call for each adapter."
    return None
