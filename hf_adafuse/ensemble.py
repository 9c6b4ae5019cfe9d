"""From what a user passes to members ready to read: which models, which tokenizers, which prompts. Runs no model."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .attention_mask import unsupported_reason
from .config import AdaFuseConfig
from .member import Member
from .vocabulary import Vocabulary, vocabulary_of


@dataclass
class EnsembleArguments:
    """What a user may bind to a model or pass to a call; a call's argument wins over a bound one."""

    assistant_models: Sequence[Any] | None = None
    assistant_tokenizers: Sequence[Any] | None = None
    assistant_inputs: Sequence[Any] | None = None
    tokenizer: Any = None
    adafuse_config: AdaFuseConfig | Mapping[str, Any] | bool | None = None

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
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def device(self) -> torch.device:
        """Where its inputs go, also when its weights are offloaded."""
        for module in self.model.modules():  # an offloaded model says so on the modules that hold the weights
            device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
            if device is not None:
                return torch.device(device)
        return torch.device(self.model.device)

    def member(self, eos_ids: list[int]) -> Member:
        return Member(self.name, self.model, self.vocabulary, eos_ids, self.max_length, self.device)

    def own_eos_ids(self) -> list[int]:
        """An assistant's end-of-sequence ids: of its generation config, else of its tokenizer."""
        eos = getattr(self.model.generation_config, "eos_token_id", None)
        eos = self.tokenizer.eos_token_id if eos is None else eos
        return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


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
    tokenizers = list(arguments.assistant_tokenizers) if arguments.assistant_tokenizers is not None else None
    if tokenizers is None:
        tokenizers = [None] * len(models)
    elif len(tokenizers) != len(models):
        raise ValueError(
            f"`assistant_tokenizers` must be one per assistant model, but is {len(tokenizers)} for {len(models)} "
            "assistant models. Use None in the list for a tokenizer to be found by the model's name."
        )
    participants = [Participant("the main model", model, arguments.tokenizer or _find_tokenizer(model, "tokenizer"))]
    for index, (assistant, tokenizer) in enumerate(zip(models, tokenizers, strict=True)):
        if isinstance(assistant, (str, os.PathLike)):
            assistant = _load_assistant(os.fspath(assistant), model, index)
        tokenizer = tokenizer or _find_tokenizer(assistant, f"assistant_tokenizers[{index}]")
        participants.append(Participant(_assistant_name(index, assistant), assistant, tokenizer))
    for participant in participants:
        _check_model(participant)
    return participants


def assistant_prompts(
    participants: Sequence[Participant], main_prompts: list[list[int]], given: Sequence[Any] | None
) -> list[list[list[int]]]:
    """
    Per assistant, its ids of each prompt: as given; the main model's when the tokenizers are identical; else the
    decoded prompt, encoded with the assistant's own special tokens.
    """
    main, *assistants = participants
    if given is not None and len(given) != len(assistants):
        raise ValueError(
            f"`assistant_inputs` must be one per assistant model, but is {len(given)} for {len(assistants)} "
            "assistant models. Use None in the list for a prompt to be made from the main model's."
        )
    prompts = []
    for index, assistant in enumerate(assistants):
        if given is not None and given[index] is not None:
            rows = _given_rows(given[index], index, len(main_prompts))
        elif assistant.vocabulary.is_same_as(main.vocabulary):
            rows = [list(ids) for ids in main_prompts]
        else:
            texts = [main.vocabulary.prompt_text(ids) for ids in main_prompts]
            rows = [assistant.vocabulary.encode_prompt(text) for text in texts]
        prompts.append(rows)
    return prompts


