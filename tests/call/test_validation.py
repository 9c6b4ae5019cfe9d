"""Bad input is refused before the first forward pass, with a clear error, and nothing changed; a context that fills up
stops the text cleanly; enabling and disabling leave no trace.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from cases import Case, random_config
from reference import RefMember, reference_decode
from tiny import TOKENIZERS, eos_ids, tiny_model
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS
from transformers.generation.streamers import BaseStreamer

from hf_adafuse import AdaFuseConfig, AdaFuseGenerationMixin, AdaFuseOutput, disable_adafuse, enable_adafuse
from hf_adafuse.members import loading

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


def test_the_call_that_the_refusals_change_works():
    main = enable_adafuse(own())
    assistant = tiny_model("gpt2", "characters")
    given = arguments()  # makes the tokenizer pad, which it remembers
    before = state_of(main), state_of(assistant), state_of_tokenizer(BYTES), state_of_tokenizer(CHARS)
    sequences = main.generate(**given)
    assert sequences.shape[1] == inputs_of(BYTES)["input_ids"].shape[1] + 3
    assert (state_of(main), state_of(assistant), state_of_tokenizer(BYTES), state_of_tokenizer(CHARS)) == before


def test_a_forward_pass_is_noticed():
    """Also one of a part of a model alone."""
    model = own()
    for run in (model, model.model):
        with pytest.raises(AssertionError, match="forward passes"), no_forward(model):
            run(torch.tensor([[5]]))


# Assistants and their lists


@pytest.mark.parametrize("tokenizers", [None, [None]])
def test_an_assistant_without_a_name_needs_a_tokenizer(tokenizers):
    message = assert_refused(
        arguments(assistant_tokenizers=tokenizers), r"`assistant_tokenizers\[0\]` must be a tokenizer"
    )
    assert "no name" in message


def test_the_second_assistant_is_named_where_its_tokenizer_is_missing():
    models = [tiny_model("gpt2", "characters"), tiny_model("llama", "byte_level", 1)]
    given = arguments(assistant_models=models, assistant_tokenizers=[CHARS, None])
    assert_refused(given, r"`assistant_tokenizers\[1\]` must be a tokenizer")


def test_a_main_model_without_a_name_needs_a_tokenizer():
    assert_refused(arguments(tokenizer=LEFT), "`tokenizer` must be a tokenizer")
    assert_refused(arguments(tokenizer=LEFT, assistant_models=LEFT, assistant_tokenizers=LEFT), "`tokenizer` must be")


def test_a_name_under_which_no_tokenizer_is_found_is_in_the_message():
    assistant = own("gpt2", "characters")
    assistant.name_or_path = "nobody/has-this-model"
    given = arguments(assistant_models=[assistant], assistant_tokenizers=LEFT)
    assert_refused(given, "nobody/has-this-model")


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "gpt_neox", "gemma3"])
def test_a_folder_without_a_tokenizer_is_refused(architecture, tmp_path):
    """Also where transformers makes an empty tokenizer of the model's config."""
    own(architecture, "characters").save_pretrained(tmp_path)
    assistant = AutoModelForCausalLM.from_pretrained(tmp_path)
    given = arguments(assistant_models=[assistant], assistant_tokenizers=LEFT)
    message = assert_refused(given, r"`assistant_tokenizers\[0\]` must be a tokenizer")
    assert str(tmp_path) in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("assistant_tokenizers", []),
        ("assistant_tokenizers", [CHARS, CHARS]),
        ("assistant_inputs", []),
        ("assistant_inputs", [None, None]),
        ("assistant_inputs", [inputs_of(CHARS), inputs_of(CHARS)]),
    ],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_lists_of_other_lengths_are_refused(name, value):
    message = assert_refused(arguments(**{name: value}), f"^`{name}` must be one per assistant model")
    assert f"but is {len(value)} for 1 assistant" in message


@pytest.mark.parametrize("count", [1, 3])
def test_as_many_weights_as_members(count):
    config = AdaFuseConfig(model_weights=[1.0] * count)
    message = assert_refused(arguments(adafuse_config=config), "^`model_weights` must be one per member")
    assert f"but is {count} for 2 members" in message


def test_weights_for_one_member_alone():
    given = arguments(assistant_models=LEFT, assistant_tokenizers=LEFT, adafuse_config={"model_weights": [1.0, 1.0]})
    assert_refused(given, "^`model_weights` must be one per member")


