"""Models that cannot take part are refused: encoder-decoders, attention that does not run, prompt learning."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from support.calls import BYTES, FORM, arguments, assert_refused, no_forward, own, state_of, with_attention
from transformers import LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from hf_adafuse import AdaFuseGenerationMixin, disable_adafuse, enable_adafuse

TINY_T5 = T5ForConditionalGeneration(
    T5Config(vocab_size=len(BYTES), d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
)


def test_an_encoder_decoder_is_refused():
    before = state_of(TINY_T5)
    with (
        no_forward(TINY_T5),
        pytest.raises(ValueError, match=r"decoder-only.* but T5ForConditionalGeneration is an enc"),
    ):
        enable_adafuse(TINY_T5)
    assert state_of(TINY_T5) == before and not isinstance(TINY_T5, AdaFuseGenerationMixin)
    given = arguments(assistant_models=[TINY_T5], assistant_tokenizers=[BYTES])
    assert_refused(given, "decoder-only models, but assistant 1 .* is an encoder-decoder")
    main = own()
    before = state_of(main)
    with no_forward(main, TINY_T5), pytest.raises(ValueError, match="decoder-only models, but assistant 1"):
        enable_adafuse(main, [TINY_T5], [BYTES], BYTES)
    assert state_of(main) == before and type(main) is LlamaForCausalLM


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_attention_that_does_not_run_here_is_refused(attention):
    """By a plain forward pass, which raises; flex_attention is not tried: it is compiled anew for each shape."""
    model = with_attention(attention)
    given = arguments(assistant_models=[model], assistant_tokenizers=[BYTES])
    main = enable_adafuse(own())
    for call, name in ((given, "assistant 1"), (arguments(), "the main model")):
        before = state_of(model)
        with pytest.raises(ValueError, match=f"but for {name} .*'{attention}'.*`attn_implementation`") as caught:
            (main if call is given else enable_adafuse(model)).generate(**call)
        assert re.match(FORM, str(caught.value), re.DOTALL), str(caught.value)
        assert state_of(disable_adafuse(model))[1:] == before[1:]


def test_prompt_learning_is_refused():
    model = own("llama", seed=1)
    model.peft_config = {"default": SimpleNamespace(is_prompt_learning=True)}
    given = arguments(assistant_models=[model], assistant_tokenizers=[BYTES])
    assert_refused(given, "assistant 1 .* uses prompt learning")
    model.peft_config = {"default": SimpleNamespace(is_prompt_learning=False)}
    assert enable_adafuse(own()).generate(**given).shape[0] == 1


@pytest.mark.parametrize("value", [None, "gpt2", torch.nn.Linear(2, 2), SimpleNamespace(config=None)], ids=repr)
def test_only_transformers_models_are_enabled(value):
    with pytest.raises(ValueError, match=r"^`model` must be a transformers model"):
        enable_adafuse(value)
