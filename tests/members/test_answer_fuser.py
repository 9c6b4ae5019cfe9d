"""The fuser reads what GenFuser was trained to read, and writes by beam search; what is none is refused."""

from __future__ import annotations

import re

import pytest
import torch
from support.blender_models import fuser_tokenizer, save_fuser
from support.calls import BYTES, FORM
from support.tiny import tiny_model
from transformers import AutoModelForSeq2SeqLM, T5ForConditionalGeneration

from hf_adafuse.members.answer_fuser import MAX_LENGTH, MAX_NEW_TOKENS, fuser_input, load_answer_fuser

CPU = torch.device("cpu")
REQUEST = "Summarize candidates into a better one for the given instruction:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_fuser(tmp_path_factory.mktemp("fuser"))


@pytest.fixture
def read(monkeypatch):
    """What fusers are given to read."""
    seen, real = [], T5ForConditionalGeneration.generate

    def generate(self, *args, **kwargs):
        seen.extend(kwargs["input_ids"].tolist() if not args else [])
        return real(self, *args, **kwargs)

    monkeypatch.setattr(T5ForConditionalGeneration, "generate", generate)
    return seen


def test_what_it_reads_is_laid_out_as_released():
    assert fuser_input("Why?", ["so", "not so"]) == (
        "Instruction: </s>Input: Why?</s>Candidate 0: <extra_id_0>:so</s>Candidate 1: <extra_id_1>:not so</s>" + REQUEST
    )


def test_it_writes_what_the_model_does_by_four_beams(folder, read):
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), fuser_tokenizer()
    text = "Instruction: </s>Input: was there a cat</s>Candidate 0: <extra_id_0>:there was</s>" + REQUEST
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    beams = model.generate(ids, num_beams=4, do_sample=False, max_new_tokens=128)
    expected = tokenizer.decode(beams[0], skip_special_tokens=True)
    state = torch.get_rng_state()
    assert load_answer_fuser(folder, CPU)("was there a cat", ["there was"]) == expected
    assert read[-1] == ids[0].tolist() and tokenizer.eos_token_id in read[-1]
    assert torch.equal(torch.get_rng_state(), state)
    assert expected.strip() and expected != tokenizer.decode(
        model.generate(ids, do_sample=False, max_new_tokens=128)[0], skip_special_tokens=True
    )
    assert load_answer_fuser(folder, CPU) is load_answer_fuser(folder, CPU)
    assert MAX_NEW_TOKENS == 128


def test_a_long_answer_is_cut(folder, read):
    tokenizer, long = fuser_tokenizer(), "was there " * 90
    cut = tokenizer.decode(tokenizer(long, add_special_tokens=False).input_ids[:128])
    load_answer_fuser(folder, CPU)("a", [long, "b"])
    assert read == [tokenizer(fuser_input("a", [cut + "...", "b"]), add_special_tokens=False).input_ids]


def test_a_long_prompt_is_cut_at_its_beginning(folder, read):
    tokenizer = fuser_tokenizer()
    ids = tokenizer("the tree was " * 500 + "the cat", add_special_tokens=False).input_ids
    load_answer_fuser(folder, CPU)(tokenizer.decode(ids), ["there"])
    assert MAX_LENGTH - 4 <= len(read[0]) <= MAX_LENGTH == 1024
    text = tokenizer.decode(read[0])
    assert text.startswith(tokenizer.decode(tokenizer("Instruction: </s>Input:", add_special_tokens=False).input_ids))
    end = tokenizer(fuser_input("the tree was the cat", ["there"]), add_special_tokens=False).input_ids
    first = end.index(tokenizer("cat", add_special_tokens=False).input_ids[0]) - 1
    assert tokenizer.decode(end[first:]).startswith("the cat</s>")
    assert read[0][first - len(end) :] == end[first:]


def test_what_is_spelled_like_a_separator_is_none(folder, read):
    fuser = load_answer_fuser(folder, CPU)
    fuser("a</s>b", ["c<extra_id_1>d"])
    fuser("a b", ["c d"])
    assert read[0] == read[1]


@pytest.mark.parametrize("kind", ["nowhere", "a causal model"])
def test_what_is_none_is_refused(kind, tmp_path):
    if kind != "nowhere":
        tiny_model().save_pretrained(tmp_path / kind)
        BYTES.save_pretrained(tmp_path / kind)
    with pytest.raises(ValueError, match=re.compile(FORM, re.DOTALL)) as error:
        load_answer_fuser(str(tmp_path / kind), CPU)
    assert re.match(r"`fuser` must be None, or the Hub name or a folder of a seq", str(error.value))
    assert kind in str(error.value)
