"""Makes the plan of a call: one frozen value with each member's ids, cache, processors and backend. After this point no
input is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config import AdaFuseConfig
from ..decoding.strategies.registry import make_strategy
from ..members.model_handle import ModelHandle
from ..members.processor_request import ProcessorRequest, assistant_processors, main_processors
from ..members.processors import PromptProcessors
from ..members.prompts import assistant_prompts, check_prompts, warn_of_damaged_prompts
from ..members.stateful_processors import is_stateful
from ..members.structured import compile_grammar
from ..transformers_compat import CACHE_NAME, num_cached, prepared_eos_ids
from ..trees.adapters import base_model
from ..trees.backend_probe import keeps_keys
from ..trees.kv_cache import KeysValues, kept_beginnings
from .arguments import EnsembleSpec
from .continuation import assistant_states, resume_ids
from .images import Images, image_tokens
from .inputs import GenerateInputs, MainInputs, read_inputs
from .sampling import RandomNumbers, Warper, random_streams, warper_of
from .served_limits import check_served_call
from .stopping import StopCheck


@dataclass(frozen=True)
class MemberInputs:
    """
    The inputs of one member: its ids, cache, processors and backend.

    Args:
        handle (`ModelHandle`): the model with its tokenizer.
        prompts (`list[list[int]]`): per prompt, its own ids.
        cache (`KeysValues`, *optional*): the keys and values of the first columns of the left-padded prompts.
        eos_ids (`list[int]`): its end-of-sequence ids, as far as it has embeddings of them.
        processors (`list[PromptProcessors]`): per prompt, its logits processors.
        backend (`str`): the name of the backend that runs its token trees.
        images (`Images`, *optional*): the images that it reads with its prompts.
    """

    handle: ModelHandle
    prompts: list[list[int]]
    cache: KeysValues | None
    eos_ids: list[int]
    processors: list[PromptProcessors]
    backend: str
    images: Images | None = None

    @property
    def can_share(self) -> bool:
        """Whether a shared beginning of the prompts may be read apart from the rest. A model that reads long prompts by
        other rotary frequencies cannot."""
        switch = self.handle.frequency_switch
        return switch is None or max(map(len, self.prompts)) <= switch


@dataclass(frozen=True)
class CallPlan:
    """
    Everything that is decided about a call before it is decoded.

    Args:
        members (`list[MemberInputs]`): the inputs of each member, the main model's first.
        inputs (`MainInputs`): the main model's prompts as the caller gave them.
        config (`AdaFuseConfig`): the settings.
        call (`GenerateInputs`): what transformers' `generate()` has prepared.
        stop_check (`StopCheck`): says after each committed token whether the text ends.
        warpers (`list[Warper]`, *optional*): per member, how its tokens are drawn. `None`: words are not sampled.
        streams (`list[RandomNumbers]`): per prompt, the random numbers of its words, where words are sampled. They
            follow from torch's seed at the time when the plan is made.
        has_grammar (`bool`): whether the text must follow a grammar.
        max_batch_size (`int`, *optional*), on_answer (`Callable`, *optional*): as of [`EnsembleSpec`].
    """

    members: list[MemberInputs]
    inputs: MainInputs
    config: AdaFuseConfig
    call: GenerateInputs
    stop_check: StopCheck
    warpers: list[Warper] | None = None
    streams: Sequence[RandomNumbers] = ()
    has_grammar: bool = False
    max_batch_size: int | None = None
    on_answer: Any = None

    @property
    def returns_cache(self) -> bool:
        return self.call.returns_cache and self.members[0].images is None

    @property
    def keeps_logits(self) -> bool:
        call = self.call
        return call.gives_scores or (call.returns_dict and bool(call.generation_config.output_logits))


def plan_call(ensemble: EnsembleSpec, call: GenerateInputs) -> CallPlan:
    """
    Make the plan.

    Raises:
        ValueError: inputs that cannot be used, or a model that no backend can run.
    """
    inputs = read_inputs(call, ensemble.handles[0].model)
    _check_criteria(call, ensemble.config)
    stop_check = StopCheck(call.stopping_criteria, len(inputs.prompts), call.input_ids.device, call.gives_scores)
    request = replace(call.processors, assistants=ensemble.assistant_processors)
    request.check(len(ensemble.handles) - 1)
    handles = ensemble.handles
    prompts, caches = _prompts(ensemble, call, inputs)
    has_cache = any(cache is not None for cache in caches) or ensemble.images is not None
    _check_max_batch_size(ensemble.max_batch_size, len(inputs.prompts), has_cache)
    for handle, ids in zip(handles, prompts, strict=True):
        handle.check_mode()
        check_prompts(handle, ids)
    if ensemble.images is not None:
        _check_image_prompts(handles[0].model, inputs, call.generation_config.num_return_sequences or 1)
    all_eos = [prepared_eos_ids(call.generation_config), *(other.own_eos_ids() for other in handles[1:])]
    members = [
        MemberInputs(handle, ids, cache, _embedded_eos_ids(eos, handle), [], "")
        for handle, ids, cache, eos in zip(handles, prompts, caches, all_eos, strict=True)
    ]
    members = [replace(member, backend=member.handle.tested_backend()) for member in members]
    for handle in handles:
        handle.warn_of_foreign_tokenizer()
    if ensemble.images is not None:
        members[0] = _with_images(members[0], ensemble.images)
    _check_cache(members[0], inputs)
    members = _with_processors(members, request, _grammars(ensemble, members), inputs)
    has_grammar = ensemble.structured is not None
    plan = CallPlan(
        members=members,
        inputs=inputs,
        config=ensemble.config,
        call=call,
        stop_check=stop_check,
        warpers=_warpers(ensemble),
        has_grammar=has_grammar,
        max_batch_size=ensemble.max_batch_size,
        on_answer=ensemble.on_answer,
    )
    for index, member in enumerate(members):
        check_served_call(member.handle, member.processors, plan.keeps_logits and index == 0)
    return plan if plan.warpers is None else replace(plan, streams=random_streams(inputs.prompts))


def _prompts(
    ensemble: EnsembleSpec, call: GenerateInputs, inputs: MainInputs
) -> tuple[list[list[list[int]]], list[KeysValues | None]]:
    """Each member's ids of the prompts, and the cache of their beginning where there is one."""
    handles, given = ensemble.handles, ensemble.assistant_inputs
    repeats = call.generation_config.num_return_sequences or 1
    read = inputs.prompts
    if ensemble.images is not None:
        tokens = image_tokens(handles[0].model)
        read = [[token for token in ids if token not in tokens] for ids in read]
    prompts = [inputs.prompts, *assistant_prompts(handles, read, given, repeats)]
    # What follows from the prompt needs all of it to be read.
    is_read_anew = isinstance(ensemble.config.model_weights, str) or make_strategy(ensemble.config).needs_prompt_facts
    caches: list[KeysValues | None] = [_usable(handles[0], inputs.prompts, inputs.cache, inputs.cached_length)]
    derived = []
    for index, (assistant, rows) in enumerate(zip(handles[1:], prompts[1:], strict=True)):
        is_given = given is not None and given[index] is not None
        states = assistant_states(inputs.past, index, assistant, len(rows))
        if not is_given:
            is_same = inputs.continues_earlier_call
            if states is None or not resume_ids(inputs.past, is_same, states, rows):
                derived.append(index + 1)
        cache = None if states is None or not all(rows) else kept_beginnings(states, rows)
        caches.append(_usable(assistant, rows, cache, max((len(ids) for ids, _ in states or []), default=0)))
    warn_of_damaged_prompts(handles, prompts, derived)
    return prompts, [None] * len(prompts) if is_read_anew else caches


