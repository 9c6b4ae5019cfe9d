"""AdaFuse's settings of a call: where they come from, which place wins, and that bad ones are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from support.calls import BYTES, CHARS, LEFT, arguments, assert_refused, inputs_of, no_forward, own, state_of
from support.hosts import PROMPTS, ensemble
from support.tiny import eos_ids
from transformers import GenerationConfig

from hf_adafuse import AdaFuseConfig, AdaFuseOutput, enable_adafuse


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"max_words": 0}, "^`max_words` must be an integer of at least 1, but is 0. "),
        ({"max_wordz": 1}, r"^`adafuse_config` must be made of .*, but has 'max_wordz'\. Did you mean max_words\?"),
        ("on", "^`adafuse_config` must be an AdaFuseConfig, a dict, one of .*, True or False, but is 'on'"),
        (1, "^`adafuse_config` must be an AdaFuseConfig, a dict, one of .*, True or False, but is 1"),
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
    for value, meant in (
        (True, AdaFuseConfig.robust()),
        ("robust", AdaFuseConfig.robust()),
        (None, AdaFuseConfig.robust()),
        ({}, AdaFuseConfig()),
        ("paper", AdaFuseConfig()),
        (AdaFuseConfig().to_dict(), AdaFuseConfig()),
    ):
        expected = main.generate(**arguments(adafuse_config=meant, return_dict_in_generate=True))
        got = main.generate(**arguments(adafuse_config=value, return_dict_in_generate=True))
        assert isinstance(got, AdaFuseOutput) and torch.equal(got.sequences, expected.sequences)
    off = main.generate(**arguments(adafuse_config=False, return_dict_in_generate=True))
    assert not isinstance(off, AdaFuseOutput)
    plain = own().generate(**inputs_of(BYTES), max_new_tokens=3, do_sample=False)
    assert torch.equal(off.sequences, plain)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("assistant_tokenizers", [BYTES]),
        ("assistant_inputs", [inputs_of(BYTES)]),
        ("assistant_logits_processor", [[]]),
        ("max_batch_size", 4),
        ("on_answer", print),
    ],
)
def test_arguments_of_an_ensemble_are_refused_where_none_is_asked_for(name, value):
    """As where the assistants were forgotten: the text would be the main model's alone, without a word."""
    main, given = enable_adafuse(own()), inputs_of(BYTES) | {"max_new_tokens": 3, "do_sample": False}
    expected = own().generate(**given)
    match = f"^`{name}` must be left out where no ensemble is asked for, but is given"
    for asked in ({}, {"assistant_models": []}):
        with no_forward(main), pytest.raises(ValueError, match=match):
            main.generate(**given, **asked, **{name: value})
    for nothing in ({name: value, "adafuse_config": False}, {name: None}, {"assistant_inputs": []}):
        assert torch.equal(main.generate(**given, **nothing), expected)


def test_arguments_of_transformers_own_assisted_generation_stay_its_own():
    main, given = enable_adafuse(own()), inputs_of(BYTES) | {"max_new_tokens": 6, "do_sample": False}
    drafter, passes = own("gpt2", "characters"), []
    hook = drafter.register_forward_pre_hook(lambda *_: passes.append(1))
    other = {"assistant_model": drafter, "assistant_tokenizer": CHARS, "tokenizer": BYTES}
    try:
        assert torch.equal(main.generate(**given, **other), own().generate(**given)) and passes
    finally:
        hook.remove()


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


def test_the_config_comes_from_the_call_then_the_binding_then_the_generation_config():
    case = ensemble("llama/byte_level/0", max_word_tokens=3, prompts=PROMPTS[:1])
    _, ids, mask = case.main_ids()
    model = copy.deepcopy(case.models[0])
    wanted = {"max_words": 1, "num_branches": 2, "max_word_tokens": 2, "margin_threshold": 1.1}
    inputs = dict(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=6, return_dict_in_generate=True)
    ordinary = model.generate(**inputs)
    enable_adafuse(model, tokenizer=case.tokenizers[0])

    def shape(**kwargs):
        """(words, branches) of the first round, or None for an ordinary call."""
        output = model.generate(**inputs, **kwargs)
        if not isinstance(output, AdaFuseOutput):
            assert torch.equal(output.sequences, ordinary.sequences)
            return None
        return len(output.rounds[0][0].words), len(output.rounds[0][0].candidates)

    assert shape() is None
    passed = GenerationConfig(adafuse_config=wanted, eos_token_id=model.generation_config.eos_token_id)
    assert shape(generation_config=passed) == (1, 2)
    model.generation_config.adafuse_config = wanted
    assert shape() == (1, 2)
    call = {**wanted, "num_branches": 4}
    assert shape(adafuse_config=call) == (1, 4)
    assert shape(generation_config=passed, adafuse_config=AdaFuseConfig(**call)) == (1, 4)
    assert shape(adafuse_config=False) is None
    enable_adafuse(model, tokenizer=case.tokenizers[0], adafuse_config={**wanted, "num_branches": 3})
    assert shape() == (1, 3)
    assert shape(adafuse_config=call) == (1, 4)
    assert shape(adafuse_config=False, assistant_models=case.models, assistant_tokenizers=case.tokenizers) is None
    assert model.generation_config.adafuse_config == wanted and passed.adafuse_config == wanted