@pytest.mark.parametrize("value", [tiny_model("gpt2", "characters"), "a/model-name"], ids=["model", "name"])
def test_assistants_come_in_a_list(value):
    """One model or one name is not taken apart into what it can be iterated over."""
    given = arguments(assistant_tokenizers=LEFT)
    main = enable_adafuse(own())
    given["assistant_models"] = value
    with no_forward(main), pytest.raises(ValueError, match="`assistant_models` must be a list"):
        main.generate(**given)


@pytest.mark.parametrize("value", [3, CHARS, torch.nn.Linear(2, 2)], ids=["int", "tokenizer", "module"])
def test_an_assistant_is_a_transformers_model(value):
    main = enable_adafuse(own())
    with no_forward(main), pytest.raises(ValueError, match="`assistant_models` must be transformers models or names"):
        main.generate(**arguments(assistant_models=[value]))


# The config of a call


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"max_words": 0}, "^`max_words` must be an integer of at least 1, but is 0. "),
        ({"max_wordz": 1}, r"^`adafuse_config` must be made of .*max_words.*, but has \['max_wordz'\]"),
        ("on", "^`adafuse_config` must be an AdaFuseConfig, a dict, True or False, but is 'on'"),
        (1, "^`adafuse_config` must be an AdaFuseConfig, a dict, True or False, but is 1"),
        ([("max_words", 1)], "^`adafuse_config` must be an AdaFuseConfig"),
        (GenerationConfig(), "^`adafuse_config` must be an AdaFuseConfig"),
    ],
    ids=["range", "unknown", "str", "int", "list", "other"],
)
@pytest.mark.parametrize("where", ["call", "generation_config", "model", "bound"])
def test_a_bad_config_is_refused_wherever_it_stands(value, match, where):
    main, form = own(), not isinstance(value, GenerationConfig)
    if where == "bound":
        before = state_of(main)
        with no_forward(main), pytest.raises(ValueError, match=match):
            enable_adafuse(main, adafuse_config=value)
        assert state_of(main) == before
        return
    enable_adafuse(main)
    given = arguments(adafuse_config=LEFT)
    if where == "call":
        given["adafuse_config"] = value
    elif where == "model":
        main.generation_config.adafuse_config = value
    else:
        given["generation_config"] = GenerationConfig(eos_token_id=eos_ids(BYTES), pad_token_id=BYTES.pad_token_id)
        given["generation_config"].adafuse_config = value
        given.pop("do_sample"), given.pop("max_new_tokens")
    assert_refused(given, match, form=form, main=main)


def test_dict_true_and_config_decode_alike_and_false_is_ordinary():
    main = enable_adafuse(own())
    expected = main.generate(**arguments(adafuse_config=AdaFuseConfig(), return_dict_in_generate=True))
    for value in (True, {}, AdaFuseConfig().to_dict(), None):
        got = main.generate(**arguments(adafuse_config=value, return_dict_in_generate=True))
        assert isinstance(got, AdaFuseOutput) and torch.equal(got.sequences, expected.sequences)
    off = main.generate(**arguments(adafuse_config=False, return_dict_in_generate=True))
    assert not isinstance(off, AdaFuseOutput)
    plain = own().generate(**inputs_of(BYTES), max_new_tokens=3, do_sample=False)
    assert torch.equal(off.sequences, plain)


def most_words(output):
    return max(len(committed.words) for committed in output.rounds[0])


def test_the_call_wins_over_the_configs_that_are_stored():
    main = enable_adafuse(own(), adafuse_config={"max_words": 1})
    given = arguments(assistant_models=LEFT, assistant_tokenizers=LEFT, adafuse_config=LEFT, max_new_tokens=12)
    given |= {"return_dict_in_generate": True}
    assert most_words(main.generate(**given)) == 1
    assert most_words(main.generate(**given, adafuse_config={"margin_threshold": 0})) == 3
    assert not isinstance(main.generate(**given, adafuse_config=False), AdaFuseOutput)
    enable_adafuse(main)
    main.generation_config.adafuse_config = {"margin_threshold": 0.0, "max_words": 2}
    assert most_words(main.generate(**given)) == 2
    assert most_words(main.generate(**given, adafuse_config=AdaFuseConfig(max_words=1))) == 1
    assert not isinstance(main.generate(**given, adafuse_config=False), AdaFuseOutput)


