"""Assistants, their tokenizers and weights: bad ones are refused before the first forward pass, by name."""

from __future__ import annotations

import re

import pytest
import torch
from support.calls import (
    BYTES,
    CHARS,
    FORM,
    LEFT,
    arguments,
    assert_refused,
    inputs_of,
    no_forward,
    own,
    state_of,
    state_of_tokenizer,
)
from support.tiny import tiny_model
from transformers import AutoModelForCausalLM

from hf_adafuse import AdaFuseConfig, enable_adafuse
from hf_adafuse.call.arguments import distinct_names

pytestmark = pytest.mark.fast


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


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("assistant_models", 3, "`assistant_models` must be a list, but is 3"),
        ("assistant_models", {"a": 1}, "`assistant_models` must be a list, but is {'a': 1}"),
        ("assistant_tokenizers", 3, "`assistant_tokenizers` must be a list, but is 3"),
        ("assistant_tokenizers", "name", "`assistant_tokenizers` must be a list, but is 'name'"),
        ("assistant_tokenizers", CHARS, "`assistant_tokenizers` must be a list, but is a tokenizer"),
        ("assistant_tokenizers", [3], r"`assistant_tokenizers\[0\]` must be a tokenizer or its name, but is 3"),
        (
            "assistant_tokenizers",
            [len],
            r"`assistant_tokenizers\[0\]` must be a tokenizer or its name, but is <built-in",
        ),
        ("assistant_inputs", 3, "`assistant_inputs` must be a list, but is a int"),
        ("assistant_inputs", inputs_of(CHARS), "`assistant_inputs` must be a list, but is a dict"),
        ("assistant_inputs", torch.tensor([[5]]), "`assistant_inputs` must be a list, but is a Tensor"),
        ("tokenizer", 3, "`tokenizer` must be a tokenizer or its name, but is 3"),
        ("tokenizer", torch.nn.Linear(1, 1), r"`tokenizer` must be a tokenizer or its name, but is Linear\("),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_other_types_are_refused(name, value, match):
    main, given = enable_adafuse(own()), arguments(**{name: value})
    with no_forward(main, tiny_model("gpt2", "characters")), pytest.raises(ValueError, match=f"^{match}") as caught:
        main.generate(**given)
    assert re.match(FORM, str(caught.value), re.DOTALL), str(caught.value)


@pytest.mark.parametrize("name", ["assistant_models", "assistant_tokenizers", "tokenizer"])
def test_other_types_are_not_bound(name):
    given = {
        "assistant_models": [tiny_model("gpt2", "characters")],
        "assistant_tokenizers": [CHARS],
        "tokenizer": BYTES,
    }
    with pytest.raises(ValueError, match=f"^`{name}` must be "):
        enable_adafuse(own(), **given | {name: 3})


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["org/llama", "/models/gpt"], ["llama", "gpt"]),
        (["/a/final", "/b/final"], ["a/final", "b/final"]),
        (["x/a/final", "x/b/final", "y/b/last"], ["a/final", "b/final", "b/last"]),
        (["/a/final", "/a/final"], ["final", "final"]),
        (["", "a"], ["", "a"]),
    ],
)
def test_names_that_tell_members_apart(paths, names):
    assert distinct_names(paths) == names
