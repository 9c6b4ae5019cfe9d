"""Pipelines and chat: token for token what `generate()` gives, each member reading its own chat template."""

from __future__ import annotations

import copy
import functools
import logging
from pathlib import Path

import pytest
import torch
from tiny import TOKENIZERS, tiny_model
from transformers import TextIteratorStreamer, pipeline
from transformers.utils.logging import warning_once

import hf_adafuse
from hf_adafuse import AdaFuseConfig, AdaFusePipeline, chat_inputs, enable_adafuse

CONFIG = AdaFuseConfig(max_word_tokens=4)
PROMPTS = ["Once upon a time", "there was a cat on the tree. The", "She"]
QUESTION = [{"role": "user", "content": "what is the capital of Peru"}]
LONGER = [
    {"role": "user", "content": "was there a cat"},
    {"role": "assistant", "content": "there was a big cat"},
    {"role": "user", "content": "she was there"},
]
PREFILLED = [*QUESTION, {"role": "assistant", "content": "The capital of Peru is"}]
CHATS = [QUESTION, LONGER, QUESTION[:1] + LONGER[1:]]

# One that marks turns with a special token, one with plain text and the tokenizer's own beginning.
MARKED = (
    "{% for m in messages %}<|eot|>{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    "{% if tools %}[{{ tools | length }} tools]{% endif %}"
    "{% if documents %}[{{ documents | length }} papers]{% endif %}"
    "{% if add_generation_prompt %}<|eot|>assistant: {% endif %}"
)
PLAIN = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[ask] {{ m['content'] }} [/ask]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}{{ mood or '' }}"
)


@functools.cache
def templated(name: str, template: str):
    tokenizer = copy.deepcopy(TOKENIZERS[name]())
    tokenizer.chat_template = template
    return tokenizer


def members(main: str = "byte_level"):
    """Two members with a template each: fresh shallow copies of shared models, so that enabling changes nothing."""
    pair = [
        (copy.copy(tiny_model("llama", "byte_level", 0)), templated("byte_level", MARKED)),
        (copy.copy(tiny_model("qwen3", "sentencepiece", 1)), templated("sentencepiece", PLAIN)),
    ]
    return pair if main == "byte_level" else pair[::-1]


def ensemble(pair):
    return dict(assistant_models=[pair[1][0]], assistant_tokenizers=[pair[1][1]], adafuse_config=CONFIG)


_DIRECT: dict[tuple, list[int]] = {}


def direct(pair, *, new=6, **inputs) -> list[int]:
    """The new ids that `generate()` gives for one prompt. Each is decoded once."""
    given = [inputs["input_ids"], *(each["input_ids"] for each in inputs.get("assistant_inputs") or [])]
    key = (pair[0][1], pair[1][1], new, *(tuple(ids[0].tolist()) for ids in given))
    if key not in _DIRECT:
        _DIRECT[key] = decode(pair, new, inputs)
    return _DIRECT[key]


def decode(pair, new, inputs) -> list[int]:
    (model, tokenizer), _ = pair
    output = enable_adafuse(copy.copy(model)).generate(
        **inputs, **ensemble(pair), tokenizer=tokenizer, max_new_tokens=new, do_sample=False
    )
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def direct_prompt(pair, prompt, **more):
    inputs = pair[0][1](prompt, return_tensors="pt", return_token_type_ids=False)
    return direct(pair, **inputs, **more)


def by_hand(pair, chat, **options):
    """Each member's inputs for a chat, made with nothing but its own tokenizer."""
    options = {"add_generation_prompt": True, **options}
    made = [
        tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True, **options) for _, tokenizer in pair
    ]
    return dict(
        input_ids=made[0]["input_ids"],
        attention_mask=made[0]["attention_mask"],
        assistant_inputs=[{"input_ids": made[1]["input_ids"], "attention_mask": made[1]["attention_mask"]}],
    )


def new_ids(records, prompt_ids) -> list[int]:
    return records[0]["generated_token_ids"][len(prompt_ids) :]


def unpadded(ids, tokenizer):
    while ids and ids[-1] == tokenizer.pad_token_id:
        ids = ids[:-1]
    return ids


# chat_inputs


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
        (lambda toks: chat_inputs(QUESTION, [toks[0], TOKENIZERS["unigram"]()]), r"`tokenizers\[1\]` must have a chat"),
        (lambda toks: chat_inputs(QUESTION, toks[0]), "`tokenizers` must be a list"),
        (lambda toks: chat_inputs(QUESTION, []), "`tokenizers` must be a list"),
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