def _check_criteria(call: GenerateInputs, config: AdaFuseConfig) -> None:
    """Whole answers are asked for stops before they are committed, each from its own beginning."""
    remember = [type(one).__name__ for one in call.stopping_criteria if is_stateful(one)]
    if remember and make_strategy(config).is_whole:
        raise ValueError(
            f"`stopping_criteria` must be functions of the ids with method {config.method!r}, but {remember} remember "
            "earlier calls. Set `is_function_of_ids = True` in their class if they do not."
        )
    own = [one for one in call.stopping_criteria if not type(one).__module__.startswith("transformers.")]
    if own and call.gives_scores and make_strategy(config).is_whole:
        raise ValueError(
            f"`output_scores` must be False with method {config.method!r} and stopping criteria of your own, but is "
            "True. They are asked of answers whose scores are not known yet."
        )


def _usable(handle: ModelHandle, prompts: list[list[int]], cache: KeysValues | None, length: int) -> KeysValues | None:
    """A cache of a text of `length` tokens, or `None` where its keys are of other rotary frequencies than those by
    which the prompts are read now."""
    switch = handle.frequency_switch
    if switch is not None and (length <= switch) != (max(map(len, prompts)) <= switch):
        return None
    return cache


def _embedded_eos_ids(eos_ids: list[int], handle: ModelHandle) -> list[int]:
    """The end-of-sequence ids of which a model has embeddings: -1 stands for an end that never comes."""
    size = handle.vocabulary.vocab_size
    return sorted({token for token in eos_ids if token >= 0 and (size is None or token < size)})


