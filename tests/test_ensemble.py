"""An ensemble as one object: what it takes as prompts, and what it gives back."""

from __future__ import annotations

import copy
import pickle
import pydoc

import numpy
import pandas
import pytest
from datasets import Dataset
from support.chats import LONGER, QUESTION, by_hand, direct, members

import hf_adafuse
from hf_adafuse import AdaFuseConfig, AdaFuseEnsemble, AdaFuseRoundsBatch, demo

PERU = "Question: What is the capital of Peru?\nAnswer:"


@pytest.fixture
def ensemble():
    return AdaFuseEnsemble(demo.load_pair())


def test_one_text_is_one_prompt(ensemble):
    rounds = ensemble.rounds(PERU, max_new_tokens=6)
    assert isinstance(rounds, AdaFuseRoundsBatch)
    assert [one.text for one in rounds] == [" Lima"] == ensemble.texts(PERU, max_new_tokens=6)
    assert rounds[0].finish_reason == "stop"
    assert str(rounds).startswith("Members  0: the main model")
    assert rounds.to_html("Peru").count("<title>Peru</title>") == 1
    assert ensemble.encode(PERU)["input_ids"].tolist() == ensemble.encode([PERU])["input_ids"].tolist()


def test_a_prompt_of_a_chat_is_a_message_or_a_conversation():
    pair = members()
    chat = AdaFuseEnsemble(pair, AdaFuseConfig(max_word_tokens=4))
    main = pair[0][1]
    texts = [main.decode(direct(pair, **by_hand(pair, one)), skip_special_tokens=True) for one in (QUESTION, LONGER)]
    for prompts in (QUESTION[0]["content"], QUESTION, [QUESTION], [QUESTION[0]["content"]]):
        assert chat.texts(prompts, chat=True, max_new_tokens=6) == texts[:1]
    assert chat.texts([QUESTION[0]["content"], LONGER], chat=True, max_new_tokens=6) == texts


@pytest.mark.parametrize(
    ("prompts", "chat", "message"),
    [
        ([], False, r"`prompts` must be a text or a list of texts, but is \[\]"),
        (None, True, "`prompts` must be a text or a list of texts, but is None"),
        ([PERU, 7], False, "`prompts` must be texts, but hold 7. Pass texts."),
        (QUESTION, False, "`prompts` must be texts, but hold {'role': .* Pass `chat=True`."),
        ([PERU, 7], True, "`prompts` must be texts or conversations, but hold 7"),
    ],
)
def test_what_is_no_prompt_is_refused(ensemble, prompts, chat, message):
    with pytest.raises(ValueError, match=message):
        ensemble.rounds(prompts, chat=chat)


def test_the_public_names_are_found_by_completion_and_help():
    assert set(hf_adafuse.__all__) <= set(dir(hf_adafuse))
    assert {name for name in dir(hf_adafuse) if not name.startswith("_")} == set(hf_adafuse.__all__)
    first = hf_adafuse.__doc__.partition("adapters")[0]
    assert all(
        name in first for name in ("AdaFuseEnsemble(", "enable_adafuse(", "adafuse_config=", "hf-adafuse generate")
    )
    shown = pydoc.render_doc(hf_adafuse, renderer=pydoc.plaintext)
    for name in ("class AdaFuseEnsemble", "class AdaFuseConfig", "enable_adafuse(model", "chat_inputs(messages"):
        assert name in shown


def test_a_pickled_ensemble_is_the_same():
    """`datasets.map` tells ensembles apart by what pickle makes of them, and sends them to other processes so."""
    first, second = (
        AdaFuseEnsemble(demo.load_pair(), {"preset": "robust", "model_weights": weights})
        for weights in [(1, 9), (9, 1)]
    )
    assert first.handles and pickle.dumps(first) != pickle.dumps(second)
    prompts = ["kim has 3 red apples", PERU]
    for twin in (pickle.loads(pickle.dumps(first)), copy.deepcopy(first)):
        assert [str(one) for one in twin.rounds(prompts, max_new_tokens=4)] == [
            str(one) for one in first.rounds(prompts, max_new_tokens=4)
        ]
        (expected,), (found,) = (one.score(PERU, [" Lima"])[0] for one in (first, twin))
        assert found.log_likelihoods == pytest.approx(expected.log_likelihoods, abs=1e-4)


def test_texts_of_an_ensemble_that_is_turned_off_are_refused(ensemble):
    off = AdaFuseEnsemble(demo.load_pair(), adafuse_config=False)
    for one, given in [(ensemble, {"adafuse_config": False}), (off, {})]:
        ids = one.generate(PERU, max_new_tokens=4, **given)
        assert one.tokenizers[0].decode(ids[0]).startswith(PERU)
        with pytest.raises(
            ValueError, match="`adafuse_config` must be settings where rounds are asked for, but is False"
        ):
            one.texts(PERU, max_new_tokens=4, **given)
    assert off.texts(PERU, max_new_tokens=6, adafuse_config=True) == [" Lima"]


def test_options_for_loading_are_refused_where_nothing_is_loaded():
    for make in (AdaFuseEnsemble, hf_adafuse.AdaFusePredictor):
        with pytest.raises(ValueError, match="`shards` must be left out where all members are loaded"):
            make(demo.load_pair(), shards=2)


def test_columns_are_sequences_of_texts(ensemble):
    questions = [PERU, PERU.replace("Peru", "Norway")]
    expected = ensemble.texts(questions, max_new_tokens=6)
    for column in (numpy.array(questions), pandas.Series(questions), Dataset.from_dict({"q": questions})["q"]):
        assert ensemble.texts(column, max_new_tokens=6) == expected
        assert len(ensemble.generate(column, max_new_tokens=2)) == 2
    for wrong in (numpy.array([1, 2]), b"ab", {"a": "b"}, pandas.Series([], dtype=str), pandas.DataFrame({"a": ["b"]})):
        with pytest.raises(ValueError, match="`prompts` must be"):
            ensemble.texts(wrong)
