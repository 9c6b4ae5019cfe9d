"""A call that works, and whether it is refused once changed: before any forward pass, with nothing else changed."""

from __future__ import annotations

import contextlib
import copy
import re

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from hf_adafuse import AdaFuseConfig, enable_adafuse
from support.tiny import TOKENIZERS, tiny_model

# `<what> must <rule>, but <value>. <what to do>`
FORM = r"^.+ must .+, but .+\. .+\.$"
BYTES, CHARS = TOKENIZERS["byte_level"](), TOKENIZERS["characters"]()
PROMPT = "Once upon a time"


@contextlib.contextmanager
def no_forward(*models):
    """Fails when one of the models, or a part of it that has a `forward`, was run."""
    count = [0]

    def tick(*_):
        count[0] += 1

    handles = [module.register_forward_pre_hook(tick) for model in models for module in model.modules()]
    try:
        yield
        assert count[0] == 0, f"{count[0]} forward passes"
    finally:
        for handle in handles:
            handle.remove()


def state_of(model):
    """What a call may not change about a model."""
    generation = model.generation_config
    return (
        type(model),
        model.training,
        model.config.to_json_string(use_diff=False),
        model.config._attn_implementation,
        None if generation is None else {name: repr(value) for name, value in vars(generation).items()},
        sorted(vars(model)),
        [
            (name, id(parameter), parameter._version, parameter.requires_grad)
            for name, parameter in model.named_parameters()
        ],
        sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()),
    )


def state_of_tokenizer(tokenizer):
    return tokenizer.backend_tokenizer.to_str(), tokenizer.padding_side, tokenizer.special_tokens_map, len(tokenizer)


def own(architecture="llama", tokenizer="byte_level", **kwargs):
    """A tiny model of one's own: the weights are shared, the rest may be changed."""
    model = copy.copy(tiny_model(architecture, tokenizer, **kwargs))
    model.config, model.generation_config = copy.deepcopy(model.config), copy.deepcopy(model.generation_config)
    return model


def inputs_of(tokenizer, *prompts):
    return dict(tokenizer(list(prompts or [PROMPT]), padding=True, return_tensors="pt", return_token_type_ids=False))


def arguments(**changes):
    """A call that works: `test_the_call_that_the_refusals_change_works` runs it."""
    given = dict(
        **inputs_of(BYTES),
        tokenizer=BYTES,
        assistant_models=[tiny_model("gpt2", "characters")],
        assistant_tokenizers=[CHARS],
        adafuse_config=AdaFuseConfig(),
        max_new_tokens=3,
        do_sample=False,
    )
    given |= changes
    return {name: value for name, value in given.items() if not isinstance(value, _Left)}


class _Left:
    """Stands for an argument left out."""


LEFT = _Left()


def assert_refused(given, match, form=True, main=None, error=ValueError):
    """`generate(**given)` raises before any forward pass and changes neither models, tokenizers nor arguments."""
    main = enable_adafuse(own()) if main is None else main
    models = [main, *[m for m in given.get("assistant_models") or [] if isinstance(m, PreTrainedModel)]]
    tokenizers = [t for t in [given.get("tokenizer"), *(given.get("assistant_tokenizers") or [])] if t is not None]
    tensors = {name: value.clone() for name, value in given.items() if isinstance(value, torch.Tensor)}
    lists = {name: list(value) for name, value in given.items() if isinstance(value, list)}
    before = [state_of(model) for model in models], [state_of_tokenizer(t) for t in tokenizers]
    with no_forward(*models), pytest.raises(error, match=match) as caught:
        main.generate(**given)
    assert ([state_of(model) for model in models], [state_of_tokenizer(t) for t in tokenizers]) == before
    assert all(torch.equal(given[name], value) for name, value in tensors.items())
    assert all(len(given[name]) == len(value) for name, value in lists.items())
    if form:
        assert re.match(FORM, str(caught.value), re.DOTALL), str(caught.value)
    return str(caught.value)


def ran(model, call):
    """How often `model` ran during `call()`."""
    count = [0]

    def tick(*_):
        count[0] += 1

    handle = model.register_forward_pre_hook(tick)
    try:
        call()
    finally:
        handle.remove()
    return count[0]


def with_attention(name):
    model = LlamaForCausalLM(copy.deepcopy(tiny_model().config)).eval()
    model.config._attn_implementation = name
    return model
