"""Each member reads a chat by its own template: `chat_inputs`, and a warning where that was forgotten."""

from __future__ import annotations

import copy
import logging

import numpy
import pytest
import torch
from support.chats import (
    CHATS,
    LONGER,
    PLAIN,
    PREFILLED,
    QUESTION,
    by_hand,
    decode,
    direct,
    ensemble,
    members,
    propagating,
    templated,
    unpadded,
)
from support.tiny import TOKENIZERS, tiny_model
from transformers.utils.logging import warning_once

from hf_adafuse import chat_inputs, enable_adafuse, text_inputs


@pytest.mark.parametrize("main", ["byte_level", "sentencepiece"])
def test_chat_inputs_are_each_members_own(main):
    pair = members(main)
    tokenizers = [tokenizer for _, tokenizer in pair]
    inputs = chat_inputs(QUESTION, tokenizers)
    expected = by_hand(pair, QUESTION)
    assert inputs["input_ids"].tolist() == expected["input_ids"].tolist()
    assert inputs["assistant_inputs"][0]["input_ids"].tolist() == expected["assistant_inputs"][0]["input_ids"].tolist()
    texts = [
        tokenizers[0].decode(inputs["input_ids"][0]),
        tokenizers[1].decode(inputs["assistant_inputs"][0].input_ids[0]),
    ]
    assert ["<|eot|>" in texts[0], "[ask]" in texts[1]] == [main == "byte_level"] * 2
    assert direct(pair, **inputs) == direct(pair, **expected)


def test_chat_inputs_of_a_batch_are_padded_on_the_left():
    pair = members()
    inputs = chat_inputs(CHATS, [tokenizer for _, tokenizer in pair])
    for k, given in enumerate([inputs, *inputs["assistant_inputs"]]):
        for chat, ids, mask in zip(CHATS, given["input_ids"], given["attention_mask"], strict=True):
            row = pair[k][1].apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
            assert ids.tolist()[-len(row) :] == row
            assert mask.tolist() == [0] * (len(ids) - len(row)) + [1] * len(row)
    (model, tokenizer), _ = pair
    output = enable_adafuse(model).generate(
        **inputs, **ensemble(pair), tokenizer=tokenizer, max_new_tokens=6, do_sample=False
    )
    width = inputs["input_ids"].shape[1]
    rows = [unpadded(row, tokenizer) for row in output[:, width:].tolist()]
    assert rows == [direct(pair, **by_hand(pair, chat)) for chat in CHATS]


def test_chat_inputs_take_what_templates_take():
    tokenizers = [tokenizer for _, tokenizer in members()]
    tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
    inputs = chat_inputs(QUESTION, tokenizers, tools=[tool], documents=[{"title": "a"}, {"title": "b"}], mood=" gladly")
    text = tokenizers[0].decode(inputs["input_ids"][0])
    assert "[1 tools][2 papers]" in text
    assert tokenizers[1].decode(inputs["assistant_inputs"][0]["input_ids"][0]).endswith(" gladly")
    closed = chat_inputs(QUESTION, tokenizers, add_generation_prompt=False)
    assert tokenizers[0].decode(closed["input_ids"][0]).endswith("Peru<|end|>")


@pytest.mark.parametrize(
    ("options", "ending"),
    [
        ({}, "<|eot|>assistant: The capital of Peru is"),
        ({"continue_final_message": True}, "<|eot|>assistant: The capital of Peru is"),
        ({"continue_final_message": False}, "is<|end|><|eot|>assistant: "),
        ({"add_generation_prompt": True}, "is<|end|><|eot|>assistant: "),
        ({"add_generation_prompt": False, "continue_final_message": False}, "The capital of Peru is<|end|>"),
    ],
)
def test_chat_inputs_continue_a_prefilled_answer(options, ending):
    tokenizers = [tokenizer for _, tokenizer in members()]
    inputs = chat_inputs(PREFILLED, tokenizers, **options)
    assert tokenizers[0].decode(inputs["input_ids"][0]).endswith(ending)


def refusing():
    return "{{ raise_exception('no system role here') }}"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda toks: chat_inputs(QUESTION, [TOKENIZERS["unigram"]()] * 2),
            r"`tokenizers\[0\]` must have a chat template, or another member's must",
        ),
        (
            lambda toks: chat_inputs(QUESTION, [toks[0], TOKENIZERS["unigram"]()], tools=[{"name": "look"}]),
            r"`tokenizers\[1\]` must have a chat template for `tools`",
        ),
        (
            lambda toks: chat_inputs(
                [{"role": "user", "content": [{"type": "image"}]}], [TOKENIZERS["unigram"](), toks[0]]
            ),
            r"`tokenizers\[0\]` must have a chat template for a message of type 'image'",
        ),
        (lambda toks: chat_inputs(QUESTION, toks[0]), "`tokenizers` must be a list"),
        (lambda toks: chat_inputs(QUESTION, []), "`tokenizers` must be a list"),
        (lambda toks: chat_inputs(QUESTION, numpy.array([1, 2])), "`tokenizers` must be a list .* but is ndarray"),
        (lambda toks: chat_inputs(QUESTION, [toks[0], 5]), r"`tokenizers\[1\]` must be a tokenizer, but is 5"),
        (lambda toks: text_inputs("a", [None]), r"`tokenizers\[0\]` must be a tokenizer, but is None"),
        (lambda toks: chat_inputs([{"role": None}], toks), "must be messages with a `role`"),
        (
            lambda toks: chat_inputs([{"role": "user", "content": [5]}], [toks[0], TOKENIZERS["unigram"]()]),
            r"`tokenizers\[1\]` must have a chat template for the part 5 of a message",
        ),
        *[
            (lambda toks, name=name, value=value: chat_inputs(QUESTION, toks, **{name: value}), f"`{name}` must be ")
            for name in ("tools", "documents", "add_generation_prompt", "tokenize", "padding", "max_length")
            for value in (5, torch.tensor([1, 2]), numpy.array(["a", "b"]))
        ],
        *[
            (lambda toks, name=name, value=value: chat_inputs(QUESTION, toks, **{name: value}), f"`{name}` must be ")
            for name in ("continue_final_message", "sanitize_control_tokens", "return_tensors", "truncation")
            for value in (5, torch.tensor([1, 2]), numpy.array(["a", "b"]))
        ],
        (lambda toks: chat_inputs([], toks), "`messages` must be a list of messages"),
        (lambda toks: chat_inputs("hello", toks), "`messages` must be a list of messages"),
        (lambda toks: chat_inputs(["hello"], toks), "has 'hello' as conversation 0"),
        (lambda toks: chat_inputs([QUESTION, []], toks), r"has \[\] as conversation 1"),
        (lambda toks: chat_inputs([{"content": "hello"}], toks), "must be messages with a `role`"),
        (
            lambda toks: chat_inputs(QUESTION, toks, add_generation_prompt=True, continue_final_message=True),
            "`add_generation_prompt` must be False with `continue_final_message`",
        ),
        (
            lambda toks: chat_inputs(QUESTION, [toks[0], templated("byte_level", refusing())]),
            r"that of `tokenizers\[1\]` .*refuses them: no system role here",
        ),
    ],
)
def test_chat_inputs_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call([tokenizer for _, tokenizer in members()])


