"""Rotary positions have no end: `max_position_embeddings` is no limit, whatever the frequencies are made of."""

from __future__ import annotations

import copy

import pytest
import torch
from support.calls import arguments, assert_refused
from support.cases import Case, assert_equal
from support.tiny import TOKENIZERS, tiny_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_adafuse import AdaFuseConfig, enable_adafuse

# As model cards have them: Qwen2.5's for YaRN.
TYPES = {
    "default": {},
    "linear": dict(factor=4.0),
    "yarn": dict(factor=4.0, original_max_position_embeddings=32),
    "llama3": dict(factor=4.0, original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4.0),
    "longrope": dict(
        factor=4.0, original_max_position_embeddings=32, short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0] * 4
    ),
    "proportional": dict(partial_rotary_factor=0.5),
}
DYNAMIC = ("dynamic",)
LONG = "Once upon a time there was a big tree in the park, and the cat sat under it and said."
FIRST, SECOND = TOKENIZERS["characters"](), TOKENIZERS["byte_level"]()


def with_rope(rope_type, architecture="llama", tokenizer="characters", max_positions=32):
    """A tiny model with another kind of rotary positions."""
    base = tiny_model(architecture, tokenizer, 0)
    config = copy.deepcopy(base.config)
    config.max_position_embeddings = max_positions
    config.rope_parameters = {**config.rope_parameters, "rope_type": rope_type, **TYPES.get(rope_type, {"factor": 2.0})}
    model = type(base)(config).eval()
    model.load_state_dict(base.state_dict())
    model.generation_config = copy.deepcopy(base.generation_config)
    return model


def test_every_type_of_the_release_is_here():
    assert {*ROPE_INIT_FUNCTIONS} - {*TYPES} == {*DYNAMIC}


@pytest.mark.parametrize("rope_type", [name for name in TYPES if name == "default" or name in ROPE_INIT_FUNCTIONS])
@pytest.mark.parametrize("role", ["main", "assistant"])
def test_longer_texts_equal_the_oracle(rope_type, role):
    other = tiny_model("gpt2", "byte_level", 1)
    members = [(with_rope(rope_type), FIRST), (other, SECOND)]
    models, tokenizers = zip(*(members if role == "main" else members[::-1]), strict=True)
    assert len(FIRST(LONG).input_ids) > 40
    assert_equal(Case(list(models), list(tokenizers), AdaFuseConfig(max_words=2, max_word_tokens=4), [LONG], 10))


def test_a_text_goes_on_beyond_it():
    model = with_rope("yarn")
    case = Case([model, tiny_model("gpt2", "byte_level", 1)], [FIRST, SECOND], AdaFuseConfig(), ["the cat and the"], 30)
    assert_equal(case)
    ids = case.main_ids()[1]
    output = enable_adafuse(model).generate(
        ids, tokenizer=FIRST, adafuse_config=True, max_new_tokens=40, min_new_tokens=40, do_sample=False
    )
    expected = with_rope("yarn").generate(ids, max_new_tokens=40, min_new_tokens=40, do_sample=False)
    assert ids.shape[1] < 32 and torch.equal(output, expected)


@pytest.mark.parametrize("max_positions", [0, -1])
def test_no_limit_is_none(max_positions):
    case = Case(
        [with_rope("default", max_positions=max_positions), tiny_model("gpt2", "byte_level", 1)],
        [FIRST, SECOND], AdaFuseConfig(), ["She"], 6,
    )  # fmt: skip
    assert_equal(case)


def test_frequencies_that_follow_the_length_are_a_limit():
    ids = FIRST(LONG, return_tensors="pt").input_ids
    given = arguments(input_ids=ids, attention_mask=torch.ones_like(ids), tokenizer=FIRST)
    match = "at most 32 tokens .*dynamic rotary frequencies follow the length of the text"
    assert_refused(given, match, main=enable_adafuse(with_rope("dynamic")))
