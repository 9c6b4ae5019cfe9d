"""A tokenizer that is not the model's own is warned of before the prompts are read: once, and by one short pass."""

from __future__ import annotations

import copy
import itertools
import random
import warnings

import pytest
import torch
from support.tiny import TOKENIZERS, tiny_model
from support.toys import run, toy, word_tokenizer

from hf_adafuse import AdaFuseConfig
from hf_adafuse.members.model_handle import _ENGLISH, ModelHandle


def reader(seed):
    """A model that knows which word follows which in English, and a tokenizer with the words in an order of its own."""
    words = _ENGLISH.split()
    order = list(dict.fromkeys(words))
    random.Random(seed).shuffle(order)
    tokenizer = word_tokenizer(order)
    follows = {word: {} for word in order}
    for word, after in itertools.pairwise(words):
        follows[word][after] = 0.99 / len({b for a, b in itertools.pairwise(words) if a == word})
    model = toy(tokenizer, {word: row for word, row in follows.items() if row})
    model.name_or_path = tokenizer.name_or_path = f"org/reader-{seed}"
    return model, tokenizer


def warnings_of(*arguments):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(*arguments, AdaFuseConfig(), prompt="The sun", max_new_tokens=2)
    return [str(one.message) for one in caught if "belong together" in str(one.message)]


def test_a_model_with_the_tokenizer_of_another_is_named_once():
    (main, own), (other, foreign) = reader(1), reader(2)
    assert warnings_of([(main, own), (other, foreign)]) == []
    (message,) = warnings_of([(main, own), (other, own)])
    assert message.startswith("assistant 1 (org/reader-2) and its tokenizer (org/reader-1)")
    assert warnings_of([(main, own), (other, own)]) == []


def passes_of(model, tokenizer):
    """How many forward passes the look takes."""
    before = model.forwards
    ModelHandle("the main model", model, tokenizer).warn_of_foreign_tokenizer()
    return model.forwards - before


def test_a_pair_is_looked_at_once_and_only_where_it_was_loaded_by_two_names():
    (model, own), (_, foreign) = reader(1), reader(2)
    assert passes_of(model, own) == 0
    own.name_or_path = "org/fine-tune"
    assert passes_of(model, own) == 1 and passes_of(model, own) == 0
    foreign.name_or_path = ""
    assert passes_of(model, foreign) == 0
    foreign.name_or_path = "org/another"
    with pytest.warns(UserWarning, match=r"\(org/another\) do not seem .*: under org/reader-1 a plain"):
        assert passes_of(model, foreign) == 1


def test_a_model_that_has_learned_nothing_is_as_good_as_chance():
    config = copy.deepcopy(tiny_model("llama", "byte_level").config)
    config.initializer_range = 0.02  # as models usually begin
    torch.manual_seed(0)
    model = type(tiny_model("llama", "byte_level"))(config).eval()
    tokenizer = copy.deepcopy(TOKENIZERS["byte_level"]())
    model.name_or_path, tokenizer.name_or_path = "org/model", "org/tokenizer"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ModelHandle("the main model", model, tokenizer).warn_of_foreign_tokenizer()