@pytest.mark.parametrize("value", [True, {"max_words": 2}, AdaFuseConfig(max_words=2)], ids=["true", "dict", "config"])
def test_a_generation_config_with_adafuse_is_saved_and_loaded(value, tmp_path):
    main = enable_adafuse(own())
    main.generation_config = GenerationConfig(eos_token_id=eos_ids(BYTES), pad_token_id=2, adafuse_config=value)
    main.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert AdaFuseConfig.coerce(loaded.adafuse_config) == AdaFuseConfig.coerce(value)


# Ways of generating that AdaFuse is not

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
        (dict(do_sample=True, num_return_sequences=2), "`num_return_sequences` must be 1 .* but is 2"),
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
    assert_refused(arguments(past_key_values=cache), "`past_key_values` must be a DynamicCache", main=main)


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


# Models that cannot take part

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


def with_attention(name):
    model = LlamaForCausalLM(copy.deepcopy(tiny_model().config)).eval()
    model.config._attn_implementation = name
    return model


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


# Prompts


@pytest.mark.parametrize("alone", [False, True], ids=["ensemble", "alone"])
@pytest.mark.parametrize("mask", [[[1, 1, 1], [1, 1, 0]], [[0, 1, 1], [1, 0, 1]], [[1, 0, 0], [1, 1, 1]]])
def test_right_padded_prompts_are_refused(mask, alone):
    given = arguments(input_ids=torch.tensor([[5, 6, 7], [8, 9, 10]]), attention_mask=torch.tensor(mask))
    if alone:
        del given["assistant_models"], given["assistant_tokenizers"]
    assert_refused(given, "`input_ids` must be padded on the left, but is")


def test_right_padding_is_seen_without_a_mask_too():
    pad = BYTES.pad_token_id
    given = arguments(input_ids=torch.tensor([[5, 6, 7], [8, 9, pad]]), attention_mask=LEFT)
    assert_refused(given, "`input_ids` must be padded on the left")


def test_right_padded_assistant_inputs_are_refused():
    inputs = dict(input_ids=torch.tensor([[5, 6, 7]]), attention_mask=torch.tensor([[1, 1, 0]]))
    assert_refused(arguments(assistant_inputs=[inputs]), r"`assistant_inputs\[0\]` must be padded on the left")


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_assistant_inputs_of_another_number_of_rows_are_refused(rows):
    inputs = dict(input_ids=torch.full((rows, 4), 5), attention_mask=torch.ones(rows, 4, dtype=torch.long))
    given = arguments(assistant_inputs=[inputs], **inputs_of(BYTES, "She", PROMPT))
    message = assert_refused(given, r"`assistant_inputs\[0\]` must hold 2 prompts")
    assert f"({rows}, 4)" in message


@pytest.mark.parametrize("shape", [(1, 3), (1, 5), (2, 4), (4, 1), (2, 2)])
def test_a_mask_of_assistant_inputs_of_another_shape_is_refused(shape):
    inputs = dict(input_ids=torch.full((1, 4), 5), attention_mask=torch.ones(shape, dtype=torch.long))
    message = assert_refused(arguments(assistant_inputs=[inputs]), r"`assistant_inputs\[0\]`")
    assert str(shape) in message


@pytest.mark.parametrize("filler", [0, 1])
@pytest.mark.parametrize("shape", [(2, 3), (2, 5), (1, 4), (4, 2), (3, 4)])
def test_a_mask_of_another_shape_is_refused(shape, filler):
    mask = torch.ones(shape, dtype=torch.long)
    mask[0, 0] = filler  # transformers drops a mask of ones alone
    given = arguments(input_ids=torch.full((2, 4), 5), attention_mask=mask)
    assert_refused(given, "attention mask|position_ids|shape|size", form=False)


@pytest.mark.parametrize(
    "inputs",
    [
        {"attention_mask": torch.ones(1, 4)},
        {},
        {"input_ids": "She"},
        {"input_ids": [[5, 6], [7]]},
        {"input_ids": torch.full((1, 1, 4), 5)},
        {"input_ids": None},
    ],
    ids=["mask-only", "empty", "text", "ragged", "3-D", "none"],
)
def test_assistant_inputs_that_are_no_prompts_are_refused(inputs):
    assert_refused(arguments(assistant_inputs=[inputs]), r"`assistant_inputs\[0\]` must ")


