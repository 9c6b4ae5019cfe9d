"""From what a user passes to members: which models, which tokenizers. Runs no model."""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from .adapters import AdaptedModel, adapted, adapter_problem, base_model
from .config import AdaFuseConfig
from .member import Member
from .model_call import frequency_switch, max_length
from .self_test import BACKENDS, SelfTestError, choose_backend, reason_not_to_test
from .vocabulary import Vocabulary, vocabulary_of


@dataclass
class EnsembleArguments:
    """What a user may bind to a model or pass to a call; a call's argument wins over a bound one."""

    assistant_models: Sequence[Any] | None = None
    assistant_tokenizers: Sequence[Any] | None = None
    assistant_inputs: Sequence[Any] | None = None
    tokenizer: Any = None
    adafuse_config: AdaFuseConfig | Mapping[str, Any] | bool | None = None

    def __deepcopy__(self, memo: Any) -> EnsembleArguments:
        return self  # a copy of a model shares its assistants

    def __reduce__(self) -> Any:
        return EnsembleArguments, ()  # they do not travel with a pickled model

    def over(self, bound: EnsembleArguments | None) -> EnsembleArguments:
        """These arguments, with what they leave open taken from the bound ones."""
        if bound is None:
            return self
        merged = {name: mine if mine is not None else getattr(bound, name) for name, mine in vars(self).items()}
        if self.assistant_models is not None:  # the bound tokenizers belong to the bound assistants
            merged["assistant_tokenizers"] = self.assistant_tokenizers
        return EnsembleArguments(**merged)


@dataclass(frozen=True)
class Participant:
    """A model with its tokenizer, checked; `name` is how errors call it."""

    name: str
    model: Any
    tokenizer: Any

    @property
    def vocabulary(self) -> Vocabulary:
        return vocabulary_of(self.tokenizer, getattr(self.model.config.get_text_config(), "vocab_size", None))

    @property
    def max_length(self) -> int | None:
        return max_length(self.model.config.get_text_config())

    @property
    def frequency_switch(self) -> int | None:
        """As of `model_call`, where its context goes beyond it."""
        switch = frequency_switch(self.model.config.get_text_config())
        return None if switch is None or switch >= (self.max_length or math.inf) else switch

    @property
    def device(self) -> torch.device:
        """Where its inputs go, also when its weights are offloaded."""
        for module in self.model.modules():  # an offloaded model says so on the modules that hold the weights
            device = getattr(vars(module).get("_hf_hook"), "execution_device", None)
            if device is not None:
                return torch.device(device)
        return torch.device(self.model.device)

    def choose_backend(self) -> str:
        """
        The name of the backend that runs its trees, by a self-test the first time.

        Raises:
            ValueError: no backend does.
        """
        base = base_model(self.model)
        try:
            backend = choose_backend(base, self.device)
        except SelfTestError as error:
            raise self.unfit(str(error)) from error
        if backend == "reencode" and base not in _WARNED:
            _WARNED[base] = True
            warnings.warn(
                f"{self.name} ({type(self.model).__name__}) works with neither a 4-D mask nor a cache: it reads the "
                "whole text again in every forward pass, which is slow.",
                UserWarning,
                stacklevel=2,
            )
        return backend

    def unfit(self, reason: str) -> ValueError:
        """The error that says why the model cannot take part."""
        return ValueError(
            "The members must give in a batch and with a cache, or at least without, the logits of plain forward "
            f"passes, but for {self.name} ({type(self.model).__name__}) that does not hold: {reason}. Choose another "
            "model or `attn_implementation`."
        )

    def member(self, eos_ids: list[int], prompts: list[list[int]]) -> Member:
        size = self.vocabulary.vocab_size
        eos_ids = [token for token in eos_ids if size is None or token < size]
        device = self.device
        tree = BACKENDS[self.choose_backend()](self.model, device)
        member = Member(self.name, self.model, self.vocabulary, eos_ids, self.max_length, device, tree)
        switch = self.frequency_switch
        if switch is not None and max(map(len, prompts)) <= switch:
            member.max_length, member.limit = switch, "the rotary frequencies for short texts"
        return member

    def own_eos_ids(self) -> list[int]:
        """An assistant's end-of-sequence ids: of its generation config, else of its tokenizer."""
        eos = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        eos = self.tokenizer.eos_token_id if eos is None else eos
        return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def check_backends(participants: list[Participant]) -> None:
    """A model that no backend can run says so now."""
    for participant in participants:
        participant.choose_backend()


