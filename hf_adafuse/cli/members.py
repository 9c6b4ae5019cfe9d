"""From names to loaded members. Imports torch and transformers: commands import it when they run."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from ..hub.export import loading
from ..members.loading import check_served_options
from ..servers.kinds import is_served_name
from ..servers.served_model import ServedModel
from ..transformers_compat import has_device_map

Pair = tuple[Any, Any]


def load_members(
    model: str | None,
    assistants: Sequence[str] = (),
    dtype: str = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
    served: Mapping[str, Any] | None = None,
) -> list[Pair]:
    """
    Each member's model and tokenizer, the main one first.

    Args:
        model (`str`, *optional*): the main model; the default pair when neither it nor an assistant is given.
        assistants (`list[str]`): the others.
        dtype (`str`): of all weights; `"auto"` as saved.
        device_map (`str`, *optional*): as in `from_pretrained`. Without it, all on the GPU where there is one.
        trust_remote_code (`bool`): as in `from_pretrained`.
        served (`dict`, *optional*): arguments of `ServedModel` for those behind servers.

    Raises:
        ValueError: something does not load, or there is no main model.
    """
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    if model is None:
        if assistants:
            raise ValueError("`--model` must be given with `--assistant`, but is not. Name the main model.")
        if dtype != "auto" or device_map is not None or trust_remote_code:
            raise ValueError("`--model` must be given with options of loading, but is not. Name the main model.")
        return default_pair()
    names = [model, *assistants]
    check_served_options(served or {})
    tokenizers = []
    for name in names:  # before the first weights: a misspelled name is found at once
        with loading(name):
            tokenizers.append(_tokenizer(name, trust_remote_code, served or {}))
    options = {"dtype": dtype, "device_map": device_map, "trust_remote_code": trust_remote_code}
    models = []
    for name, tokenizer in zip(names, tokenizers, strict=True):
        with loading(name):
            if isinstance(tokenizer, ServedModel):
                models.append(tokenizer)
            else:
                models.append(_on_device(AutoModelForCausalLM.from_pretrained(name, **options).eval()))
    return [(model, model.tokenizer if one is model else one) for model, one in zip(models, tokenizers, strict=True)]


def check_loaded_here(command: str, args: Namespace) -> None:
    """Raises `ValueError` where a flag names a model behind a server: the command needs its weights."""
    for flag, name in [("--model", args.model), *(("--assistant", name) for name in args.assistant)]:
        if name is not None and is_served_name(name):
            raise ValueError(
                f"`{flag}` must be a model with its weights here for `{command}`, but {name!r} is behind a server. "
                "Give its Hub name or a folder."
            )


def default_pair() -> list[Pair]:
    """The models of the demo, for when none are named."""
    name = f"{__package__.rpartition('.')[0]}.demo"
    if find_spec(name) is None:
        raise ValueError("`--model` must be given, but is not. Name a model on the Hub or a local folder.")
    return list(import_module(name).load_pair())


def _tokenizer(name: str, trust_remote_code: bool, served: Mapping[str, Any]) -> Any:
    """A tokenizer by the model's name; of one behind a server, the model itself, which has it."""
    if is_served_name(name):
        return ServedModel.from_name(name, **served)
    return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def _on_device(model: Any) -> Any:
    if has_device_map(model) or not torch.cuda.is_available():
        return model
    return model.to("cuda")