@pytest.mark.parametrize("ids", [[[5, 6, 7]], [5, 6, 7], torch.tensor([5, 6, 7])], ids=["rows", "row", "tensor"])
@pytest.mark.parametrize("as_dict", [True, False])
def test_assistant_inputs_of_one_prompt_may_be_plain(ids, as_dict):
    main = enable_adafuse(own())
    expected = main.generate(**arguments(assistant_inputs=[{"input_ids": torch.tensor([[5, 6, 7]])}], max_new_tokens=6))
    given = arguments(assistant_inputs=[{"input_ids": ids} if as_dict else ids], max_new_tokens=6)
    assert torch.equal(main.generate(**given), expected)


def test_an_empty_prompt_needs_a_beginning_of_sequence_token():
    # The main model's prompt is its BOS alone: no text, and the assistant adds no BOS.
    main = enable_adafuse(own("llama", "characters"))
    bos = torch.tensor([[CHARS.bos_token_id]])
    given = arguments(
        input_ids=bos, attention_mask=torch.ones_like(bos), tokenizer=CHARS,
        assistant_models=[tiny_model("gpt2", "byte_level")], assistant_tokenizers=[BYTES],
    )  # fmt: skip
    message = assert_refused(
        given, "prompt of assistant 1 .* must be at least one token, but is empty in row 0", main=main
    )
    assert "beginning-of-sequence" in message
    given["assistant_inputs"] = [{"input_ids": torch.tensor([[5]])}]
    assert main.generate(**given).shape == (1, 4)
    # With a BOS on both sides the empty prompt works, also where `generate()` makes it.
    given |= dict(
        assistant_models=[tiny_model("gpt2", "characters")], assistant_tokenizers=[CHARS], assistant_inputs=None
    )
    assert main.generate(**given).shape == (1, 4)
    del given["input_ids"], given["attention_mask"]
    assert main.generate(**given).shape == (1, 4)


def test_an_empty_main_prompt_is_refused():
    empty = torch.zeros(1, 0, dtype=torch.long)
    assert_refused(arguments(input_ids=empty, attention_mask=empty), None, form=False)
    masked = dict(input_ids=torch.tensor([[5, 6], [7, 8]]), attention_mask=torch.tensor([[0, 0], [1, 1]]))
    assert_refused(arguments(**masked), "prompt of the main model must be at least one token, but is empty in row 0")


def test_an_empty_row_of_assistant_inputs_is_refused():
    inputs = dict(input_ids=torch.tensor([[5, 6], [7, 8]]), attention_mask=torch.tensor([[1, 1], [0, 0]]))
    given = arguments(assistant_inputs=[inputs], **inputs_of(BYTES, "She", PROMPT))
    assert_refused(given, "prompt of assistant 1 .* is empty in row 1")


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
def test_a_prompt_longer_than_a_context_is_refused(architecture):
    ids = torch.full((2, 25), 40)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0  # the first row, without its padding, fits
    tight = own(architecture, "byte_level", max_positions=24)
    given = arguments(input_ids=ids, attention_mask=mask)
    message = assert_refused(given, "prompt of the main model must be at most 24 tokens", main=enable_adafuse(tight))
    assert "25 tokens in row 1" in message and "max_position_embeddings" in message
    disable_adafuse(tight)
    given = arguments(
        input_ids=ids, attention_mask=mask, assistant_models=[tiny_model("llama", "byte_level", 1), tight],
        assistant_tokenizers=[BYTES, BYTES],
    )  # fmt: skip
    assert_refused(given, r"prompt of assistant 2 \(.+\) must be at most 24 tokens")
    given["assistant_inputs"] = [None, dict(input_ids=ids[:, 6:], attention_mask=mask[:, 6:])]
    assert enable_adafuse(own()).generate(**given).shape[0] == 2