def check_prompts(participant: Participant, prompts: list[list[int]]) -> None:
    """Refuse prompts that the model cannot read."""
    for row, ids in enumerate(prompts):
        if not ids:
            raise ValueError(
                f"The prompt of {participant.name} must be at least one token, but is empty in row {row} (its "
                "tokenizer adds no beginning-of-sequence token). Pass a prompt, or its ids in `assistant_inputs`."
            )
        if participant.max_length is not None and len(ids) > participant.max_length:
            raise ValueError(
                f"The prompt of {participant.name} must be at most {participant.max_length} tokens "
                f"(`max_position_embeddings`), but is {len(ids)} tokens in row {row}. Shorten it."
            )


def unpadded_rows(ids: torch.Tensor, mask: torch.Tensor | None, name: str) -> list[list[int]]:
    """The rows of a left-padded batch without their padding."""
    rows: list[list[int]] = ids.tolist()
    if mask is None:
        return rows
    if tuple(mask.shape) != tuple(ids.shape):
        raise ValueError(
            f"The attention mask of `{name}` must be of the shape of its ids {tuple(ids.shape)}, but is of shape "
            f"{tuple(mask.shape)}. Pass the tokenizer's output as it is."
        )
    counts = mask.bool().sum(-1).tolist()
    left_padded = torch.arange(ids.shape[1], device=mask.device) >= ids.shape[1] - mask.bool().sum(-1, keepdim=True)
    if not torch.equal(mask.bool(), left_padded):
        raise ValueError(
            f"`{name}` must be padded on the left, but is padded on the right or has holes. "
            'Set `tokenizer.padding_side = "left"`.'
        )
    return [row[len(row) - count :] for row, count in zip(rows, counts, strict=True)]


def _shown(value: Any) -> str:
    return type(value).__name__ if isinstance(value, torch.nn.Module) else repr(value)


def _given_rows(inputs: Any, index: int, num_rows: int) -> list[list[int]]:
    name = f"assistant_inputs[{index}]"
    if not isinstance(inputs, Mapping) and not hasattr(inputs, "keys"):
        inputs = {"input_ids": inputs}
    try:
        ids = torch.as_tensor(inputs["input_ids"])
        mask = inputs.get("attention_mask")
        mask = None if mask is None else torch.as_tensor(mask)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"`{name}` must hold `input_ids` and `attention_mask` as tensors, but cannot be read as such ({error}). "
            "Pass the output of the assistant's tokenizer, padded on the left."
        ) from error
    if ids.dim() == 1:
        ids, mask = ids[None], mask[None] if mask is not None and mask.dim() == 1 else mask
    if ids.dim() != 2 or len(ids) != num_rows:
        raise ValueError(
            f"`{name}` must hold {num_rows} prompts, like the main model's, but is of shape {tuple(ids.shape)}. "
            "Tokenize the same prompts with the assistant's tokenizer."
        )
    return unpadded_rows(ids, mask, name)


# Found once for as long as the model that asked for them lives.
_TOKENIZERS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_ASSISTANTS: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def _find_tokenizer(model: Any, argument: str) -> Any:
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
    known = getattr(model, "name_or_path", "") or type(model).__name__
    return f"assistant {index + 1} ({known})"


def _check_model(participant: Participant) -> None:
    model: Any = participant.model
    if not isinstance(participant.model, torch.nn.Module) or not hasattr(model, "config"):
        raise ValueError(
            f"`assistant_models` must be transformers models or names, but has {type(model).__name__} as "
            f"{participant.name}. Load it with AutoModelForCausalLM."
        )
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"The members must be decoder-only models, but {participant.name} is an encoder-decoder "
            f"({type(model).__name__}). Choose a causal language model."
        )
    if any(getattr(peft, "is_prompt_learning", False) for peft in getattr(model, "peft_config", {}).values()):
        raise ValueError(
            f"The members must read their prompts as they are, but {participant.name} uses prompt learning (PEFT). "
            "Use LoRA, or merge the adapter."
        )
    reason = unsupported_reason(model)
    if reason is not None:
        raise ValueError(
            f"The members must be attention-only models whose attention takes a 4-D mask, but for {participant.name} "
            f"({type(model).__name__}) that does not hold: {reason}. Choose another model."
        )
