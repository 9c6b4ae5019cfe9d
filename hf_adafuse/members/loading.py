"""Loads models and tokenizers by name. What is loaded for a main model is loaded once, and kept as long as that model
lives.
"""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from ..servers.kinds import check_member_name, is_served_name
from ..servers.served_model import ServedModel
from ..transformers_compat import execution_device

_TOKENIZERS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
# Per main model, what was loaded for it; it may be seen through several objects that are equal.
_ASSISTANTS: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
# What transformers says, with a page of names, where an auto class has none for a config.
_UNKNOWN_CLASS = "Unrecognized configuration class"
_LOADING_ERRORS = (OSError, ValueError, KeyError)
# What may be said of a model behind a server beside its name; all else is for `from_pretrained`.
_SERVED_OPTIONS = frozenset(inspect.signature(ServedModel).parameters) - {"url", "kind", "model"}
# Those of them that `from_pretrained` takes too.
_SHARED_OPTIONS = frozenset({"trust_remote_code"})


def find_tokenizer(model: Any, argument: str, trust_remote_code: bool | None = None) -> Any:
    """
    The tokenizer of a model, found by the model's name.

    Args:
        model (`PreTrainedModel`): the model.
        argument (`str`): what should have been passed, for the error.
        trust_remote_code (`bool`, *optional*): as in `from_pretrained`.

    Raises:
        ValueError: the model has no name, or none loads from it.
    """
    if isinstance(model, ServedModel):
        return model.tokenizer
    name = getattr(model, "name_or_path", "") or ""
    if not name:
        raise ValueError(
            f"`{argument}` must be a tokenizer, but is None and the model has no name to find it by. Pass it."
        )
    if model not in _TOKENIZERS:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        except _LOADING_ERRORS as error:
            reason = f"none loads from the model's name {name!r} ({type(error).__name__}: {error})"
            raise ValueError(f"`{argument}` must be a tokenizer, but is None and {reason}. Pass it.") from error
        if has_no_vocabulary(tokenizer):
            reason = f"the model's name {name!r} has an empty one"
            raise ValueError(f"`{argument}` must be a tokenizer, but is None and {reason}. Pass it.")
        _TOKENIZERS[model] = tokenizer
    return _TOKENIZERS[model]


def has_no_vocabulary(tokenizer: Any) -> bool:
    """Whether a tokenizer has special tokens only. transformers makes such tokenizers of some models' configs alone,
    where a folder has no files of a tokenizer."""
    return set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids)


@functools.cache
def load_tokenizer(name: str, argument: str, trust_remote_code: bool | None = None) -> Any:
    """
    A tokenizer by its own name, loaded once; see [`find_tokenizer`].

    Raises:
        ValueError: it does not load.
    """
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except _LOADING_ERRORS as error:
        raise ValueError(
            f"`{argument}` must be a tokenizer, its Hub name or a folder, but {name!r} does not load "
            f"({type(error).__name__}: {error}). Check the name."
        ) from error


def load_model(name: str, **options: Any) -> Any:
    """A model by its Hub name, its folder or its server. It takes the `options` that belong to its kind: those of
    `from_pretrained`, or those of `ServedModel`."""
    check_member_name(name)
    own = _options_of_kind(name, options)
    if is_served_name(name):
        return ServedModel.from_name(name, **own)
    for auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText):
        try:
            return auto_class.from_pretrained(name, **own).eval()
        except ValueError as error:
            if _UNKNOWN_CLASS not in str(error):
                raise
    raise ValueError(
        f"A member must be a causal language model, with or without images, but transformers has no such class for "
        f"{name!r}. Choose another."
    )


def _options_of_kind(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are for models of the kind of this one: behind servers, or loaded here."""
    is_served = is_served_name(name)
    return {
        option: value
        for option, value in options.items()
        if option in _SHARED_OPTIONS or (option in _SERVED_OPTIONS) == is_served
    }


def check_served_options(options: Mapping[str, Any]) -> None:
    """Raises `ValueError` where an option is not one of [`ServedModel`]."""
    unknown = sorted(set(options) - _SERVED_OPTIONS)
    if unknown:
        raise ValueError(
            f"`served_option` must be one of {', '.join(sorted(_SERVED_OPTIONS))}, but is {unknown[0]!r}. Correct it."
        )


def check_options(names: Collection[str], options: Mapping[str, Any]) -> None:
    """Raises `ValueError` where there are options and no names, or options for models behind servers and no name of
    one."""
    if options and not names:
        raise ValueError(
            f"`{next(iter(options))}` must be left out where all members are loaded, but is given. It is an argument "
            "for loading members that are given by name. Drop it."
        )
    wrong = sorted((_SERVED_OPTIONS - _SHARED_OPTIONS).intersection(options))
    if wrong and not any(map(is_served_name, names)):
        raise ValueError(
            f"`{wrong[0]}` must be left out where no member is the name of a server, but is given. Name one like "
            '"vllm:http://localhost:8000", or pass it to `ServedModel`.'
        )


def load_assistant(
    main_model: Any, name: str | os.PathLike[str], index: int, source: str | None = None, **options: Any
) -> Any:
    """
    An assistant by its name, on the main model's device.

    Args:
        main_model (`PreTrainedModel`): for which it is loaded, once.
        name (`str`): a Hub name or a folder, as the user gave it.
        index (`int`): its place among the assistants.
        source (`str`, *optional*): where it lies, when that is not its name.
        options: of `from_pretrained`, of `ServedModel`: as of [`load_model`].

    Raises:
        ValueError: it does not load.
    """

    def load(place: str) -> Any:
        model = load_model(place, **options)
        return model if isinstance(model, ServedModel) else model.to(execution_device(main_model))

    return _load_once("model", load, main_model, name, index, source, options)


def load_assistant_tokenizer(
    main_model: Any, name: str | os.PathLike[str], index: int, source: str | None = None, **options: Any
) -> Any:
    """The tokenizer of an assistant by the assistant's name; as [`load_assistant`]."""

    def load(place: str) -> Any:
        return AutoTokenizer.from_pretrained(place, **options)

    return _load_once("tokenizer", load, main_model, name, index, source, options)


def _load_once(
    kind: str,
    load: Callable[[str], Any],
    main_model: Any,
    name: str | os.PathLike[str],
    index: int,
    source: str | None,
    options: dict[str, Any],
) -> Any:
    name = os.fspath(name)
    check_member_name(name)
    source = name if source is None else source
    key = (kind, source, *sorted(_options_of_kind(source, options).items(), key=str))
    loaded = _ASSISTANTS.setdefault(main_model, {})
    if key not in loaded:
        try:
            loaded[key] = load(source)
        except _LOADING_ERRORS as error:
            if is_served_name(source):
                raise ValueError(
                    f"`assistant_models[{index}]` must be a server that can be used, but {name!r} is not: "
                    f"{str(error).rstrip('.')}. Give its tokenizer in `assistant_tokenizers`, and `ServedModel(...)` "
                    "in the place of the name for all else that a name does not say."
                ) from error
            where = "" if source == name else f" from {source!r}"
            raise ValueError(
                f"`assistant_models[{index}]` must be a model, its Hub name or a folder, but {name!r} does not load"
                f'{where} ({type(error).__name__}: {error}). Check the name; one that begins with "./" is a folder of '
                "the repository that the main model was loaded from."
            ) from error
    return loaded[key]
