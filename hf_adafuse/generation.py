"""AdaFuse inside `generate()`: the mixin, `enable_adafuse`, argument checks. The only module that knows transformers'
generation loop; a call is planned and run in `call`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from transformers import GenerationMixin, PreTrainedModel, StoppingCriteriaList

from .call.arguments import (
    ARGUMENTS,
    EnsembleArguments,
    EnsembleSpec,
    check_time,
    ensemble_arguments,
    is_left_out,
    make_ensemble,
    resolve_handles,
)
from .call.images import read_images, without_images
from .call.inputs import GenerateInputs
from .call.new_ids import read_new_ids
from .call.plan import plan_call
from .call.planning import plan_from_earlier_call
from .call.run import run_call
from .call.sampling import requested_sampling, warn_of_a_pipelines_default
from .config import AdaFuseConfig, is_file
from .decoding.strategies.registry import make_strategy
from .members.mistral_tokenizers import fast_interface
from .members.model_handle import inner_model_hint
from .members.processor_request import ProcessorRequest
from .transformers_compat import warn_of_untested_release, with_setting

warn_of_untested_release()


class AdaFuseGenerationMixin(GenerationMixin):
    """
    A `generate()` that decodes with an ensemble where it is given `assistant_models` or an `adafuse_config`. Otherwise
    it is the ordinary one, bit for bit.

    Arguments of `generate()` beyond the ordinary ones:
        assistant_models (`list`, *optional*): the assistants: loaded models, Hub names or local folders. A pair (model,
            name of an adapter) is the model with that PEFT adapter, and (model, `None`) is the model without an
            adapter. The model of a pair may be the main model: both share its weights.
        assistant_tokenizers (`list`, *optional*): one per assistant. By default they are found by the models' names.
        assistant_inputs (`list`, *optional*): per assistant its own tokenized prompts: `input_ids` and `attention_mask`
            of shape `(batch_size, sequence_length)`. By default an assistant reads the text of the main model's ids.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): the main model's. By default it is found by the model's name.
        adafuse_config (`AdaFuseConfig`, `dict`, `str` or `bool`, *optional*): the settings, as [`AdaFuseConfig.coerce`]
            reads them. They win over those in `generation_config`. `False` turns AdaFuse off. `assistant_models` that
            a generation config alone names, as that of an exported ensemble does, are refused: they must be passed.
        assistant_logits_processor (`list`, *optional*): per assistant a list of logits processors over its own ids.
        structured (`dict`, *optional*): the form that the text must have: `{"json_schema": ...}`, `{"regex": ...}`,
            `{"grammar": ...}` or `{"structural_tag": ...}`. Every member follows it in its own tokens (needs the
            `structured` extra). A warning names keywords of a schema that the grammar does not enforce. With
            `"strict": True` beside it they are refused.
        max_batch_size (`int`, *optional*): the most prompts that are decoded at a time. The others wait. `max_time` is
            the time of the whole call.
        on_answer (`Callable`, *optional*): called as `on_answer(row, rounds)` when the prompt of that row has ended.

    Words are sampled in three cases: where the call has the argument `do_sample=True`, where it is passed a
    `generation_config` with `do_sample=True` that is no copy of the model's own, and where `adafuse_config` says
    `do_sample=True`. A default of the model's own generation config does not count. For each word a member is drawn by
    its weight. It draws the word by its own temperature, top-k and top-p, or by those of the call.

    Raises:
        ValueError: arguments cannot be honoured. No forward pass of a prompt has been run then.
        AdaFuseDecodingError: a member failed during decoding. The error carries the text committed so far.
    """

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("custom_generate") is not None:  # the code that it names looks for its settings itself
            return super().generate(*args, **kwargs)
        if (reason := _foreign_generate(cast("Any", type(self)))) is not None:
            if self._adafuse_arguments(kwargs, kwargs.get("generation_config")):
                raise ValueError(reason)
            return super().generate(*args, **kwargs)
        if not args and plan_from_earlier_call(kwargs):
            return kwargs["input_ids"]
        given = {**dict(zip(("inputs", "generation_config"), args, strict=False)), **kwargs}
        generation_config = given.get("generation_config")
        is_ours = self._adafuse_arguments(kwargs, generation_config) is not None
        kwargs["adafuse_passed"] = generation_config  # transformers' hooks see it with the model's own values in it
        kwargs["adafuse_sampling"] = requested_sampling(kwargs, generation_config, self.generation_config)
        if not is_ours:
            return super().generate(*args, **kwargs)
        if kwargs.get("cache_implementation") == "paged":
            raise ValueError(
                '`cache_implementation` must not be "paged" with AdaFuse, but is. Leave it out: AdaFuse batches itself.'
            )
        is_bound = getattr(self, "_adafuse_bound", None) is not None
        warn_of_a_pipelines_default(kwargs, generation_config, self.generation_config, is_bound)
        images = read_images(self, kwargs)
        if images is not None:  # else transformers encodes them here, before anything has been checked
            kwargs = {**without_images(kwargs, images), "adafuse_images": images}
        new_ids = read_new_ids(given.get("inputs"), kwargs)
        if new_ids is None:
            return super().generate(*args, **kwargs)
        changed = new_ids.arguments({name: value for name, value in kwargs.items() if name != "inputs"})
        return new_ids.output(super().generate(*((None, *args[1:]) if args else ()), **changed))

    def _adafuse_arguments(
        self, call: Mapping[str, Any], generation_config: Any = None
    ) -> tuple[EnsembleArguments, AdaFuseConfig] | None:
        """What a call asks for, or `None` when it is an ordinary one."""
        return ensemble_arguments(self, call, generation_config)

    # The hooks below are those of transformers, in the order in which `generate()` comes by them.

    def _extract_generation_mode_kwargs(
        self, custom_generate: Any, kwargs: dict[str, Any], synced_gpus: Any, assistant_model: Any, streamer: Any
    ) -> dict[str, Any]:
        extract = super()._extract_generation_mode_kwargs
        if callable(custom_generate):  # then our arguments belong to it
            mode_kwargs = extract(custom_generate, kwargs, synced_gpus, assistant_model, streamer)
            if kwargs.get("adafuse_config") is False:
                del kwargs["adafuse_config"]
            return mode_kwargs  # type: ignore[no-any-return]
        call = {name: kwargs.pop(name, None) for name in ARGUMENTS}
        wanted = self._adafuse_arguments(call, kwargs.pop("adafuse_passed", None))
        asked, images = kwargs.pop("adafuse_sampling", None), kwargs.pop("adafuse_images", None)
        mode_kwargs = extract(custom_generate, kwargs, synced_gpus, assistant_model, streamer)
        bound = getattr(self, "_adafuse_bound", None)
        if bound is not None and bound.tokenizer is not None:
            mode_kwargs.setdefault("tokenizer", bound.tokenizer)
        mode_kwargs["adafuse_wanted"] = wanted
        mode_kwargs["adafuse_sampling"] = asked
        mode_kwargs["adafuse_images"] = images
        return mode_kwargs  # type: ignore[no-any-return]

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: Any, mode_kwargs: dict[str, Any]
    ) -> None:
        names = ("adafuse_wanted", "adafuse_sampling", "adafuse_images")
        wanted, asked, images = (mode_kwargs.pop(name, None) for name in names)
        if wanted is not None:
            arguments, config = wanted
            has_inputs = not is_left_out(arguments.assistant_inputs)
            _check_mode(generation_mode, generation_config, mode_kwargs, self.generation_config, has_inputs)
            given = mode_kwargs.get("tokenizer")
            arguments.tokenizer = arguments.tokenizer if given is None else given
            ensemble = make_ensemble(self, arguments, config, asked, images)
            _check_number(ensemble, generation_config)
            check_time(generation_config.max_time)
            mode_kwargs["tokenizer"] = fast_interface(ensemble.handles[0].tokenizer)  # stop strings need it
            mode_kwargs["adafuse"] = ensemble
        super()._validate_generation_mode(generation_mode, generation_config, mode_kwargs)

    def _get_logits_processor(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        processors = super()._get_logits_processor(generation_config, *args, **kwargs)
        custom = kwargs.get("logits_processor") or []
        # AdaFuse rebuilds the processors for each row and member.
        processors.adafuse = ProcessorRequest(generation_config, kwargs.get("prefix_allowed_tokens_fn"), custom)
        return processors

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        adafuse: EnsembleSpec | None = None,
        **model_kwargs: Any,
    ) -> Any:
        if adafuse is None:
            return super()._sample(
                input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **model_kwargs
            )
        call = GenerateInputs(
            input_ids, logits_processor.adafuse, stopping_criteria, generation_config, streamer, model_kwargs
        )
        return run_call(plan_call(adafuse, call))


def enable_adafuse(
    model: Any,
    assistant_models: Any = None,
    assistant_tokenizers: Any = None,
    tokenizer: Any = None,
    adafuse_config: Any = None,
) -> Any:
    """
    Give a loaded causal language model the `generate()` of [`AdaFuseGenerationMixin`], by swapping in a class of the
    same name. Weights, config and `save_pretrained` of transformers' own models stay as they are.

    Where anything is bound and the model's generation config says nothing of sampling, it says `do_sample=False` from
    then on, in a copy of its own. `generate()` means the same by both, but transformers' `text-generation` pipeline
    samples where the generation config says nothing.

    Args:
        model (`PreTrainedModel`): the main model; with PEFT, the base model. The code of an exported ensemble, loaded
            with `trust_remote_code=True`, is set aside: `save_pretrained` writes the main model alone then.
        assistant_models, assistant_tokenizers, tokenizer, adafuse_config (*optional*):
            Bound to the model: defaults for the same arguments of `generate()`.

    Returns:
        the model.

    Raises:
        ValueError: not a decoder-only transformers model, or arguments that cannot be honoured.
    """
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise ValueError(
            f"`model` must be a transformers model that generates, but is {type(model).__name__}. "
            + (
                inner_model_hint(model)
                or "Load it with AutoModelForCausalLM; with PEFT, enable the base model (`get_base_model()`)."
            )
        )
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"`model` must be a decoder-only model, but {type(model).__name__} is an encoder-decoder. "
            "Choose a causal language model."
        )
    reason = _foreign_generate(plain_class(cast("Any", type(model))))
    has_assistants = not is_left_out(assistant_models)
    config = AdaFuseConfig.coerce(adafuse_config)
    if (has_assistants or config is not None) and reason is not None:
        raise ValueError(reason)
    if config is not None:
        make_strategy(config)  # settings that do not go together say so before anything is loaded
    bound = config if is_file(adafuse_config) else adafuse_config
    arguments = EnsembleArguments(assistant_models, assistant_tokenizers, None, tokenizer, bound)
    if has_assistants:
        handles = resolve_handles(model, arguments)
        arguments.assistant_models = [handle.model for handle in handles[1:]]
        arguments.assistant_tokenizers = [handle.tokenizer for handle in handles[1:]]
        arguments.tokenizer = handles[0].tokenizer
        for handle in EnsembleSpec(handles, config or AdaFuseConfig.robust()).handles:
            handle.tested_backend()  # a model that no backend can run says so now
    if not isinstance(model, AdaFuseGenerationMixin):
        model.__class__ = adafuse_class(cast("Any", type(model)))
        if _is_of_an_export(vars(model).get("generate")):
            model._adafuse_generate = model.__dict__.pop("generate")
    _bind(model, arguments)
    return model


def _bind(model: Any, arguments: EnsembleArguments) -> None:
    _unbind(model)
    if any(value is not None for value in vars(arguments).values()):
        model._adafuse_bound = arguments
        default_to_greedy(model)


def _unbind(model: Any) -> None:
    model.__dict__.pop("_adafuse_bound", None)
    if model.__dict__.pop("_adafuse_is_greedy", False) and model.generation_config.do_sample is False:
        model.generation_config = with_setting(model.generation_config, "do_sample", None)


def default_to_greedy(model: Any) -> None:
    """Give a model a generation config that says `do_sample=False` where its own says nothing of sampling: the
    pipelines of transformers pass `do_sample=True` to `generate()` where that config says nothing."""
    if model.generation_config.do_sample is None:
        model.generation_config = with_setting(model.generation_config, "do_sample", False)
        model._adafuse_is_greedy = True


def disable_adafuse(model: Any) -> Any:
    """
    Undo [`enable_adafuse`]: the model's own class again, nothing bound. Returns the model.

    Raises:
        ValueError: it is no model.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"`model` must be a transformers model, but is {model!r}. Pass the one that was enabled.")
    _unbind(model)
    if "_adafuse_generate" in vars(model):
        model.generate = model.__dict__.pop("_adafuse_generate")
    base = type(model).__dict__.get("_adafuse_base")
    if base is not None and isinstance(model, AdaFuseGenerationMixin):  # else it is the class of an exported repository
        model.__class__ = base
    return model


