"""The arguments of a call of `generate()`: where each setting may be kept, and the ensemble that they make, loaded and
checked. `generation.py` calls this before anything is run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import torch

from ..config import AdaFuseConfig
from ..decoding.strategies.registry import make_strategy
from ..members.loading import find_tokenizer, load_assistant, load_tokenizer
from ..members.model_handle import ModelHandle, assistant_name
from ..members.rating_prompts import check_templates
from ..members.structured import read_structured
from ..outputs import AdaFuseRound
from ..trees.adapters import adapted, base_model
from ..trees.model_call import device_of
from .images import Images
from .sampling import SamplingRequest
from .served_limits import check_served_settings

# The arguments that `generate()` takes beyond the ordinary ones: those that ask for an ensemble, and others.
ASKING = ("assistant_models", "adafuse_config", "structured")
ARGUMENTS = (
    *ASKING,
    "assistant_tokenizers",
    "assistant_inputs",
    "assistant_logits_processor",
    "max_batch_size",
    "on_answer",
)
# Those that a generation config may hold.
STORED = ("assistant_models", "adafuse_config")

# Where a setting may be kept; the first of these that has it wins. "bound" is what `enable_adafuse` has bound to the
# model. "repository of the call" is the one that `custom_generate="..."` names, "own repository" the one that the model
# was loaded from.
SETTING_SOURCES = (
    "call",
    "config of the call",
    "repository of the call",
    "bound",
    "config of the model",
    "own repository",
)


def first_setting(name: str, sources: Mapping[str, Any]) -> tuple[str | None, Any]:
    """The first of `SETTING_SOURCES` that has a setting, and its value; `None` twice where none has."""
    for source in SETTING_SOURCES:
        holder = sources.get(source)
        value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
        if value is not None:
            return source, value
    return None, None


def setting_sources(model: Any, call: Mapping[str, Any], generation_config: Any = None) -> dict[str, Any]:
    """By their names, the sources of settings that need no repository. What the call's generation config says as the
    model's own does is taken for a copy of that, and asks for nothing."""
    own = getattr(model, "generation_config", None)
    passed = {name: getattr(generation_config, name, None) for name in STORED}
    given = {name: value for name, value in passed.items() if value is not None}
    return {
        "call": call,
        # Compared as texts: arrays have no single `==`.
        "config of the call": {name: one for name, one in given.items() if repr(one) != repr(getattr(own, name, None))},
        "bound": getattr(model, "_adafuse_bound", None),
        "config of the model": own,
    }


@dataclass
class EnsembleArguments:
    """The arguments of an ensemble, bound to a model or passed to a call. An argument of the call wins over a bound
    one."""

    assistant_models: Sequence[Any] | None = None
    assistant_tokenizers: Sequence[Any] | None = None
    assistant_inputs: Sequence[Any] | None = None
    tokenizer: Any = None
    adafuse_config: AdaFuseConfig | Mapping[str, Any] | bool | None = None
    assistant_logits_processor: Sequence[Any] | None = None
    structured: Mapping[str, Any] | None = None
    max_batch_size: int | None = None
    on_answer: Callable[[int, list[AdaFuseRound]], None] | None = None

    def __deepcopy__(self, memo: Any) -> EnsembleArguments:
        return self  # a copy of a model shares its assistants

    def over(self, bound: EnsembleArguments | None) -> EnsembleArguments:
        """These arguments, completed from the bound ones."""
        if bound is None:
            return self
        # The code of an exported repository may be newer than the package that has bound them.
        known = {name: getattr(bound, name, None) for name in vars(self)}
        merged = {name: known[name] if mine is None else mine for name, mine in vars(self).items()}
        if self.assistant_models is not None:  # the bound tokenizers belong to the bound assistants
            merged["assistant_tokenizers"] = self.assistant_tokenizers
        return EnsembleArguments(**merged)


