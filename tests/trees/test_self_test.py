"""The self-test: what it costs, that it is remembered, and what it finds for models such as remote code may be."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from cases import assert_equal, counts
from kinds import BYTES, CPU, MANY, MODELS, case_of, model_of, peaked
from tiny import TOKENIZERS, tiny_model
from transformers import DynamicCache, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput, CausalLMOutputWithPast

from hf_adafuse import enable_adafuse
from hf_adafuse.trees.self_test import choose_backend


def passes(model, call):
    seen = []
    handle = model.register_forward_pre_hook(lambda *_: seen.append(1))
    try:
        call()
    finally:
        handle.remove()
    return len(seen)


def test_the_self_test_is_short_and_remembered():
    config = copy.deepcopy(tiny_model().config)
    config.max_position_embeddings = 509  # of which there is no other
    model = LlamaForCausalLM(config).eval()
    assert 1 <= passes(model, lambda: choose_backend(model, CPU)) <= 5
    for known in (model, copy.deepcopy(model), enable_adafuse(copy.copy(model)), LlamaForCausalLM(config).eval()):
        assert passes(known, lambda known=known: choose_backend(known, CPU)) == 0
    assert passes(model.to(torch.bfloat16), lambda: choose_backend(model, CPU)) > 0


def test_the_self_test_is_not_in_the_statistics():
    config = copy.deepcopy(tiny_model().config)
    config.max_position_embeddings = 508
    case = case_of(peaked(LlamaForCausalLM(config)))
    assert counts(case.fast()) == counts(case.fast())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "bloom", "jamba", "qwen3_next"])
def test_the_same_backend_in_half_precision(name, dtype):
    model = copy.deepcopy(tiny_model() if name == "llama" else model_of(name)).to(dtype)
    assert choose_backend(model, CPU) == ("packed" if name == "llama" else MODELS[name][-1])


class Forgetful(LlamaForCausalLM):
    """As remote code may be: it takes every argument, and knows neither masks nor caches."""

    def forward(self, input_ids, **kwargs):
        return CausalLMOutput(logits=super().forward(input_ids, use_cache=False).logits)


class Bare(LlamaForCausalLM):
    """As remote code may be, too: ids in, a tuple out."""

    def forward(self, input_ids):
        return (super().forward(input_ids, use_cache=False).logits,)


class Legacy(LlamaForCausalLM):
    """Its cache is a tuple of keys and values per layer, as it was before transformers had caches; it has no masks."""

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        past = DynamicCache(ddp_cache_data=past_key_values or ())
        output = super().forward(input_ids, past_key_values=past, use_cache=use_cache)
        layers = tuple((layer.keys, layer.values) for layer in past.layers)
        return CausalLMOutputWithPast(logits=output.logits, past_key_values=layers if use_cache else None)


class Lying(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = torch.randn_like(output.logits)
        return output


class Broken(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        raise RuntimeError("the weights are on fire")


class Empty(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * torch.nan
        return output


def of_class(cls):
    return peaked(cls(copy.deepcopy(tiny_model().config)))


@pytest.mark.parametrize("role", ["main", "assistant"])
@pytest.mark.parametrize("cls", [Forgetful, Bare])
def test_a_model_that_remembers_nothing_is_read_again_with_one_warning(cls, role, look_ahead):
    model = of_class(cls)
    plain = LlamaForCausalLM(model.config).eval()
    plain.load_state_dict(model.state_dict())

    def case(batch):
        made = case_of(model, role, batch)
        made.slow = case_of(plain, role, batch).slow  # the oracle asks for what `Bare` does not give
        return made

    name = "the main model" if role == "main" else rf"assistant 1 \({cls.__name__}\)"
    with pytest.warns(UserWarning, match=f"{name} .*reads the whole text again") as caught:
        assert_equal(case(batch=3))
    assert len(caught) == 1
    look_ahead(2)
    with warnings.catch_warnings():  # `fast` copies the main model: another one, that warns too
        warnings.filterwarnings("ignore" if role == "main" else "error", message=".* reads the whole text again")
        assert_equal(case(batch=1))


@pytest.mark.parametrize("role", ["main", "assistant"])
def test_a_model_with_a_cache_of_its_own_kind_goes_on_from_it(role):
    model = of_class(Legacy)
    assert choose_backend(model, CPU) == MANY
    for batch in (1, 3):
        assert_equal(case_of(model, role, batch))


@pytest.mark.parametrize(
    ("cls", "match"),
    [
        (Lying, "two plain forward passes over one text differ"),
        (Broken, "a plain forward pass raises RuntimeError: the weights are on fire"),
        (Empty, "a plain forward pass gives logits that are NaN"),
    ],
)
def test_a_model_that_no_backend_can_run_is_refused(cls, match):
    tokenizer = TOKENIZERS["characters"]()
    main, assistant = tiny_model("llama", "characters"), of_class(cls)
    with pytest.raises(ValueError, match=rf"but for assistant 1 \({cls.__name__}\) .*{match}.* Choose another model"):
        enable_adafuse(copy.copy(main), [assistant], [BYTES], tokenizer)
    with pytest.raises(ValueError, match=f"but for the main model .*{match}"):
        case_of(assistant).fast()