def test_the_same_tokenizer_is_the_same_whatever_it_was_last_asked_for():
    """Padding and truncation are settings of a call: the ids of the prompt reach an assistant of the same tokenizer."""
    seen = []
    main, assistant = enable_adafuse(own()), own("llama", seed=1)
    handle = assistant.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].tolist()), with_kwargs=True
    )
    ids = torch.tensor([[*BYTES("She").input_ids, eos_ids(BYTES)[1], *BYTES("She").input_ids]])
    plain, padded = copy.deepcopy(BYTES), copy.deepcopy(BYTES)
    plain(["She"]), padded(["She", PROMPT], padding=True, truncation=True, max_length=3)
    try:
        for tokenizer in (plain, padded):
            given = arguments(input_ids=ids, attention_mask=torch.ones_like(ids), tokenizer=plain)
            main.generate(**given | dict(assistant_models=[assistant], assistant_tokenizers=[tokenizer]))
            assert seen[0] == ids.tolist()
            seen.clear()
    finally:
        handle.remove()


# Contexts that fill up


def tight_case(number):
    """Members of which one to all have a context of 24 to 40 tokens, most of them with learned positions (GPT-2)."""
    rng = random.Random(number)
    count = 1 + number % 3
    contexts = [rng.choice([24, 29, 40]) if k == number % count or rng.random() < 0.4 else 512 for k in range(count)]
    members = []
    for context in contexts:
        architecture = "gpt2" if context < 512 and rng.random() < 0.7 else rng.choice(["llama", "mistral", "qwen3"])
        tokenizer = rng.choice(["byte_level", "sentencepiece", "characters", "trailing_space"])
        model = tiny_model(architecture, tokenizer, rng.randint(0, 1), 3.0, context)
        members.append(RefMember(model, TOKENIZERS[tokenizer](), eos_ids(TOKENIZERS[tokenizer]()), context))
    config = random_config(rng, count)
    config = dataclasses.replace(config, num_branches=min(3, config.num_branches), max_words=min(3, config.max_words))
    prompts = rng.sample(["She", "A cat", "the tree", "Lima"], rng.randint(1, 2))
    case = Case([m.model for m in members], [m.tokenizer for m in members], config, prompts, 40)
    return case, members


@pytest.mark.parametrize("number", range(20))
def test_generation_stops_at_the_end_of_a_context(number):
    case, members = tight_case(number)
    rows, ids, _ = case.main_ids()
    slow = [reference_decode(members, case.member_prompts(row), case.config, case.max_new_tokens) for row in rows]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = case.fast()
    stopped = set()
    for row, (expected, texts) in enumerate(slow):
        got = output.sequences[row, ids.shape[1] :].tolist()
        assert got[: len(expected)] == expected, f"row {row} of {case}"
        assert set(got[len(expected) :]) <= {case.tokenizers[0].pad_token_id}, f"row {row} of {case} goes on: {got}"
        spans = [committed.text for committed in output.rounds[row]]
        assert spans == texts or (len(expected) == case.max_new_tokens and spans[:-1] == texts[: len(spans) - 1])
        if len(expected) < case.max_new_tokens and not (expected and expected[-1] in members[0].eos):
            stopped.add(row)
    messages = [str(warning.message) for warning in caught]
    assert all(warning.category is UserWarning for warning in caught), messages
    assert len(messages) == len(stopped), f"{case}: {messages} for rows {stopped}"
    names = ["the main model (", *[f"assistant {k} ({type(m).__name__}) (" for k, m in enumerate(case.models[1:], 1)]]
    tight = [f"{name}{m.max_length} tokens)" for name, m in zip(names, members, strict=True) if m.max_length < 512]
    for row in stopped:
        (message,) = [text for text in messages if f"prompt {row} " in text]
        assert "outgrows the context" in message and any(name in message for name in tight), message


def test_the_cases_do_outgrow_their_contexts():
    """Learned positions among them, in the main model and in assistants."""
    seen, wanted = set(), {("GPT2LMHeadModel", True), ("GPT2LMHeadModel", False)}
    for number in range(20):
        if wanted < seen and len(seen) >= 4:
            return
        case, members = tight_case(number)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            case.fast()
        for k, member in enumerate(members):
            name = "the main model" if k == 0 else f"assistant {k} "
            if any(name in str(warning.message) for warning in caught):
                seen.add((type(member.model).__name__, k == 0))
    assert wanted < seen and len(seen) >= 4