@dataclass(frozen=True)
class EnsembleSpec:
    """
    The members and settings of one call, checked.

    Args:
        handles (`list[ModelHandle]`): the members, the main model first.
        config (`AdaFuseConfig`): the settings.
        assistant_inputs (`list`, *optional*): per assistant, its own prompts.
        assistant_processors (`list[list]`): per assistant, the user's own logits processors. The list is empty where
            there are none.
        structured (`tuple[str, str]`, *optional*): the kind of the text's grammar and the grammar.
        sampling (`dict`, *optional*): the settings of sampling that the call asks for. `None`: words are not sampled.
        max_batch_size (`int`, *optional*): the most prompts that are decoded at a time.
        on_answer (`Callable`, *optional*): called with a prompt's row and its rounds when the prompt has ended.
        images (`Images`, *optional*): the images that the main model reads with its prompts.

    Raises:
        ValueError: weights that are not one per member.
    """

    handles: list[ModelHandle]
    config: AdaFuseConfig
    assistant_inputs: Sequence[Any] | None = None
    assistant_processors: Sequence[Sequence[Any]] = ()
    structured: tuple[str, str] | None = None
    sampling: Mapping[str, Any] | None = None
    max_batch_size: int | None = None
    on_answer: Callable[[int, list[AdaFuseRound]], None] | None = None
    images: Images | None = None

    def __post_init__(self) -> None:
        weights = self.config.model_weights
        if isinstance(weights, tuple) and len(weights) != len(self.handles):
            raise ValueError(
                f"`model_weights` must be one per member, but is {len(weights)} for {len(self.handles)} members. "
                "Give the main model's weight first."
            )
        self._check_order()

    def _check_order(self) -> None:
        """Raises `ValueError` where a calibration was fitted to these members in another order."""
        calibration = self.config.method_options.get("calibration")
        fitted = calibration.get("members") if isinstance(calibration, Mapping) else None
        names = distinct_names([str(getattr(one.model, "name_or_path", "")) for one in self.handles])
        if isinstance(fitted, list) and fitted != names and sorted(fitted) == sorted(names):
            raise ValueError(
                f"The members must come in the order {fitted} in which the calibration was fitted, but come as {names}."
                " Make the first of these the main model, or fit again."
            )


def distinct_names(paths: Sequence[str]) -> list[str]:
    """The last part of each member's name or folder; as many parts of all as tell different ones apart."""
    parts = [PurePath(path).parts for path in paths]
    tails = [["/".join(one[-size:]) for one in parts] for size in range(1, max(map(len, parts), default=0) + 1)]
    return next((names for names in tails if len(set(names)) == len(set(paths))), list(paths))


def ensemble_arguments(
    model: Any, call: Mapping[str, Any], generation_config: Any = None
) -> tuple[EnsembleArguments, AdaFuseConfig] | None:
    """
    The ensemble that a call of `generate()` asks for, looked up in `SETTING_SOURCES`; `None` for an ordinary call.

    Raises:
        ValueError: settings that cannot be read, or arguments that mean nothing without an ensemble.
    """
    sources = setting_sources(model, call, generation_config)
    given = EnsembleArguments(**{name: call.get(name) for name in ARGUMENTS})
    arguments = given.over(sources["bound"])
    _, configured = first_setting("adafuse_config", sources)
    if configured is False:
        return None
    _refuse_stored_assistants(sources)
    has_assistants = not is_left_out(arguments.assistant_models)
    if configured is not None or has_assistants or arguments.structured is not None:
        return arguments, AdaFuseConfig.coerce(configured) or AdaFuseConfig.robust()
    useless = [name for name in ARGUMENTS if name not in ASKING and not is_left_out(call.get(name))]
    if useless:
        raise ValueError(
            f"`{useless[0]}` must be left out where no ensemble is asked for, but is given. Pass `assistant_models` or "
            "`adafuse_config` too."
        )
    return None


def is_left_out(value: Any) -> bool:
    """Whether an argument says nothing. Without assistants there is an empty list of their inputs."""
    return value is None or (isinstance(value, (list, tuple)) and not value)


