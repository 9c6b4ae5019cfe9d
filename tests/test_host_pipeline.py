"""transformers' own pipeline on an enabled model: token for token what `generate()` gives."""

from __future__ import annotations

import logging

import pytest
from support.chats import CHATS, PROMPTS, direct_prompt, ensemble, members, new_ids, propagating, unpadded
from transformers import TextIteratorStreamer, pipeline
from transformers.utils.logging import warning_once

import hf_adafuse.pipelines
from hf_adafuse import enable_adafuse


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


@pytest.mark.parametrize("task", ["text-generation", hf_adafuse.pipelines.TASK])
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


def test_the_hosts_pipeline_warns_of_a_chat(caplog):
    pair = members()
    enable_adafuse(pair[0][0], tokenizer=pair[0][1])
    warning_once.cache_clear()
    pipe = pipeline("text-generation", model=pair[0][0], tokenizer=pair[0][1], max_new_tokens=2, **ensemble(pair))
    with caplog.at_level(logging.WARNING), propagating():
        pipe(CHATS)
    assert caplog.text.count("hf_adafuse.chat_inputs(") == 1