def row_of(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(30, 300, (1, length), generator=generator)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("room", [1, 2, 7])
@pytest.mark.parametrize("seed", [0, 1])
def test_exactly_enough_room_is_enough(architecture, room, seed):
    """Only the main model is tight: `max_new_tokens` come out, and no warning (which would be an error here)."""
    main = enable_adafuse(own(architecture, "byte_level", max_positions=24, seed=seed))
    ids = row_of(24 - room, seed)
    other = tiny_model("llama", "characters", seed)
    for extra in ({}, dict(assistant_models=[other], assistant_tokenizers=[CHARS])):
        given = dict(input_ids=ids, tokenizer=BYTES, adafuse_config=AdaFuseConfig(), do_sample=False, **extra)
        output = main.generate(**given, max_new_tokens=room, min_new_tokens=room, return_dict_in_generate=True)
        assert output.sequences.shape[1] == 24
        assert sum(r.num_tokens for r in output.rounds[0]) == room
        with pytest.warns(UserWarning, match=r"outgrows the context of the main model \(24 tokens\)"):
            longer = main.generate(**given, max_new_tokens=room + 1, min_new_tokens=room + 1)
        assert torch.equal(longer, output.sequences)


@pytest.mark.parametrize("tight", ["main", "assistant"])
@pytest.mark.parametrize("as_dict", [False, True])
def test_a_prompt_that_fills_the_context_gives_no_text(tight, as_dict):
    small, large = own("gpt2", max_positions=24), own("llama")
    main, assistant = (small, large) if tight == "main" else (large, small)
    ids = row_of(24)
    given = dict(input_ids=ids, tokenizer=BYTES, assistant_models=[assistant], assistant_tokenizers=[BYTES])
    name = "the main model" if tight == "main" else r"assistant 1 \(GPT2LMHeadModel\)"
    with pytest.warns(UserWarning, match=f"outgrows the context of {name} .24 tokens"):
        output = enable_adafuse(main).generate(
            **given, max_new_tokens=4, do_sample=False, return_dict_in_generate=as_dict, output_scores=as_dict
        )
    assert torch.equal(output.sequences if as_dict else output, ids)
    if as_dict:
        assert output.rounds == [[]] and not output.scores


def test_a_full_row_leaves_the_others_alone():
    """Rows of different lengths: the long one stops at the context, the short one gives what it gives alone."""
    tight = own("gpt2", max_positions=24)
    short, long = row_of(4, 1), row_of(20, 2)
    pad = BYTES.pad_token_id
    ids = torch.cat([torch.cat([torch.full((1, 16), pad), short], 1), long])
    mask = torch.ones_like(ids)
    mask[0, :16] = 0
    given = dict(tokenizer=BYTES, assistant_models=[tight], assistant_tokenizers=[BYTES], do_sample=False)
    given |= dict(max_new_tokens=12, min_new_tokens=12)
    main = enable_adafuse(own())
    alone = main.generate(input_ids=short, **given)
    with pytest.warns(UserWarning, match="prompt 1 stopped early: the text outgrows the context of assistant 1"):
        both = main.generate(input_ids=ids, attention_mask=mask, **given)
    assert torch.equal(both[0, 16:], alone[0])
    with pytest.warns(UserWarning, match="prompt 0 stopped early"):
        full = main.generate(input_ids=long, **given)
    width = full.shape[1]
    assert torch.equal(both[1, :width], full[0]) and set(both[1, width:].tolist()) <= {pad}


# Enabling and disabling


def test_enabling_swaps_the_class_and_nothing_else():
    model = own()
    before = state_of(model)
    weights = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in model.state_dict().items()}
    assert enable_adafuse(model) is model
    cls = type(model)
    assert (
        cls is not LlamaForCausalLM and issubclass(cls, LlamaForCausalLM) and isinstance(model, AdaFuseGenerationMixin)
    )
    assert (cls.__name__, cls.__qualname__, cls.__module__, cls.__doc__) == (
        LlamaForCausalLM.__name__,
        LlamaForCausalLM.__qualname__,
        LlamaForCausalLM.__module__,
        LlamaForCausalLM.__doc__,
    )
    assert state_of(model)[1:] == before[1:]
    assert {name: (tensor.data_ptr(), tensor.shape) for name, tensor in model.state_dict().items()} == weights
    assert enable_adafuse(model) is model and type(model) is cls
    assert type(enable_adafuse(own("llama", seed=1))) is cls
    assert disable_adafuse(model) is model
    assert type(model) is LlamaForCausalLM and state_of(model) == before
    assert disable_adafuse(model) is model and type(model) is LlamaForCausalLM