def _refuse_stored_assistants(sources: Mapping[str, Any]) -> None:
    """
    Refuse a call whose assistants nobody but a generation config names, as that of an exported ensemble does. The code
    of an export loads them, for a user who trusts it. This package loads nothing that a file of a repository names.

    Args:
        sources (`dict`): as of [`setting_sources`].

    Raises:
        ValueError: there are such assistants.
    """
    found, names = first_setting("assistant_models", sources)
    if found in ("config of the call", "config of the model") and names:
        raise ValueError(
            f"`assistant_models` must be passed or bound, but only the generation config names {list(names)}. Pass "
            "these models, or their folders or Hub names; `assistant_models=[]` is the main model alone."
        )


def make_ensemble(
    model: Any,
    arguments: EnsembleArguments,
    config: AdaFuseConfig,
    asked: SamplingRequest | None = None,
    images: Images | None = None,
) -> EnsembleSpec:
    """
    The ensemble of a call.

    Args:
        model (`PreTrainedModel`): the main model.
        arguments (`EnsembleArguments`), config (`AdaFuseConfig`): as of [`ensemble_arguments`].
        asked (`SamplingRequest`, *optional*): what the call says of sampling.
        images (`Images`, *optional*): those beside the main model's prompts. Weights that follow from the prompt are
            equal then: the other members read a part of it.

    Raises:
        ValueError: arguments that cannot be honoured.
    """
    if images is not None and isinstance(config.model_weights, str):
        config = config.changed({"model_weights": None})
    strategy = make_strategy(config)  # so that an error comes before anything is loaded
    config = replace(config, method_options=strategy.portable_options())  # a file is read once, not for each prompt
    asked = asked or SamplingRequest(False, {})
    samples = asked.under(config)
    if samples and strategy.samples is None:
        raise ValueError(
            f"`do_sample` must be False with method {config.method!r}, but is True. Pass do_sample=False: the "
            "method is deterministic."
        )
    num_samples = getattr(strategy, "num_samples", 1)
    if num_samples > 1 and not samples:
        raise ValueError(
            f"`num_samples` must be 1 where nothing is sampled, but is {num_samples}. Pass do_sample=True, or leave it "
            "out."
        )
    strategy.prepare(device_of(model))
    processors = _as_list(arguments.assistant_logits_processor, "assistant_logits_processor")
    handles = resolve_handles(model, arguments)
    strategy.check_members([handle.vocabulary for handle in handles])
    if strategy.rated_by is not None:
        check_templates([handle.tokenizer for handle in handles])
    check_served_settings(handles, strategy, config, samples, arguments.structured is not None)
    return EnsembleSpec(
        handles=handles,
        config=config,
        assistant_inputs=arguments.assistant_inputs,
        assistant_processors=[_as_list([one] if callable(one) else one, "processors") for one in processors],
        structured=read_structured(arguments.structured),
        sampling=asked.settings if samples else None,
        max_batch_size=_batch_size(arguments.max_batch_size),
        on_answer=check_callback("on_answer", arguments.on_answer),
        images=images,
    )


def resolve_handles(model: Any, arguments: EnsembleArguments) -> list[ModelHandle]:
    """
    The main model and the assistants, loaded and checked.

    Raises:
        ValueError: lists of different lengths, no tokenizer to be found, or a model that cannot take part.
    """
    models, tokenizers = listed_assistants(arguments)
    main = ModelHandle("the main model", model, _tokenizer(arguments.tokenizer, model, "tokenizer"))
    handles = [main]
    for index, (assistant, tokenizer) in enumerate(zip(models, tokenizers, strict=True)):
        argument = f"assistant_tokenizers[{index}]"
        if isinstance(assistant, (str, os.PathLike)):
            # A server may have a name for its model by which no tokenizer is found.
            options = {} if tokenizer is None else {"tokenizer": _tokenizer(tokenizer, None, argument)}
            assistant = load_assistant(model, assistant, index, dtype="auto", **options)
        assistant = adapted(assistant, f"assistant_models[{index}]")
        tokenizer = _tokenizer(tokenizer, base_model(assistant), argument)
        handles.append(ModelHandle(assistant_name(index, assistant), assistant, tokenizer, main))
    for handle in handles:
        handle.check()
    return handles