def resolve_participants(model: Any, arguments: EnsembleArguments) -> list[Participant]:
    """The main model and the assistants, loaded and checked.

    Raises:
        ValueError: lists of different lengths, no tokenizer to be found, or a model that cannot take part.
    """
    given: Any = arguments.assistant_models
    if isinstance(given, (str, os.PathLike)) or (isinstance(given, torch.nn.Module) and not hasattr(given, "__iter__")):
        raise ValueError(
            f"`assistant_models` must be a list, but is {_shown(given)}. Put it in a list, also where it is one."
        )
    models = list(given or [])
    if hasattr(arguments.assistant_tokenizers, "encode"):
        raise ValueError("`assistant_tokenizers` must be a list, but is a tokenizer. Put it in a list.")
    tokenizers: list[Any] = [None] * len(models)
    if arguments.assistant_tokenizers is not None:
        tokenizers = list(arguments.assistant_tokenizers)
    if len(tokenizers) != len(models):
        raise ValueError(
            f"`assistant_tokenizers` must be one per assistant model, but is {len(tokenizers)} for {len(models)} "
            "assistant models. Use None in the list for a tokenizer to be found by the model's name."
        )
    participants = [Participant("the main model", model, arguments.tokenizer or find_tokenizer(model, "tokenizer"))]
    for index, (assistant, tokenizer) in enumerate(zip(models, tokenizers, strict=True)):
        if isinstance(assistant, (str, os.PathLike)):
            assistant = _load_assistant(os.fspath(assistant), model, index)
        assistant = adapted(assistant, f"assistant_models[{index}]")
        tokenizer = tokenizer or find_tokenizer(base_model(assistant), f"assistant_tokenizers[{index}]")
        participants.append(Participant(_assistant_name(index, assistant), assistant, tokenizer))
    for participant in participants:
        _check_model(participant)
    return participants


def _shown(value: Any) -> str:
    return type(value).__name__ if isinstance(value, torch.nn.Module) else repr(value)


# Found once for as long as the model that asked for them lives.
_TOKENIZERS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_WARNED: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
_ASSISTANTS: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def find_tokenizer(model: Any, argument: str) -> Any:
    name = getattr(model, "name_or_path", "") or ""
    if not name:
        raise ValueError(
            f"`{argument}` must be a tokenizer, but is None and the model has no name to find it by. Pass it."
        )
    if model not in _TOKENIZERS:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, KeyError) as error:
            reason = f"none loads from the model's name {name!r} ({type(error).__name__})"
            raise ValueError(f"`{argument}` must be a tokenizer, but is None and {reason}. Pass it.") from error
        # Where there are no files, transformers makes some tokenizers of the model's config alone: special tokens only.
        if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
            reason = f"the model's name {name!r} has an empty one"
            raise ValueError(f"`{argument}` must be a tokenizer, but is None and {reason}. Pass it.")
        _TOKENIZERS[model] = tokenizer
    return _TOKENIZERS[model]


def _load_assistant(name: str, main_model: Any, index: int) -> Any:
    loaded = _ASSISTANTS.setdefault(main_model, {})
    if name not in loaded:
        try:
            model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval()
        except (OSError, ValueError) as error:
            raise ValueError(
                f"`assistant_models[{index}]` must be a model, its Hub name or its folder, but {name!r} does not load "
                f"({type(error).__name__}: {error}). Check the name."
            ) from error
        loaded[name] = model.to(Participant("", main_model, None).device)
    return loaded[name]


def _assistant_name(index: int, model: Any) -> str:
    base = base_model(model)
    known = getattr(base, "name_or_path", "") or type(base).__name__
    adapter = f", adapter {model.adapter!r}" if isinstance(model, AdaptedModel) else ""
    return f"assistant {index + 1} ({known}{adapter})"


def _check_model(participant: Participant) -> None:
    problem = adapter_problem(participant.model)
    base = model = base_model(participant.model)
    if not isinstance(base, torch.nn.Module) or not hasattr(model, "config"):
        raise ValueError(
            f"`assistant_models` must be transformers models or names, but has {type(model).__name__} as "
            f"{participant.name}. Load it with AutoModelForCausalLM."
        )
    if isinstance(base, PreTrainedModel) and not base.can_generate():
        raise ValueError(
            f"The members must be causal language models, but {participant.name} is a {type(model).__name__}, which "
            "has no language-modeling head. Load it with AutoModelForCausalLM."
        )
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"The members must be decoder-only models, but {participant.name} is an encoder-decoder "
            f"({type(model).__name__}). Choose a causal language model."
        )
    if problem is not None:
        raise ValueError(f"The members must answer to token ids alone, but {participant.name} {problem}")
    if (reason := reason_not_to_test(base)) is not None:
        raise participant.unfit(reason)
