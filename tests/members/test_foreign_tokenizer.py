"""A tokenizer that is not the model's own is warned of before the prompts are read: once, and by one short pass."""

from __future__ import annotations

import copy
import itertools
import random
import warnings

import pytest
import torch
from tiny import TOKENIZERS, tiny_model
from toys import run, toy, word_tokenizer

from hf_adafuse import AdaFuseConfig
from hf_adafuse.members.participants import _ENGLISH, Participant

pytestmark = pytest.mark.usefixtures("looks_at_tokenizers")


def reader(seed):
    """A model that knows which word follows which in English, and a tokenizer with the words in an order of its own."""
    words = _ENGLISH.split()
    order = list(dict.fromkeys(words))
    random.Random(seed).shuffle(order)
    tokenizer = word_tokenizer(order)
    follows = {word: {} for word in order}
    for word, after in itertools.pairwise(words):
        follows[word][after] = 0.99 / len({b for a, b in itertools.pairwise(words) if a == word})
    return toy(tokenizer, {word: row for word, row in follows.items() if row}), tokenizer


def warnings_of(*arguments):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(*arguments, AdaFuseConfig(), prompt="The sun", max_new_tokens=2)
    return [str(one.message) for one in caught if "belong together" in str(one.message)]


def test_a_model_with_the_tokenizer_of_another_is_named_once():
    (main, own), (other, foreign) = reader(1), reader(2)
    assert warnings_of([(main, own), (other, foreign)]) == []
    (message,) = warnings_of([(main, own), (other, own)])
    assert message.startswith("assistant 1 (Toy) and its tokenizer (")
    assert warnings_of([(main, own), (other, own)]) == []


def passes_of(model, tokenizer):
    """How many forward passes the look takes."""
    before = model.forwards
    Participant("the main model", model, tokenizer).warn_of_foreign_tokenizer()
    return model.forwards - before


def test_what_was_loaded_by_one_name_is_not_looked_at():
    (model, own), (_, foreign) = reader(1), reader(2)
    assert passes_of(model, own) == 1 and passes_of(model, own) == 0
    model.name_or_path = foreign.name_or_path = "org/model"
    assert passes_of(model, foreign) == 0
    foreign.name_or_path = "org/another"
    with pytest.warns(UserWarning, match=r"\(org/another\) do not seem .*: under org/model a plain"):
        assert passes_of(model, foreign) == 1


def test_a_model_that_has_learned_nothing_is_as_good_as_chance():
    config = copy.deepcopy(tiny_model("llama", "byte_level").config)
    config.initializer_range = 0.02  # as models usually begin
    torch.manual_seed(0)
    model = type(tiny_model("llama", "byte_level"))(config).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Participant("the main model", model, TOKENIZERS["byte_level"]()).warn_of_foreign_tokenizer()