# transformers' own pipeline


@pytest.mark.parametrize("when", ["construction", "call"])
def test_the_hosts_pipeline(when):
    pair = members()
    (model, tokenizer), _ = pair
    arguments = ensemble(pair)
    enable_adafuse(model, tokenizer=tokenizer)
    given = arguments if when == "construction" else {}
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, max_new_tokens=6, **given)
    more = {"return_tensors": True, **(arguments if when == "call" else {})}  # sampling, by the pipeline's own default
    expected = [direct_prompt(pair, prompt) for prompt in PROMPTS]
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    single = [new_ids(pipe(prompt, **more), ids) for prompt, ids in zip(PROMPTS, prompts, strict=True)]
    assert single == expected
    for batch_size in (1, 2) if when == "call" else (2,):
        width = [max(map(len, prompts[:2])), len(prompts[2])] if batch_size == 2 else None
        starts = [width[0], width[0], width[1]] if width else [len(ids) for ids in prompts]
        for inputs in (PROMPTS, (prompt for prompt in PROMPTS)):
            records = list(pipe(inputs, batch_size=batch_size, **more))
            rows = [r[0]["generated_token_ids"][start:] for r, start in zip(records, starts, strict=True)]
            assert [unpadded(row, tokenizer) for row in rows] == expected


def test_sampling_by_default_warns_once(caplog):
    pair = members()
    enable_adafuse(pair[0][0], tokenizer=pair[0][1])
    warning_once.cache_clear()
    pipe = pipeline("text-generation", model=pair[0][0], tokenizer=pair[0][1], **ensemble(pair))
    with caplog.at_level(logging.WARNING), _propagating():
        pipe(PROMPTS, max_new_tokens=4)
    assert caplog.text.count("`do_sample` is set, but AdaFuse is deterministic") == 1


class _propagating:
    """transformers' logger keeps its records to itself: let them through to pytest."""

    def __enter__(self):
        self.logger = logging.getLogger("transformers")
        self.before = self.logger.propagate
        self.logger.propagate = True

    def __exit__(self, *_):
        self.logger.propagate = self.before


@pytest.mark.parametrize("task", ["text-generation", "adafuse-text-generation"])
def test_streaming(task):
    pair = members()
    (model, tokenizer), _ = pair
    enable_adafuse(model, tokenizer=tokenizer)
    pipe = pipeline(task, model=model, tokenizer=tokenizer, **ensemble(pair))
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    (record,) = pipe(PROMPTS[0], streamer=streamer, max_new_tokens=6, return_full_text=False)
    parts = list(streamer)
    assert len(parts) > 1
    assert "".join(parts) == record["generated_text"]


# AdaFusePipeline


def adafuse_pipeline(pair, **more):
    (model, tokenizer), _ = pair
    return pipeline("adafuse-text-generation", model=model, tokenizer=tokenizer, **ensemble(pair), **more)


@pytest.mark.parametrize("main", ["byte_level", "sentencepiece"])
def test_a_chat_is_rendered_by_each_members_own_template(main, caplog):
    pair = members(main)
    warning_once.cache_clear()
    with caplog.at_level(logging.WARNING), _propagating():
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


def test_an_assistant_without_a_template_is_an_error():
    pair = members()
    pair[1] = (pair[1][0], TOKENIZERS["sentencepiece"]())
    with pytest.raises(ValueError, match=r"`tokenizers\[1\]` must have a chat template"):
        adafuse_pipeline(pair)(QUESTION)


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


# A chat that reaches generate() without the assistants' templates


def warned(caplog, pair, inputs, times=2) -> list[str]:
    warning_once.cache_clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING), _propagating():
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


def test_the_hosts_pipeline_warns_of_a_chat(caplog):
    pair = members()
    enable_adafuse(pair[0][0], tokenizer=pair[0][1])
    warning_once.cache_clear()
    pipe = pipeline("text-generation", model=pair[0][0], tokenizer=pair[0][1], max_new_tokens=2, **ensemble(pair))
    with caplog.at_level(logging.WARNING), _propagating():
        pipe(CHATS)
    assert caplog.text.count("hf_adafuse.chat_inputs(") == 1


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


def test_exports():
    assert {"AdaFusePipeline", "chat_inputs"} <= set(hf_adafuse.__all__)
    assert torch.is_tensor(chat_inputs(QUESTION, [templated("byte_level", MARKED)])["input_ids"])
