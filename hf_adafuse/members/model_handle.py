"""`ModelHandle`: a model with its tokenizer, checked, with the backend that suits it. A call makes a [`Member`] of
each.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..servers.served_model import ServedModel
from ..transformers_compat import INNER_MODELS
from ..trees.adapters import AdaptedModel, adapter_problem, base_model
from ..trees.backend import log_probs_of, to_device
from ..trees.backend_probe import BACKENDS, SelfTestError, choose_backend, reason_not_to_test
from ..trees.model_call import (
    ModelCall,
    device_of,
    frequency_switch,
    has_dropout,
    is_checkpointed,
    max_length,
    trained_length,
)
from ..trees.model_facts import cached_while_unchanged
from .local_member import LocalMember
from .member import Member
from .served_backend import ServedBackend
from .served_checks import check_served
from .served_member import ServedMember
from .vocabulary import Vocabulary, vocabulary_of

_WARNED: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
# Per model, the tokenizers with which it has read the text below.
_LOOKED_AT: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
_ENGLISH = (
    "The sun rises in the east and sets in the west. In winter the days are short, and the nights are long and cold."
)
# Models that have learned nothing are as good as chance; those that read other models' ids are some nats worse.
_WORSE_THAN_CHANCE = 1.0
_WARNED_OF_DROPOUT: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


class _Lengths(NamedTuple):
    """What a model's config says of lengths: the most tokens of a text, those beyond which its rotary frequencies are
    others, and how many there are in all."""

    most: int | None
    switch: int | None
    vocab_size: int | None


@cached_while_unchanged
def _lengths(model: Any) -> _Lengths:
    config = model.config.get_text_config()
    return _Lengths(max_length(config), frequency_switch(config), getattr(config, "vocab_size", None))


@dataclass(frozen=True)
class ModelHandle:
    """
    A model with its tokenizer, checked.

    Args:
        name (`str`): stands in errors, like `"the main model"` or `"assistant 1 (gpt2)"`.
        model (`PreTrainedModel`): the model, or an [`AdaptedModel`] or [`ServedModel`].
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer.
        main (`ModelHandle`, *optional*): the main model's handle. `None`: this is the main model.
    """

    name: str
    model: Any
    tokenizer: Any
    main: ModelHandle | None = None

    @property
    def shown_name(self) -> str:
        """The name in traces: that of errors, with the model's own name in brackets."""
        base = base_model(self.model)
        return self.name if "(" in self.name else f"{self.name} ({_shown(base)})"

    @property
    def vocabulary(self) -> Vocabulary:
        return vocabulary_of(self.tokenizer, _lengths(base_model(self.model)).vocab_size)

    @property
    def has_main_tokenizer(self) -> bool:
        """Whether the model's tokenizer gives the same ids as the main model's for every text."""
        return self.main is None or self.vocabulary.is_same_as(self.main.vocabulary)

    @property
    def max_length(self) -> int | None:
        return _lengths(base_model(self.model)).most

    @property
    def trained_length(self) -> int | None:
        """The most tokens in the model's training texts. The lab cuts longer texts, as other harnesses do."""
        return trained_length(self.model.config.get_text_config())

    @property
    def is_local(self) -> bool:
        """Whether the model runs in this process; see [`is_local`]."""
        return is_local(self.model)

    @property
    def most_top(self) -> int | None:
        """How many of the most likely tokens a server can return; `None` for a local model, which has them all."""
        return None if self.is_local else base_model(self.model).api.most_top

    @property
    def frequency_switch(self) -> int | None:
        """The length at which a LongRoPE model changes its rotary frequencies, where its context goes beyond; see
        `model_call`."""
        switch = _lengths(base_model(self.model)).switch
        return None if switch is None or switch >= (self.max_length or math.inf) else switch

    @property
    def device(self) -> torch.device:
        """The device of the model's inputs."""
        return device_of(self.model)

    def tested_backend(self) -> str:
        """
        The name of the backend that runs the model's token trees. The first time a self-test chooses it.

        Raises:
            ValueError: no backend does.
        """
        base = base_model(self.model)
        if isinstance(base, ServedModel):
            check_served(base, self.name, self.vocabulary)
            return "served"
        try:
            backend = choose_backend(base, self.device)
        except SelfTestError as error:
            raise self.unfit(str(error)) from error
        if backend == "uncached" and base not in _WARNED:
            _WARNED[base] = True
            warnings.warn(
                f"{self.name} ({type(self.model).__name__}) works with neither a 4-D mask nor a cache: it reads the "
                "whole text again in every forward pass, which is slow.",
                UserWarning,
                stacklevel=2,
            )
        if has_dropout(base) and base not in _WARNED_OF_DROPOUT:
            _WARNED_OF_DROPOUT[base] = True
            warnings.warn(
                f"{self.name} ({type(self.model).__name__}) is in training mode: dropout makes its logits random. Call "
                "`.eval()` on it.",
                UserWarning,
                stacklevel=2,
            )
        return backend

    def warn_of_foreign_tokenizer(self) -> None:
        """Warn of a model and a tokenizer that do not seem to belong together: they have different names, and the model
        finds a plain English text less likely than random tokens. This takes one forward pass of some thirty tokens,
        once for each pair."""
        base = base_model(self.model)
        if not self.is_local or not self._may_be_foreign(base):
            return
        _LOOKED_AT.setdefault(base, weakref.WeakSet()).add(self.tokenizer)
        nll, chance = _nll_of_english(base, self.vocabulary, self.device)
        if nll > chance + _WORSE_THAN_CHANCE:
            warnings.warn(
                f"{self.name} and its tokenizer ({_shown(self.tokenizer)}) do not seem to belong together: under "
                f"{_shown(base)} a plain English text costs {nll:.1f} nats a token, and random tokens {chance:.1f}. "
                "If the text makes no sense, pass the model's own tokenizer.",
                UserWarning,
                stacklevel=2,
            )

    def _may_be_foreign(self, base: Any) -> bool:
        names = {str(getattr(one, "name_or_path", "") or "") for one in (base, self.tokenizer)}
        return "" not in names and len(names) == 2 and self.tokenizer not in _LOOKED_AT.get(base, ())

    def check_mode(self) -> None:
        """
        Refuse a model in a mode in which it keeps no cache.

        Raises:
            ValueError: gradient checkpointing is on.
        """
        if self.is_local and is_checkpointed(base_model(self.model)):
            raise ValueError(
                f"{self.name} ({type(self.model).__name__}) must keep its keys and values, but is in training mode "
                "with gradient checkpointing, which drops them. Call `.eval()` or `.gradient_checkpointing_disable()`."
            )

    def unfit(self, reason: str) -> ValueError:
        """The error that says why the model cannot take part."""
        return ValueError(
            "The members must give in a batch and with a cache, or at least without, the logits of plain forward "
            f"passes, but for {self.name} ({type(self.model).__name__}) that does not hold: {reason}. Choose another "
            "model or `attn_implementation`."
        )

    def context(self, prompts: list[list[int]]) -> tuple[int | None, str]:
        """The most tokens that the model can read after these prompts, and the name of that limit."""
        switch = self.frequency_switch
        if switch is not None and max(map(len, prompts)) <= switch:
            return switch, "the rotary frequencies for short texts"
        return self.max_length, "the context"

    def make_member(self, backend: str, eos_ids: Iterable[int], prompts: list[list[int]]) -> Member:
        """A [`Member`] for one call, whose token trees the backend of this name runs."""
        max_length, limit = self.context(prompts)
        made: Any = BACKENDS[backend] if self.is_local else ServedBackend
        return (LocalMember if self.is_local else ServedMember)(
            name=self.name,
            model=self.model,
            tokenizer=self.tokenizer,
            vocabulary=self.vocabulary,
            has_main_tokenizer=self.has_main_tokenizer,
            eos_ids=eos_ids,
            max_length=max_length,
            limit=limit,
            device=self.device,
            backend=made(self.model, self.device),
        )

    def own_eos_ids(self) -> list[int]:
        """An assistant's end-of-sequence ids, from its generation config or its tokenizer."""
        eos = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        eos = self.tokenizer.eos_token_id if eos is None else eos
        return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)

    def check(self) -> None:
        """
        Refuse anything but a decoder-only language model that takes token ids alone.

        Raises:
            ValueError: it is none.
        """
        problem = adapter_problem(self.model)
        base: Any = base_model(self.model)
        kind = type(base).__name__
        if not isinstance(base, torch.nn.Module) or not hasattr(base, "config"):
            raise ValueError(
                f"`assistant_models` must be transformers models or names, but has {kind} as {self.name}. "
                f"{inner_model_hint(base) or 'Load it with AutoModelForCausalLM.'}"
            )
        if isinstance(base, PreTrainedModel) and not base.can_generate():
            raise ValueError(
                f"The members must be causal language models, but {self.name} is a {kind}, which has no "
                "language-modeling head. Load it with AutoModelForCausalLM."
            )
        if self.model.config.is_encoder_decoder:
            raise ValueError(
                f"The members must be decoder-only models, but {self.name} is an encoder-decoder ({kind}). Choose a "
                "causal language model."
            )
        if problem is not None:
            raise ValueError(f"The members must answer to token ids alone, but {self.name} {problem}")
        if self.vocabulary.marks_word_ends:
            raise ValueError(
                f"The members' tokens must say where words begin, but those of {self.name} ({kind}) say where they "
                "end, like GPT-1's `</w>` and CTRL's `@@`. Choose a model with another tokenizer."
            )
        if self.is_local and (reason := reason_not_to_test(base)) is not None:
            raise self.unfit(reason)