@pytest.mark.parametrize("index", [0, 1])
def test_a_member_without_a_template_reads_plain_text_and_that_is_said_once(index, caplog):
    """A base model beside an instruct model."""
    pair = members()
    pair[index] = (pair[index][0], TOKENIZERS["sentencepiece"]())
    tokenizers = [tokenizer for _, tokenizer in pair]
    warning_once.cache_clear()
    with caplog.at_level(logging.WARNING), propagating():
        made = [chat_inputs(chat, tokenizers) for chat in (LONGER, PREFILLED)]
    (message,) = {record.getMessage() for record in caplog.records}
    assert message.startswith(f"The tokenizer of member {index} (") and "has no chat template" in message
    expected = [
        "### User:\nwas there a cat\n\n### Assistant:\nthere was a big cat\n\n### User:\nshe was there\n\n"
        "### Assistant:\n",
        "### User:\nwhat is the capital of Peru\n\n### Assistant:\nThe capital of Peru is",
    ]
    for inputs, text in zip(made, expected, strict=True):
        own = [inputs, *inputs["assistant_inputs"]][index]["input_ids"][0].tolist()
        assert own == tokenizers[index](text).input_ids
    other = pair[1 - index][1].apply_chat_template(LONGER, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert [made[0], *made[0]["assistant_inputs"]][1 - index]["input_ids"][0].tolist() == other


def test_parts_of_a_message_are_plain_text_one_after_the_other():
    chat = [{"role": "user", "content": [{"type": "text", "text": "was there"}, {"type": "text", "text": " a cat"}]}]
    tokenizers = [templated("byte_level", "{% for m in messages %}{{ m['content'][0]['text'] }}{% endfor %}")]
    tokenizers.append(TOKENIZERS["sentencepiece"]())
    inputs = chat_inputs(chat, tokenizers)
    expected = "### User:\nwas there a cat\n\n### Assistant:\n"
    assert inputs["assistant_inputs"][0]["input_ids"][0].tolist() == tokenizers[1](expected).input_ids


def warned(caplog, pair, inputs, times=2) -> list[str]:
    warning_once.cache_clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING), propagating():
        for _ in range(times):
            decode(pair, 2, inputs)
    return [r.getMessage() for r in caplog.records if "chat_inputs" in r.getMessage()]


@pytest.mark.parametrize("main", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("chat", [QUESTION, LONGER], ids=["one turn", "several"])
def test_a_chat_without_the_assistants_template_warns_once(main, chat, caplog):
    pair = members(main)
    inputs = by_hand(pair, chat)
    assert warned(caplog, pair, inputs) == []
    inputs.pop("assistant_inputs")
    (message,) = warned(caplog, pair, inputs)
    assert "assistant 1" in message
    assert "`hf_adafuse.chat_inputs(messages, [tokenizer, *assistant_tokenizers])`" in message
    assert "adafuse-text-generation" in message


@pytest.mark.parametrize(
    "case", ["a plain prompt", "no template of the assistant's", "no template of the main", "the same tokenizer"]
)
def test_what_is_no_lost_chat_does_not_warn(case, caplog):
    pair = members()
    inputs = by_hand(pair, QUESTION)
    inputs.pop("assistant_inputs")
    if case == "a plain prompt":
        inputs = pair[0][1]("user: was there a cat", return_tensors="pt", return_token_type_ids=False)
    elif case == "no template of the assistant's":
        pair[1] = (pair[1][0], TOKENIZERS["sentencepiece"]())
    elif case == "no template of the main":
        pair[0] = (pair[0][0], TOKENIZERS["byte_level"]())
    else:
        pair[1] = (tiny_model("gpt2", "byte_level", 1), copy.deepcopy(pair[0][1]))
    assert warned(caplog, pair, inputs) == []


def test_the_same_vocabulary_with_another_template_warns(caplog):
    pair = members()
    pair[1] = (tiny_model("gpt2", "byte_level", 1), templated("byte_level", PLAIN.replace("ask", "put")))
    inputs = by_hand(pair, QUESTION)
    inputs.pop("assistant_inputs")
    assert len(warned(caplog, pair, inputs)) == 1
