"""Loads members by their names. It imports torch and transformers, so commands import it only when they run."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from ..hub.export import loading
from ..members.loading import check_served_options, has_no_vocabulary
from ..servers.kinds import is_served_name
from ..servers.served_model import ServedModel
from ..transformers_compat import has_device_map

ModelPair = tuple[Any, Any]  # a model and its tokenizer
# How the files of most tokenizers are named.
_TOKENIZER_FILES = ("*token*", "*vocab*", "*merges*", "*.model", "*.spm", "*.bpe", "tekken*")

# The flags that give options of servers. Of the first one `serve` has a longer name with this end.
_FLAGS = {"api_key_env": "api-key-env", "tokenizer": "--served-tokenizer", "allow_http": "--allow-http"}


def load_members(
    model: str | None,
    assistants: Sequence[str] = (),
    dtype: str = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
    served: Mapping[str, Any] | None = None,
) -> list[ModelPair]:
    """
    Each member's model and tokenizer, the main one first.

    Args:
        model (`str`, *optional*): the main model. The default pair is loaded where neither it nor an assistant is
            given.
        assistants (`list[str]`, *optional*): the other models.
        dtype (`str`, *optional*, defaults to `"auto"`): the dtype of all weights. `"auto"`: as they were saved.
        device_map (`str`, *optional*): as in `from_pretrained`. By default models go to the GPU where there is one.
        trust_remote_code (`bool`, *optional*, defaults to `False`): as in `from_pretrained`.
        served (`dict`, *optional*): the arguments of `ServedModel` for models behind servers.

    Raises:
        ValueError: a model does not load, there is no main model, or options are given that no member takes.
    """
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    given = [option for option, value in (served or {}).items() if value is not None and value is not False]
    if model is None:
        if assistants:
            raise ValueError("`--model` must be given with `--assistant`, but is not. Name the main model.")
        if dtype != "auto" or device_map is not None or trust_remote_code or given:
            raise ValueError("`--model` must be given with options of loading, but is not. Name the main model.")
        return default_pair()
    names = [model, *assistants]
    check_served_options(served or {})
    if given and not any(map(is_served_name, names)):
        flag = _FLAGS.get(given[0], f"--served-option {given[0]}")
        raise ValueError(
            f"`{flag}` must be left out where no member is behind a server, but is given. Name one like "
            "vllm:http://localhost:8000, or drop it."
        )
    of_servers = {"trust_remote_code": trust_remote_code, **(served or {})}
    models: list[Any] = []
    tokenizers: list[Any] = []
    # Servers and tokenizers come before the first weights, so that a misspelled name is found at once.
    for name in names:
        with loading(name):
            if is_served_name(name):
                models.append(ServedModel.from_name(name, **of_servers))
                tokenizers.append(models[-1].tokenizer)
            else:
                models.append(None)
                tokenizers.append(_load_tokenizer(name, trust_remote_code))
    options = {"dtype": dtype, "device_map": device_map, "trust_remote_code": trust_remote_code}
    for index, name in enumerate(names):
        if models[index] is None:
            with loading(name):
                models[index] = _on_device(AutoModelForCausalLM.from_pretrained(name, **options).eval())
    return list(zip(models, tokenizers, strict=True))


def check_loaded_here(command: str, args: Namespace) -> None:
    """Raises `ValueError` where a flag names a model behind a server. The command needs the weights of all models."""
    for flag, name in [("--model", args.model), *(("--assistant", name) for name in args.assistant)]:
        if name is not None and is_served_name(name):
            raise ValueError(
                f"`{flag}` must be a model with its weights here for `{command}`, but {name!r} is behind a server. "
                "Give its Hub name or a folder."
            )


def default_pair() -> list[ModelPair]:
    """The first two members of the demo, for commands that name no model."""
    name = f"{__package__.rpartition('.')[0]}.demo"
    if find_spec(name) is None:
        raise ValueError("`--model` must be given, but is not. Name a model on the Hub or a local folder.")
    return list(import_module(name).load_pair())


def _load_tokenizer(name: str, trust_remote_code: bool) -> Any:
    """
    Raises:
        ValueError: none loads from a folder, or one without a vocabulary, and the folder has no file that looks like a
            tokenizer's. transformers would say then that libraries are missing, or nothing.
    """
    folder = Path(name)
    is_bare = (folder / "config.json").is_file() and not any(any(folder.glob(one)) for one in _TOKENIZER_FILES)
    advice = "The folder has no tokenizer files. Save the tokenizer there: tokenizer.save_pretrained(...)."
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        if is_bare:
            raise ValueError(advice) from error
        raise
    if is_bare and has_no_vocabulary(tokenizer):
        raise ValueError(advice)
    return tokenizer


def _on_device(model: Any) -> Any:
    if has_device_map(model) or not torch.cuda.is_available():
        return model
    return model.to("cuda")
