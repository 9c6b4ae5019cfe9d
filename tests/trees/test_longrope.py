"""LongRoPE: beyond a length a model reads the whole text by other rotary frequencies; no pass or cache mixes them."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from support.cases import Case, assert_equal, assert_equals_the_rule
from support.kinds import BYTES, peaked
from support.reference import reference_decode
from support.releases import cache_of, with_cache
from support.tiny import TOKENIZERS, tiny_model
from transformers import DynamicCache, Phi3Config, Phi3ForCausalLM

from hf_adafuse import AdaFuseConfig
from hf_adafuse.trees import kv_cache_backend
from hf_adafuse.trees.pass_policy import Policy

SWITCH = 12
SHORT, LONG = "She", "the cat, and there was a big tree in the park."


@functools.cache
def phi():
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    factors = dict(short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[4.0, 9.0, 16.0, 30.0])
    rope = dict(rope_type="longrope", original_max_position_embeddings=SWITCH, rope_theta=10000.0, **factors)
    tokens = dict(vocab_size=len(BYTES), bos_token_id=0, eos_token_id=0, pad_token_id=2)
    config = Phi3Config(rope_parameters=rope, initializer_range=0.3, max_position_embeddings=512, **sizes, **tokens)
    config.original_max_position_embeddings = SWITCH
    return peaked(Phi3ForCausalLM(config))


def case_of(role, prompts, n=12):
    members = [(phi(), BYTES), (tiny_model("llama", "characters", 1), TOKENIZERS["characters"]())]
    models, tokenizers = zip(*(members if role == "main" else members[::-1]), strict=True)
    return Case(list(models), list(tokenizers), AdaFuseConfig(max_words=2, max_word_tokens=3), prompts, n)


def test_the_frequencies_change_there():
    ids = torch.arange(20, 20 + SWITCH + 1)[None]
    with torch.no_grad():
        short, long = phi()(ids[:, :-1]).logits, phi()(ids).logits[:, :-1]
    assert (short - long).abs().max() > 0.1


@pytest.mark.parametrize("role", ["main", "assistant"])
def test_longer_texts_equal_the_oracle(role, look_ahead):
    assert_equal(case_of(role, [LONG, LONG[4:], LONG[9:]]))
    look_ahead(2, is_flat=True)
    assert_equal(case_of(role, [LONG]))


@pytest.mark.parametrize("weights", [None, "prompt"])
@pytest.mark.parametrize("role", ["main", "assistant"])
def test_prompts_that_are_read_in_parts_equal_the_oracle(role, weights, monkeypatch):
    """The first part would fit into the short texts, and is read by the frequencies for long ones all the same."""
    monkeypatch.setattr(Policy, "most_prompt_tokens", 4)
    monkeypatch.setattr(kv_cache_backend, "_LEAST_PROMPT_COLUMNS", 4)
    for prompts in ([LONG], [LONG, LONG[4:], LONG[9:]]):
        case = case_of(role, prompts)
        case.config = dataclasses.replace(case.config, model_weights=weights)
        assert_equals_the_rule(case)


@pytest.mark.parametrize("role", ["main", "assistant"])
def test_a_text_that_begins_below_ends_there(role, look_ahead):
    look_ahead(2, is_flat=True)
    case = case_of(role, [SHORT], n=30)
    members = case.ref_members()
    members[0 if role == "main" else 1].max_length = SWITCH
    (row,), _, _ = case.main_ids()
    expected, _ = reference_decode(members, case.member_prompts(row), case.config, 30)
    with pytest.warns(UserWarning, match=rf"outgrows the rotary frequencies for short texts of .* \({SWITCH} tokens\)"):
        output = case.fast()
    assert output.sequences[0, len(row) :].tolist() == expected != []


def test_prompts_of_both_kinds_are_refused():
    with pytest.raises(ValueError, match=rf"main model must be all of at most {SWITCH} tokens or all longer"):
        case_of("main", [SHORT, LONG]).fast()


def test_a_cache_of_the_other_frequencies_is_not_used():
    case = case_of("main", [LONG])
    ids, past = case.main_ids()[1], DynamicCache()
    with torch.no_grad():
        phi()(ids[:, :SWITCH], **with_cache(past))
    assert torch.equal(case.fast(**with_cache(past)).sequences, case.fast().sequences)


@pytest.mark.parametrize("role", ["main", "assistant"])
def test_keys_of_a_long_text_are_of_no_use_for_a_short_one(role):
    """A returned cache of another text, which begins like it."""
    case = case_of(role, [LONG])
    cache = cache_of(case.fast())
    case.prompts, case.max_new_tokens = [LONG[:5]], 3
    assert max(len(tok(case.prompts[0]).input_ids) for tok in case.tokenizers) + 3 <= SWITCH
    assert torch.equal(case.fast(**with_cache(cache)).sequences, case.fast().sequences)