def plain_class(cls: Any) -> Any:
    """A class without what this package, or the code of an exported repository, has put before it."""
    while hasattr(cls, "_adafuse_base"):
        cls = cls._adafuse_base
    return cls


def _is_of_an_export(generate: Any) -> bool:
    """Whether a model's own `generate` is the code of an exported repository, which `from_pretrained` with
    `trust_remote_code=True` puts on the model."""
    return "adafuse_class" in getattr(getattr(generate, "func", None), "__globals__", ())


@functools.cache
def adafuse_class(own: Any) -> Any:
    """A class with the mixin, under its own name and module: pipelines, `architectures` and saving see no difference.
    The code of an exported repository is left out: the package takes its place."""
    base = plain_class(own)
    body = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _reduce,
        "_adafuse_base": own,
    }
    return type(base.__name__, (AdaFuseGenerationMixin, base), body)


def _reduce(self: Any, protocol: Any) -> Any:
    # Pickle finds classes by name, and the name is the model's own: rebuild from that.
    _, _, *rest = super(type(self), self).__reduce_ex__(protocol)
    return (_rebuild, (type(self)._adafuse_base,), *rest)


def _rebuild(own: Any) -> Any:
    cls = adafuse_class(own)
    return cls.__new__(cls)


@functools.cache
def _foreign_generate(cls: Any) -> str | None:
    """Why models of a class cannot be the main one, where it has a `generate()` of its own that does not take the
    arguments of transformers' (BLIP-2, Kosmos-2, code from the Hub); `None` where it can. One that hands on all that it
    is given can."""
    line = cls.__mro__
    behind = line[line.index(AdaFuseGenerationMixin) + 1 :] if AdaFuseGenerationMixin in line else line
    own = next(base for base in behind if "generate" in vars(base))
    parameters = list(inspect.signature(own.generate).parameters.values())[1:]
    takes_all = [one.kind for one in parameters] == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
    if own is GenerationMixin or takes_all or [one.name for one in parameters[:2]] == ["inputs", "generation_config"]:
        return None
    return (
        f"The main model must have transformers' `generate()` with AdaFuse, but {cls.__name__} has its own, with the "
        f"arguments {', '.join(one.name for one in parameters[:3])}, ... Without an ensemble it works as ever; take "
        "another main model, or the language model inside it."
    )