def is_local(model: Any) -> bool:
    """Whether a model runs in this process. A server returns log-probabilities of some tokens only, and no logits
    processor acts there."""
    return not isinstance(base_model(model), ServedModel)


def servers_of(model: Any) -> frozenset[str]:
    """The address of the server of a model; empty where the model runs in this process."""
    base = base_model(model)
    return frozenset({base.api.connection.url} if isinstance(base, ServedModel) else ())


def inner_model_hint(model: Any) -> str | None:
    """What to pass instead of a model that a wrapper for training or compiling holds; `None` where there is no
    wrapper."""
    names = [name for name in INNER_MODELS if isinstance(getattr(model, name, None), PreTrainedModel)]
    return f"Pass the model inside it: its `.{names[0]}`." if names else None


def _nll_of_english(model: Any, vocabulary: Vocabulary, device: torch.device) -> tuple[float, float]:
    """The mean NLL (nats per token) of a plain English text under a model, and that of random tokens."""
    ids = to_device([vocabulary.encode_prompt(_ENGLISH)], device)
    with torch.no_grad():
        logits, _ = ModelCall(model)(ids, use_memory=False)
    log_probs = log_probs_of(logits[:, :-1], ids[:, 1:])
    return -float(log_probs.mean()), math.log(logits.shape[-1])


def _shown(one: Any) -> str:
    return getattr(one, "name_or_path", "") or type(one).__name__


def assistant_name(index: int, model: Any) -> str:
    """The name of an assistant in errors and traces: `"assistant 1 (gpt2)"`."""
    known = _shown(base_model(model))
    adapter = f", adapter {model.adapter!r}" if isinstance(model, AdaptedModel) else ""
    return f"assistant {index + 1} ({known}{adapter})"
