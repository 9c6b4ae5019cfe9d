"""An ensemble as one object: what it takes as prompts, and what it gives back."""

from __future__ import annotations

import copy
import functools
import pickle
import pydoc
from decimal import Decimal

import numpy
import pandas
import pytest
import torch
from datasets import Dataset
from support.calls import no_forward
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
        ([[PERU]], False, r"`prompts` must be texts, but hold \['Question.* Pass texts\."),
        ([QUESTION], False, r"`prompts` must be texts, but hold \[{'role': .* Pass `chat=True`\."),
        ([None], False, "`prompts` must be texts, but hold None"),
        ([None], True, "`prompts` must be texts or conversations, but hold None"),
        ([[None]], True, "`prompts` must be of messages with a `role`, but hold None"),
        ([{"role": 5, "content": ""}], True, "`prompts` must be of messages with a `role`, but hold {'role': 5"),
        ([{"role": "assistant", "tool_calls": 5}], True, "`tool_calls` of a message must be a list, but is 5"),
        (torch.tensor(1), False, r"`prompts` must be a text or a list of texts, but is tensor\(1\)"),
        (numpy.array("a"), True, "`prompts` must be a text or a list of texts, but is array"),
    ],
)
def test_what_is_no_prompt_is_refused(ensemble, prompts, chat, message):
    with pytest.raises(ValueError, match=message):
        ensemble.rounds(prompts, chat=chat)


@pytest.mark.parametrize(
    ("member", "shown"),
    [
        (5, "5"),
        (None, "None"),
        ((), "of 0 parts"),
        (("a",), "of 1 parts"),
        (("a", "b", 5), "of 3 parts"),
        ((5, "a"), "5"),
        ({"model": "a"}, "{'model': 'a'}"),
    ],
    ids=repr,
)
def test_what_is_no_member_is_refused_before_any_is_loaded(member, shown):
    for make in (AdaFuseEnsemble, functools.partial(hf_adafuse.AdaFusePredictor, lazy=True)):
        with pytest.raises(ValueError, match=r"^`members\[1\]` must be a model, .* or a pair .*, but is ") as error:
            make(["never-loaded", member])
        assert f", but is {shown}. Write" in str(error.value)


# Arguments that cannot be used, with the beginning of the message.
ODD = [
    ({"template_kwargs": 5}, "`template_kwargs` must be a dict of names and values, but is 5"),
    ({"template_kwargs": {1: 2}}, "`template_kwargs` must be a dict of names and values, but is {1: 2}"),
    ({"template_kwargs": {"messages": []}}, "`template_kwargs` must not name what the call has already, but has 'mess"),
    ({"template_kwargs": {"documents": 5}}, "`documents` must be a list, but is 5"),
    ({"template_kwargs": {"add_generation_prompt": "x"}}, "`add_generation_prompt` must be True or False, but is 'x'"),
    ({"template_kwargs": {"continue_final_message": 5}}, "`continue_final_message` must be True, False or .* but is 5"),
    ({"thinking": numpy.array(["main", "off"])}, '`thinking` must be "apart", "main" or "off", but is array'),
    ({"tools": numpy.array(["a", "b"])}, "`tools` must be a list of tools, but is array"),
    ({"chat": torch.tensor([1, 0])}, "`chat` must be True or False, but is tensor|`prompts` must be texts"),
]
ODD_OF_ALL = [
    ({"max_time": "x"}, "`max_time` must be a number of seconds, but is 'x'"),
    ({"max_time": float("nan")}, "`max_time` must be a number of seconds, but is nan"),
    ({"on_answer": 5}, "`on_answer` must be a function of a row and its rounds, but is 5"),
    ({"return_dict_in_generate": False}, "`return_dict_in_generate` must be True where rounds are .*, but is False"),
    ({"return_dict_in_generate": None}, "`return_dict_in_generate` must be True where rounds are .*, but is None"),
    ({"assistant_models": torch.tensor([1, 2])}, "`assistant_models` must be a list, but is tensor"),
    ({"assistant_tokenizers": numpy.array([[1, 2]])}, "`assistant_tokenizers` must be a list, but is array"),
    ({"assistant_inputs": torch.tensor([1, 2])}, "`assistant_inputs` must be a list, but is a Tensor"),
    ({"tokenizer": torch.tensor([1, 2])}, "`tokenizer` must be a tokenizer or its name, but is tensor"),
]


@pytest.mark.parametrize(
    ("given", "message"),
    [*ODD, *ODD_OF_ALL, *(({"chat": False, **given}, message) for given, message in ODD_OF_ALL)],
    ids=lambda value: str(value)[:60],
)
def test_arguments_that_cannot_be_used_are_refused_before_the_first_pass(given, message):
    pair = members()
    chat = AdaFuseEnsemble(pair, AdaFuseConfig(max_word_tokens=4))
    with no_forward(*(model for model, _ in pair)), pytest.raises(ValueError, match=f"^(?:{message})"):
        chat.texts("Who wrote Faust?", **{"chat": True, "max_new_tokens": 2, **given})


def test_switches_of_templates_go_to_the_templates():
    """`thinking` is a variable of some templates, and an argument of the call."""
    chat = AdaFuseEnsemble(members(), AdaFuseConfig(max_word_tokens=4))
    plain = chat.texts("Who wrote Faust?", chat=True, max_new_tokens=4)
    given = {"thinking": False, "end": 1, "members": 2}
    assert chat.texts("Who wrote Faust?", chat=True, max_new_tokens=4, template_kwargs=given) == plain


def test_other_methods_refuse_odd_arguments_too(ensemble):
    for call, message in [
        (lambda: ensemble.generate(torch.tensor([1, 2])), r"`inputs` must be ids of shape .*, but is of shape \(2,\)"),
        (lambda: ensemble.generate({}), r"`inputs` must be prompts, or have their `input_ids`, but has \[\]"),
        (lambda: ensemble.output({1: 2}), r"`inputs` must be prompts, or have their `input_ids`, but has \[1\]"),
        (lambda: ensemble.encode(PERU, chat=5), "`chat` must be True or False, but is 5"),
        (
            lambda: ensemble.score(PERU, [" Lima"], on_scores=5),
            "`on_scores` must be a function of a row and its scores",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


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


def test_switches_and_seconds_may_be_of_other_libraries():
    ensemble = AdaFuseEnsemble(members())
    expected = ensemble.texts([QUESTION], chat=True, max_new_tokens=3)
    assert ensemble.texts([QUESTION], chat=numpy.True_, max_new_tokens=3) == expected
    assert ensemble.texts([QUESTION], chat=True, max_new_tokens=3, max_time=Decimal(60)) == expected