def member_handles(
    model: Any, call: Mapping[str, Any], generation_config: Any, tokenizer: Any
) -> list[ModelHandle] | None:
    """
    The members that take part in a call of `generate()`, the main model first; `None` for an ordinary call.

    Args:
        model (`PreTrainedModel`): the main model, enabled.
        call (`dict`), generation_config (`GenerationConfig`, *optional*): the arguments of the call.
        tokenizer (`PreTrainedTokenizerBase`): the main model's, where the call names none.

    Raises:
        ValueError: as of [`resolve_handles`].
    """
    asked = model._adafuse_arguments(call, generation_config)
    if asked is None:
        return None
    arguments, _ = asked
    own = call.get("tokenizer")
    arguments = replace(arguments, tokenizer=tokenizer if own is None else own)
    return resolve_handles(model, arguments)


def listed_assistants(arguments: EnsembleArguments) -> tuple[list[Any], list[Any]]:
    """
    The assistants as given, and a tokenizer or `None` for each.

    Raises:
        ValueError: what should be a list is none, or the lists are of different lengths.
    """
    models = _as_list(arguments.assistant_models, "assistant_models")
    tokenizers: list[Any] = [None] * len(models)
    if arguments.assistant_tokenizers is not None:
        tokenizers = _as_list(arguments.assistant_tokenizers, "assistant_tokenizers")
    if len(tokenizers) != len(models):
        raise ValueError(
            f"`assistant_tokenizers` must be one per assistant model, but is {len(tokenizers)} for {len(models)} "
            "assistant models. Use None in the list for a tokenizer to be found by the model's name."
        )
    return models, tokenizers


def _batch_size(given: Any) -> int | None:
    if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 1):
        raise ValueError(
            f"`max_batch_size` must be a whole number of at least 1, but is {given!r}. Leave it out to decode all "
            "prompts at the same time."
        )
    return given


def check_callback(name: str, given: Any) -> Any:
    """What is given. Raises `ValueError` where it is neither a function nor `None`."""
    if given is not None and not callable(given):
        of = {"on_answer": "its rounds", "on_scores": "its scores"}[name]
        raise ValueError(f"`{name}` must be a function of a row and {of}, but is {given!r}. Leave it out.")
    return given


def check_time(max_time: Any) -> float | None:
    """The seconds that are given. Raises `ValueError` where it is neither a number of them nor `None`."""
    if max_time is None:
        return None
    try:
        seconds = math.nan if isinstance(max_time, (bool, str, bytes)) else float(max_time)
    except (TypeError, ValueError):
        seconds = math.nan
    if math.isnan(seconds):
        raise ValueError(f"`max_time` must be a number of seconds, but is {max_time!r}. Leave it out for no limit.")
    return seconds


def _as_list(given: Any, argument: str) -> list[Any]:
    is_list = isinstance(given, Iterable) and not isinstance(given, (str, bytes, Mapping))
    is_list = is_list and not hasattr(given, "shape")  # an array, of ids say
    if given is not None and (not is_list or hasattr(given, "encode")):
        shown = type(given).__name__ if isinstance(given, torch.nn.Module) else repr(given)
        shown = "a tokenizer" if hasattr(given, "encode") and not isinstance(given, str) else shown
        raise ValueError(f"`{argument}` must be a list, but is {shown}. Put it in a list, also where it is one.")
    return [] if given is None else list(given)


def _tokenizer(given: Any, model: Any, argument: str) -> Any:
    """A tokenizer as given, or by its name, or by the model's."""
    if given is None:
        return find_tokenizer(model, argument)
    if isinstance(given, (str, os.PathLike)):
        return load_tokenizer(os.fspath(given), argument)
    # By its name: to import the class takes seconds.
    if any(cls.__name__ == "ProcessorMixin" for cls in type(given).__mro__):
        raise ValueError(
            f"`{argument}` must be a tokenizer, but is a {type(given).__name__}, which holds one. Pass its "
            "`.tokenizer`."
        )
    if not callable(given) or not hasattr(given, "encode"):
        raise ValueError(
            f"`{argument}` must be a tokenizer or its name, but is {given!r}. Load it with AutoTokenizer, or leave it "
            "out to have it found by the model's name."
        )
    return given
