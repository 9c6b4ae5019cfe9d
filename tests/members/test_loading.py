"""Assistants and tokenizers by name: loaded once, found by the model's own name, or refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.calls import BYTES, CHARS, FORM, LEFT, arguments, assert_refused, inputs_of, no_forward, own
from support.tiny import tiny_model
from transformers import AutoModelForCausalLM

from hf_adafuse import AdaFuseConfig, enable_adafuse
from hf_adafuse.members import loading


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
    enable_adafuse(main, [str(folder)], tokenizer=BYTES, adafuse_config=AdaFuseConfig())
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


@pytest.fixture
def tokenizer_loads(monkeypatch):
    """The names under which tokenizers are loaded."""
    seen, real = [], loading.AutoTokenizer.from_pretrained

    def load(name, *args, **kwargs):
        seen.append(str(name))
        return real(name, *args, **kwargs)

    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", load)
    return seen


@pytest.mark.parametrize("as_path", [str, Path], ids=["text", "path"])
def test_tokenizers_by_name_are_loaded_once(as_path, tmp_path, tokenizer_loads):
    folders = [tmp_path / "main", tmp_path / "assistant"]
    for tokenizer, folder in zip((BYTES, CHARS), folders, strict=True):
        tokenizer.save_pretrained(folder)
    main = enable_adafuse(own())
    expected = main.generate(**arguments(max_new_tokens=6))
    names = [as_path(folder) for folder in folders]
    for _ in range(2):
        given = arguments(tokenizer=names[0], assistant_tokenizers=[names[1]], max_new_tokens=6)
        assert torch.equal(main.generate(**given), expected)
    assert tokenizer_loads == list(map(str, folders))
    bound = enable_adafuse(own(), given["assistant_models"], [names[1]], names[0], AdaFuseConfig())
    assert torch.equal(bound.generate(**inputs_of(BYTES), max_new_tokens=6, do_sample=False), expected)
    stopped = main.generate(**arguments(tokenizer=names[0], assistant_tokenizers=[names[1]], stop_strings=["zqz"]))
    assert torch.equal(stopped, main.generate(**arguments()))
    assert tokenizer_loads == list(map(str, folders))


@pytest.mark.parametrize("role", ["tokenizer", "assistant_tokenizers"])
def test_a_tokenizers_name_that_does_not_load_is_refused(role):
    name = "nobody/has-this-tokenizer"
    given = arguments(**{role: name if role == "tokenizer" else [name]})
    main = enable_adafuse(own())
    argument = role if role == "tokenizer" else rf"{role}\[0\]"
    with no_forward(main), pytest.raises(ValueError, match=f"^`{argument}` must be a tokenizer, .*{name}") as caught:
        main.generate(**given)
    assert re.match(FORM, str(caught.value), re.DOTALL)