# The settings that ask for another generation mode, and for what else there is not, with the values that do not.
_MODES = {
    "num_beams": 1, "num_beam_groups": 1, "penalty_alpha": None, "dola_layers": None, "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None, "constraints": None, "force_words_ids": None,
}  # fmt: skip


def _remedy(names: Mapping[str, Any], own: Any, otherwise: str) -> str:
    """What to do about settings, where they stand in the model's own generation config; `otherwise` where they do
    not. `names`: with the values that do no harm."""
    found = {name: value for name, value in names.items() if getattr(own, name, None) not in (None, value)}
    if not found:
        return otherwise
    (name, value), *_ = found.items()
    change = f"set `model.generation_config.{name} = {value!r}`"
    in_the_call = "" if value is None else f"pass `{name}={value!r}` in the call, or "
    return f"It stands in the model's own `generation_config`: {in_the_call}{change}."


def _check_mode(
    mode: Any, generation_config: Any, mode_kwargs: dict[str, Any], own: Any = None, has_assistant_inputs: bool = False
) -> None:
    if mode not in ("greedy_search", "sample"):
        advice = "Leave out `num_beams`, `assistant_model`, `penalty_alpha` and the like."
        raise ValueError(
            f"The generation mode must be greedy search with AdaFuse, but is {str(getattr(mode, 'value', mode))!r}. "
            + _remedy(_MODES, own, advice)
        )
    if mode_kwargs.get("synced_gpus"):
        raise ValueError(
            "`synced_gpus` must be False with AdaFuse, but is True. Use a device map instead of sharded processes."
        )
    if generation_config.token_healing and has_assistant_inputs:
        raise ValueError(
            "`token_healing` must be False where each assistant has inputs of its own, but is True. It changes the "
            "main model's prompt alone. " + _remedy({"token_healing": False}, own, "Leave it out.")
        )
    if generation_config.guidance_scale not in (None, 1, 1.0):
        raise ValueError(
            f"`guidance_scale` must be 1 with AdaFuse, but is {generation_config.guidance_scale}. "
            + _remedy({"guidance_scale": 1.0}, own, "Leave it out.")
        )
    if generation_config.cache_implementation not in (None, "dynamic"):
        raise ValueError(
            "`cache_implementation` must be left out with AdaFuse, but is "
            f"{generation_config.cache_implementation!r}. "
            + _remedy(
                {"cache_implementation": "dynamic"},
                own,
                "Its token tree keeps its own; compile the models beforehand.",
            )
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(generation_config, name):
            advice = _remedy({name: False}, own, "Run the model on the result instead.")
            raise ValueError(f"`{name}` must be False with AdaFuse, but is True. {advice}")


def _check_number(ensemble: EnsembleSpec, generation_config: Any) -> None:
    if ensemble.sampling is None and (generation_config.num_return_sequences or 1) > 1:
        raise ValueError(
            f"`num_return_sequences` must be 1 with AdaFuse, but is {generation_config.num_return_sequences}. Without "
            "sampling it has one answer; pass `do_sample=True` for several."
        )
