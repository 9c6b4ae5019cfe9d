"""`AdaFusePipeline`: token for token what `generate()` gives, each member reading its own chat template."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
from support.chats import (
    CHATS,
    CONFIG,
    LONGER,
    MARKED,
    PREFILLED,
    QUESTION,
    by_hand,
    direct,
    direct_prompt,
    ensemble,
    members,
    new_ids,
    propagating,
    templated,
)
from support.tiny import TOKENIZERS, tiny_model
from transformers import pipeline
from transformers.utils.logging import warning_once

import hf_adafuse
from hf_adafuse import AdaFusePipeline, chat_inputs, enable_adafuse


def adafuse_pipeline(pair, **more):
    (model, tokenizer), _ = pair
    return pipeline("adafuse-text-generation", model=model, tokenizer=tokenizer, **ensemble(pair), **more)


@pytest.mark.parametrize("main", ["byte_level", "sentencepiece"])
def test_a_chat_is_rendered_by_each_members_own_template(main, caplog):
    pair = members(main)
    warning_once.cache_clear()
    with caplog.at_level(logging.WARNING), propagating():
        pipe = adafuse_pipeline(pair, max_new_tokens=6)  # enables the model, which knows no tokenizer, itself
        assert isinstance(pipe, AdaFusePipeline)
        for chat in CHATS:
            inputs = by_hand(pair, chat)
            expected = direct(pair, **inputs)
            assert new_ids(pipe(chat, return_tensors=True), inputs["input_ids"][0]) == expected
            (record,) = pipe(chat)
            answer = pair[0][1].decode(expected, skip_special_tokens=True)
            assert record["generated_text"] == [*chat, {"role": "assistant", "content": answer}]
    assert "chat_inputs" not in caplog.text
    # The main model's template alone would have given another answer.
    foreign = direct(pair, **{**by_hand(pair, LONGER), "assistant_inputs": None})
    assert foreign != direct(pair, **by_hand(pair, LONGER))


def test_chats_in_a_batch_and_from_a_generator():
    pair = members()
    pipe = adafuse_pipeline(pair, max_new_tokens=6)
    expected = [pipe(chat) for chat in CHATS]
    assert pipe(CHATS, batch_size=2) == expected
    assert list(pipe((chat for chat in CHATS), batch_size=3)) == expected


def test_a_conversation_of_several_turns():
    pair = members()
    pipe = adafuse_pipeline(pair, max_new_tokens=6)
    chat = pipe(QUESTION)[0]["generated_text"]
    chat = [*chat, {"role": "user", "content": "was it signed"}]
    answer = pipe(chat)[0]["generated_text"][-1]
    expected = direct(pair, new=6, **by_hand(pair, chat))
    assert answer == {"role": "assistant", "content": pair[0][1].decode(expected, skip_special_tokens=True)}


@pytest.mark.parametrize("main", ["byte_level", "sentencepiece"])
def test_a_prefilled_answer_is_continued(main):
    pair = members(main)
    pipe = adafuse_pipeline(pair, max_new_tokens=6)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    inputs = by_hand(pair, PREFILLED, **options)
    expected = direct(pair, **inputs)
    assert new_ids(pipe(PREFILLED, return_tensors=True), inputs["input_ids"][0]) == expected
    whole = pair[0][1].decode(inputs["input_ids"][0].tolist() + expected, skip_special_tokens=True)
    text = pipe(PREFILLED)[0]["generated_text"]
    assert text[:-1] == QUESTION
    assert whole.endswith(text[-1]["content"])  # with the space before the first new word, which some decoders drop
    assert text[-1]["content"].startswith("The capital of Peru is")
    opened = by_hand(pair, PREFILLED)
    records = pipe(PREFILLED, continue_final_message=False, return_tensors=True)
    assert new_ids(records, opened["input_ids"][0]) == direct(pair, **opened)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "new"])
@pytest.mark.parametrize("seed", [0, 2])
def test_at_the_start_of_a_text_there_is_no_space_to_add(seed, whole):
    pair = [
        (copy.copy(tiny_model("gpt2", "sentencepiece", seed)), TOKENIZERS["sentencepiece"]()),
        (tiny_model("qwen3", "characters", 1), TOKENIZERS["characters"]()),
    ]
    options = dict(max_new_tokens=6, do_sample=False)
    ours = adafuse_pipeline(pair)
    (ids,) = ours("", return_tensors=True, **options)
    assert pair[0][1].convert_ids_to_tokens(ids["generated_token_ids"])[1].startswith("▁"), "its decoder drops a space"
    enable_adafuse(pair[0][0], tokenizer=pair[0][1], **ensemble(pair))
    plain = pipeline("text-generation", model=pair[0][0], tokenizer=pair[0][1])
    (record,) = ours("", return_full_text=whole, **options)
    assert record == plain("", return_full_text=whole, **options)[0] and record["generated_text"][0].isalpha()


def test_a_continuation_keeps_its_first_space():
    pair = members("sentencepiece")
    pipe = adafuse_pipeline(pair, max_new_tokens=6)
    tokenizer = pair[0][1]
    starts = []
    for prompt in ["The capital", "cat"]:
        ids = tokenizer(prompt).input_ids + direct_prompt(pair, prompt, new=3)
        expected = tokenizer.decode(ids, skip_special_tokens=True)
        assert pipe(prompt, max_new_tokens=3)[0]["generated_text"] == expected
        (record,) = pipe(prompt, max_new_tokens=3, return_full_text=False)
        assert record["generated_text"] == expected.removeprefix(prompt)
        starts.append(record["generated_text"][:1])
    assert starts == ["t", " "]


def test_template_options_reach_every_member(monkeypatch):
    pair = members()
    pipe = adafuse_pipeline(pair, max_new_tokens=2)
    tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
    seen = []
    monkeypatch.setattr(pipe.model, "generate", lambda **given: seen.append(given) or given["input_ids"])
    pipe(QUESTION, tokenizer_encode_kwargs={"mood": " gladly"}, tools=[tool], documents=[{"title": "a", "text": "b"}])
    expected = by_hand(pair, QUESTION, mood=" gladly", tools=[tool], documents=[{"title": "a", "text": "b"}])
    (given,) = seen
    (assistant,) = given["assistant_inputs"]
    assert given["input_ids"].tolist() == expected["input_ids"].tolist()
    assert assistant["input_ids"].tolist() == expected["assistant_inputs"][0]["input_ids"].tolist()
    assert pair[1][1].decode(assistant["input_ids"][0]).endswith(" gladly")


def test_a_given_assistant_prompt_wins():
    pair = members()
    inputs = by_hand(pair, QUESTION)
    inputs["assistant_inputs"] = [pair[1][1]("there was a treaty", return_tensors="pt", return_token_type_ids=False)]
    records = adafuse_pipeline(pair)(
        QUESTION, assistant_inputs=inputs["assistant_inputs"], max_new_tokens=6, return_tensors=True
    )
    assert new_ids(records, inputs["input_ids"][0]) == direct(pair, **inputs)


def test_a_bound_model_and_one_switched_off():
    pair = members()
    (model, tokenizer), (other, other_tokenizer) = pair
    enable_adafuse(model, [other], [other_tokenizer], tokenizer, CONFIG)
    pipe = pipeline("adafuse-text-generation", model=model, tokenizer=tokenizer, max_new_tokens=6, do_sample=False)
    inputs = by_hand(pair, QUESTION)
    width = inputs["input_ids"][0]
    assert new_ids(pipe(QUESTION, return_tensors=True), width) == direct(pair, **inputs)
    off = new_ids(pipe(QUESTION, return_tensors=True, adafuse_config=False), width)
    alone = tiny_model("llama", "byte_level", 0).generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=6, do_sample=False
    )
    assert off == alone[0, len(width) :].tolist()


def test_an_assistant_without_a_template_reads_plain_text():
    pair = members()
    pair[1] = (pair[1][0], TOKENIZERS["sentencepiece"]())
    inputs = chat_inputs(QUESTION, [tokenizer for _, tokenizer in pair])
    expected = direct(pair, **inputs)
    assert (
        new_ids(adafuse_pipeline(pair, max_new_tokens=6)(QUESTION, return_tensors=True), inputs["input_ids"][0])
        == expected
    )


def test_saved_and_loaded_by_its_task(tmp_path):
    pair = members()
    pair[0] = (copy.deepcopy(pair[0][0]), pair[0][1])
    pipe = adafuse_pipeline(pair, max_new_tokens=6)
    expected = pipe(QUESTION)
    pipe.save_pretrained(tmp_path)
    again = pipeline("adafuse-text-generation", model=str(tmp_path), max_new_tokens=6, **ensemble(pair))
    assert isinstance(again, AdaFusePipeline)
    assert again(QUESTION) == expected
    assert {path.suffix for path in Path(tmp_path).iterdir()} >= {".safetensors", ".json"}


def test_exports():
    assert {"AdaFusePipeline", "chat_inputs"} <= set(hf_adafuse.__all__)
    assert torch.is_tensor(chat_inputs(QUESTION, [templated("byte_level", MARKED)])["input_ids"])
