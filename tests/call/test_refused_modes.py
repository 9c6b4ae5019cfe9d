"""Ways of generating that AdaFuse is not, and inputs and caches that it cannot start from, are refused."""

from __future__ import annotations

import pytest
import torch
from support.calls import BYTES, CHARS, LEFT, PROMPT, arguments, assert_refused, inputs_of, no_forward, own
from support.releases import with_cache
from support.tiny import eos_ids, tiny_model
from transformers import GenerationConfig, StaticCache
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS
from transformers.generation.streamers import BaseStreamer

from hf_adafuse import enable_adafuse
from hf_adafuse.transformers_compat import CACHE_NAME

# "hybrid" means nothing any more: transformers drops it, with a warning.
REFUSED_CACHES = sorted(set(ALL_CACHE_IMPLEMENTATIONS) - {"dynamic", "hybrid"})


def test_the_dynamic_cache_may_be_named():
    main = enable_adafuse(own())
    plain, named = (main.generate(**arguments(**given)) for given in ({}, dict(cache_implementation="dynamic")))
    assert torch.equal(plain, named)
    assert {"static", "quantized", "offloaded", "offloaded_static"} < set(REFUSED_CACHES)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(num_beams=2), "beam"),
        (dict(num_beams=2, do_sample=True), "beam"),
        (dict(num_beams=4, num_return_sequences=2), "beam"),
        (dict(num_return_sequences=2), "num_return_sequences"),
        (dict(assistant_model=tiny_model("llama", "byte_level", 1)), "assisted_generation"),
        (dict(prompt_lookup_num_tokens=2), "assisted_generation"),
        (dict(penalty_alpha=0.6, top_k=4), "contrastive|penalty_alpha"),
        (dict(dola_layers="low"), "dola"),
        (dict(force_words_ids=[[5]], num_beams=2), "beam"),
        (dict(synced_gpus=True), "`synced_gpus` must be False"),
        (dict(guidance_scale=1.5), "`guidance_scale` must be 1"),
        (dict(cache_implementation="paged"), "`cache_implementation` must "),
        *[(dict(cache_implementation=name), "`cache_implementation` must be left out") for name in REFUSED_CACHES],
        (dict(output_attentions=True), "`?output_attentions`? "),
        (dict(output_hidden_states=True), "`output_hidden_states` must be False"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("alone", [False, True], ids=["ensemble", "alone"])
def test_other_ways_of_generating_are_refused(changes, match, alone):
    given = arguments(**changes)
    if alone:
        del given["assistant_models"], given["assistant_tokenizers"]
    helper = changes.get("assistant_model")
    with no_forward(*([] if helper is None else [helper])):
        assert_refused(given, match, form=False)  # transformers' own checks come first for some


@pytest.mark.parametrize(
    "changes", [dict(num_beams=2), dict(cache_implementation="static"), dict(output_hidden_states=True)]
)
def test_the_same_in_a_generation_config(changes):
    config = GenerationConfig(eos_token_id=eos_ids(BYTES), pad_token_id=BYTES.pad_token_id, max_new_tokens=3, **changes)
    before = config.to_dict()
    assert_refused(arguments(generation_config=config, do_sample=LEFT, max_new_tokens=LEFT), "must ")
    assert config.to_dict() == before


def test_a_paged_cache_in_a_generation_config():
    config = GenerationConfig(pad_token_id=BYTES.pad_token_id, max_new_tokens=3)
    config.cache_implementation = "paged"
    assert_refused(
        arguments(generation_config=config, do_sample=LEFT, max_new_tokens=LEFT), "cache_implementation", form=False
    )


def test_paged_with_bound_assistants_is_refused_too():
    assistant = tiny_model("gpt2", "characters")
    main = enable_adafuse(own(), [assistant], [CHARS], BYTES)
    with no_forward(assistant):
        assert_refused(inputs_of(BYTES) | dict(cache_implementation="paged"), "must not be", main=main)


@pytest.mark.parametrize("with_ids", [False, True])
def test_embeddings_are_refused(with_ids):
    main = enable_adafuse(own())
    given = arguments()
    given["inputs_embeds"] = torch.zeros(1, given["input_ids"].shape[1], 32)
    if not with_ids:
        del given["input_ids"]
    assert_refused(given, "`inputs_embeds` must be left out", main=main)


def test_healing_of_one_members_prompt_is_refused():
    own_inputs = [inputs_of(CHARS)]
    assert_refused(arguments(token_healing=True, assistant_inputs=own_inputs), "`token_healing` must be False")


def test_other_inputs_of_a_model_are_refused():
    given = arguments(cache_position=torch.arange(3), head_mask=torch.ones(1))
    assert_refused(given, "head_mask|cache_position", form=False)
    given = arguments(position_ids=torch.arange(5, 5 + inputs_of(BYTES)["input_ids"].shape[1])[None])
    assert_refused(given, "`position_ids` must count")


def test_a_static_cache_is_refused():
    main = enable_adafuse(own())
    cache = StaticCache(config=main.config, max_cache_len=32)
    cache.update(torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 2, 8), 0)
    cache.update(torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 2, 8), 1)
    assert_refused(arguments(**with_cache(cache)), f"`{CACHE_NAME}` must be a DynamicCache", main=main)


class Listener(BaseStreamer):
    """A streamer that takes batches."""

    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append(value)

    def end(self):
        self.calls.append("end")


def test_a_streamer_is_for_one_prompt():
    streamer = Listener()
    given = arguments(streamer=streamer, **inputs_of(BYTES, "She", PROMPT))
    assert_refused(given, "`streamer` must be used with one prompt, but there are 2")
    assert "end" not in streamer.calls and all(
        isinstance(call, torch.Tensor) and call.dim() == 2 for call in streamer.calls
    )