def test_disabling_leaves_a_class_of_ones_own_alone():
    class Mine(AdaFuseGenerationMixin, LlamaForCausalLM):
        pass

    model = Mine(tiny_model().config)
    assert type(enable_adafuse(model, adafuse_config=True)) is Mine
    assert type(disable_adafuse(model)) is Mine


def test_an_enabled_model_alone_generates_as_ever():
    plain, model = own(), enable_adafuse(own())
    given = inputs_of(BYTES, "She", PROMPT) | dict(max_new_tokens=8)
    for mode in (dict(do_sample=False), dict(num_beams=2, do_sample=False), dict(do_sample=True, top_k=5)):
        torch.manual_seed(0)
        expected = plain.generate(**given, **mode, output_scores=True, return_dict_in_generate=True)
        torch.manual_seed(0)
        got = model.generate(**given, **mode, output_scores=True, return_dict_in_generate=True)
        assert type(got) is type(expected) and torch.equal(got.sequences, expected.sequences)
        assert all(torch.equal(a, b) for a, b in zip(got.scores, expected.scores, strict=True))


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


def test_bound_assistants_are_the_default_and_a_call_overrides_them():
    bound, other = own("gpt2", "characters"), own("qwen3", "byte_level")
    main = enable_adafuse(own(), [bound], [CHARS], BYTES, AdaFuseConfig(max_words=1))
    given = inputs_of(BYTES) | dict(max_new_tokens=5, do_sample=False)
    expected = enable_adafuse(own()).generate(
        **given,
        tokenizer=BYTES,
        assistant_models=[bound],
        assistant_tokenizers=[CHARS],
        adafuse_config={"max_words": 1},
    )
    assert torch.equal(main.generate(**given), expected)
    assert ran(bound, lambda: main.generate(**given)) > 0
    override = dict(assistant_models=[other], assistant_tokenizers=[BYTES])
    assert ran(bound, lambda: main.generate(**given, **override)) == 0
    assert ran(other, lambda: main.generate(**given, **override)) > 0
    # The bound tokenizers belong to the bound assistants.
    with no_forward(main, bound, other), pytest.raises(ValueError, match=r"`assistant_tokenizers\[0\]` must be"):
        main.generate(**given, assistant_models=[other])
    assert ran(bound, lambda: main.generate(**given, adafuse_config=False)) == 0
    assert ran(bound, lambda: main.generate(**given, assistant_models=[])) == 0
    enable_adafuse(main)
    assert ran(bound, lambda: main.generate(**given)) == 0
    enable_adafuse(main, [bound], [CHARS], BYTES)
    disable_adafuse(main)
    assert torch.equal(main.generate(**given), own().generate(**given))
    enable_adafuse(main)  # what was bound before is gone
    assert ran(bound, lambda: main.generate(**given)) == 0


def test_what_is_bound_is_checked_at_once():
    assistant, main = own("gpt2", "characters"), own()
    before = state_of(main)
    refusals = [
        (([assistant], [CHARS, CHARS], BYTES), "`assistant_tokenizers` must be one per assistant model"),
        (([assistant], None, BYTES), r"`assistant_tokenizers\[0\]` must be a tokenizer"),
        (([assistant], [CHARS], None), "`tokenizer` must be a tokenizer"),
        (([assistant], [CHARS], BYTES, {"model_weights": [1.0]}), "`model_weights` must be one per member"),
        (([assistant], [CHARS], BYTES, {"max_words": 0}), "`max_words` must be"),
        (([with_attention("flex_attention")], [BYTES], BYTES), "'flex_attention'"),
    ]
    for given, match in refusals:
        with no_forward(main, assistant), pytest.raises(ValueError, match=match):
            enable_adafuse(main, *given)
        assert state_of(main) == before
    # A refusal leaves what was bound before.
    enable_adafuse(main, [assistant], [CHARS], BYTES)
    with pytest.raises(ValueError, match="`max_words` must be"):
        enable_adafuse(main, [assistant], [CHARS], BYTES, {"max_words": 0})
    assert ran(assistant, lambda: main.generate(**inputs_of(BYTES), max_new_tokens=2, do_sample=False)) > 0