def _check_cache(main: MemberInputs, inputs: MainInputs) -> None:
    if inputs.cache is not None and not keeps_keys(main.backend):
        raise ValueError(
            f"`{CACHE_NAME}` must be left out where the main model runs without keys and values, but is given for a "
            f"{type(main.handle.model).__name__}. Pass all ids alone."
        )


def _check_image_prompts(model: Any, inputs: MainInputs, num_texts: int) -> None:
    """
    Raises:
        ValueError: a call with images for several texts or with a cache, a prompt without a token for its image, or one
            that ends with such a token.
    """
    if num_texts > 1:
        raise ValueError(f"`num_return_sequences` must be 1 with images, but is {num_texts}. Call once for each text.")
    if inputs.past is not None and num_cached(inputs.past):
        raise ValueError(
            f"`{CACHE_NAME}` must be left out with images, but is given. Pass the whole prompt without it."
        )
    tokens = image_tokens(model)
    without = next((row for row, ids in enumerate(inputs.prompts) if not tokens.intersection(ids)), None)
    if without is not None:
        raise ValueError(
            f"The prompt must hold a token for its image, but does not in row {without}. Make it with the processor."
        )
    row = next((row for row, ids in enumerate(inputs.prompts) if len(ids) < 2 or ids[-1] in tokens), None)
    if row is not None:
        raise ValueError(
            f"The prompt must end with text behind its images, but does not in row {row}. Put a question behind them."
        )


def _with_images(main: MemberInputs, images: Images) -> MemberInputs:
    """
    The main model's inputs with images.

    Raises:
        ValueError: it keeps no keys.
    """
    if not keeps_keys(main.backend):
        raise ValueError(
            f"The inputs must be text alone with AdaFuse and {type(main.handle.model).__name__}, but hold images: "
            "it keeps no keys for each token. Describe the images in the prompt."
        )
    return replace(main, images=images)


def _check_max_batch_size(number: int | None, num_prompts: int, has_cache: bool) -> None:
    if number is not None and number < num_prompts and has_cache:
        raise ValueError(
            f"`max_batch_size` must be at least the number of prompts, {num_prompts}, with `{CACHE_NAME}`, "
            f"but is {number}. Leave one of them out."
        )


def _warpers(ensemble: EnsembleSpec) -> list[Warper] | None:
    """How each member's tokens are drawn, where words are sampled."""
    if ensemble.sampling is None:
        return None
    helper = ensemble.handles[0].model  # any model with `generate()` makes warpers alike
    owns = [getattr(base_model(who.model), "generation_config", None) for who in ensemble.handles]
    members = zip(owns, ensemble.handles, strict=True)
    return [warper_of(helper, own, ensemble.sampling, who.device) for own, who in members]


def _grammars(ensemble: EnsembleSpec, members: list[MemberInputs]) -> list[Any]:
    """The grammar of the text for each member, in its own tokens; `None` where there is none."""
    if ensemble.structured is None:
        return [None] * len(members)
    found = [(member.handle, member.eos_ids) for member in members]
    return [compile_grammar(ensemble.structured, who.vocabulary, eos_ids, who.name) for who, eos_ids in found]


def _with_processors(
    members: list[MemberInputs], request: ProcessorRequest, grammars: list[Any], inputs: MainInputs
) -> list[MemberInputs]:
    """The members' inputs with the logits processors of each prompt."""
    main, *assistants = members
    helper = main.handle.model  # any model with `generate()` makes processors alike
    made = [main_processors(helper, request, inputs.padded, main.prompts, main.handle.device, grammars[0])]
    for number, member in enumerate(assistants):
        device, grammar = member.handle.device, grammars[number + 1]
        prompts = list(zip(member.prompts, main.prompts, strict=True))
        made.append(assistant_processors(helper, request, number, member.eos_ids, prompts, device, grammar))
    return [replace(member, processors=processors) for member, processors in zip(members, made, strict=True)]