def test_an_enabled_model_is_saved_as_its_base(tmp_path):
    main = enable_adafuse(own(), [own("gpt2", "characters")], [CHARS], BYTES, True)
    main.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LlamaForCausalLM and loaded.config.architectures == ["LlamaForCausalLM"]
    given = inputs_of(BYTES) | dict(max_new_tokens=5, do_sample=False)
    assert torch.equal(loaded.generate(**given), own().generate(**given))
    assert loaded.state_dict().keys() == own().state_dict().keys()


def test_an_enabled_class_loads_too(tmp_path):
    cls = type(enable_adafuse(own()))
    own().save_pretrained(tmp_path)
    loaded = cls.from_pretrained(tmp_path)
    assert isinstance(loaded, AdaFuseGenerationMixin)
    assert type(disable_adafuse(loaded)) is LlamaForCausalLM


def test_an_enabled_model_is_copied_and_pickled():
    import pickle

    main = enable_adafuse(copy.deepcopy(own()))
    for twin in (copy.deepcopy(main), copy.copy(main), pickle.loads(pickle.dumps(main))):
        assert type(twin) is type(main)
        assert torch.equal(twin.generate(**arguments()), main.generate(**arguments()))
        assert type(disable_adafuse(twin)) is LlamaForCausalLM
    assert isinstance(main, AdaFuseGenerationMixin)


# Assistants by name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("assistant")
    own("qwen3", "characters").save_pretrained(path)
    CHARS.save_pretrained(path)
    return path


@pytest.fixture
def loads(monkeypatch):
    """The names under which models are loaded."""
    seen, real = [], AutoModelForCausalLM.from_pretrained

    def load(name, *args, **kwargs):
        seen.append(str(name))
        return real(name, *args, **kwargs)

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", load)
    return seen


def test_an_assistant_by_name_is_loaded_once(folder, loads):
    expected = enable_adafuse(own()).generate(
        **arguments(assistant_models=[tiny_model("qwen3", "characters")], max_new_tokens=6)
    )
    main = enable_adafuse(own())
    given = arguments(assistant_models=[str(folder)], assistant_tokenizers=LEFT, max_new_tokens=6)
    for _ in range(2):
        assert torch.equal(main.generate(**given), expected)
    assert torch.equal(main.generate(**given | {"assistant_tokenizers": [CHARS]}), expected)
    assert loads == [str(folder)]
    enable_adafuse(main, [str(folder)], tokenizer=BYTES)
    assert torch.equal(main.generate(**inputs_of(BYTES), max_new_tokens=6, do_sample=False), expected)
    assert loads == [str(folder)]


def test_an_assistant_by_path_is_one_by_name(folder, loads):
    main = enable_adafuse(own())
    given = arguments(assistant_models=[folder], assistant_tokenizers=LEFT)
    assert main.generate(**given).shape[0] == 1
    assert loads == [str(folder)]


def test_a_tokenizer_is_found_by_the_name_of_a_loaded_model(folder):
    assistant = AutoModelForCausalLM.from_pretrained(folder)
    main = enable_adafuse(own())
    expected = main.generate(**arguments(assistant_models=[assistant], max_new_tokens=6))
    given = arguments(assistant_models=[assistant], assistant_tokenizers=LEFT, max_new_tokens=6)
    assert torch.equal(main.generate(**given), expected)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_folder_without_a_tokenizer_will_do_where_one_is_given(architecture, tmp_path):
    own(architecture, "characters").save_pretrained(tmp_path)
    main = enable_adafuse(own())
    expected = main.generate(**arguments(assistant_models=[tiny_model(architecture, "characters")]))
    assert torch.equal(main.generate(**arguments(assistant_models=[str(tmp_path)])), expected)
    fresh = enable_adafuse(own())
    given = arguments(assistant_models=[str(tmp_path)], assistant_tokenizers=LEFT)
    assert_refused(given, r"`assistant_tokenizers\[0\]` must be a tokenizer", main=fresh)


def test_a_name_that_is_nowhere_is_refused():
    given = arguments(assistant_models=["nobody/has-this-model"], assistant_tokenizers=LEFT)
    assert_refused(given, "nobody/has-this-model", form=False, error=(ValueError, OSError))
