"""Whole answers that nothing would end: tokens without text, and texts that the main model's ids cannot say. And what
is kept of an answer when the call's time is over."""

from __future__ import annotations

import copy

import pytest
import torch
from support.tiny import TOKENIZERS, tiny_model
from support.toys import toy, word_tokenizer
from transformers import MaxLengthCriteria, MaxTimeCriteria

from hf_adafuse import AdaFuseEnsemble
from hf_adafuse.call.stopping import StopCheck
from hf_adafuse.decoding.answer_stops import AnswerStops
from hf_adafuse.decoding.progress import Prompt
from hf_adafuse.decoding.proposer import MOST_SILENT
from hf_adafuse.members.vocabulary import Vocabulary

WHOLE = ["rerank", "majority", "select", "blender"]


def looping(word, special):
    """A member that writes "So", and then one word for ever."""
    tokenizer = word_tokenizer(["So", word])
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": [f"▁{word}"]})
    model = toy(tokenizer, {"So": {word: 0.99}, word: {word: 0.99}})
    return model, tokenizer


@pytest.mark.parametrize("method", [*WHOLE, "spans"])
def test_special_tokens_without_end(method):
    """The assistant's own token that has no text, over and over: no id of the main model comes of it."""
    main = (copy.copy(tiny_model("llama", "byte_level")), TOKENIZERS["byte_level"]())
    model, tokenizer = looping("turn", special=True)
    ensemble = AdaFuseEnsemble([main, (model, tokenizer)], {"method": method})
    output = ensemble.output("So", max_new_tokens=8)
    assert 0 < sum(one.num_tokens for one in output.rounds[0]) <= 8
    assert output.stats["members"][1]["forward_passes"] <= MOST_SILENT + 64


@pytest.mark.parametrize("method", WHOLE)
def test_texts_that_are_one_unknown_token(method):
    """The main model has one id for any number of unknown words: its length says nothing."""
    tokenizer = word_tokenizer(["So", "It"])
    tokenizer.backend_tokenizer.pre_tokenizer = None  # all of an unknown text is one token
    main = (toy(tokenizer, {"So": {"It": 0.9}, "It": {"It": 0.9}}), tokenizer)
    other = looping("dog", special=False)
    output = AdaFuseEnsemble([main, other], {"method": method}).output("So", max_new_tokens=8)
    assert output.rounds[0].finish_reason is not None
    assert output.stats["members"][1]["forward_passes"] <= 2 * MOST_SILENT


class Clock:
    """Stands for `time` where criteria look at it: it goes on by a second with each forward pass."""

    def __init__(self):
        self.now = 0.0

    def time(self):
        return self.now


@pytest.mark.parametrize("method", ["rerank", "majority", "select"])
@pytest.mark.parametrize("max_time", [6.5, 14.5, 22.5])
def test_an_answer_is_kept_as_far_as_it_was_written_in_time(method, max_time, monkeypatch):
    """The time is over while a member writes, or while others score: what was written until then is the answer."""
    from transformers.generation import stopping_criteria

    clock = Clock()
    monkeypatch.setattr(stopping_criteria, "time", clock)
    members = [
        (copy.copy(tiny_model("llama", "byte_level")), TOKENIZERS["byte_level"]()),
        (copy.copy(tiny_model("gpt2", "sentencepiece")), TOKENIZERS["sentencepiece"]()),
    ]
    for model, _ in members:
        model.generation_config = copy.deepcopy(model.generation_config)
        model.generation_config.eos_token_id = None
    ensemble = AdaFuseEnsemble(members, {"method": method})
    ensemble.output("Once upon a time", max_new_tokens=2)  # the self-tests are over

    def pass_a_second(*_):
        clock.now += 1.0

    handles = [model.register_forward_pre_hook(pass_a_second) for model, _ in members]
    try:
        whole = ensemble.output("Once upon a time", max_new_tokens=20).rounds[0]
        clock.now = 0.0
        output = ensemble.output("Once upon a time", max_new_tokens=20, max_time=max_time)
    finally:
        for handle in handles:
            handle.remove()
    rounds = output.rounds[0]
    assert len(rounds) == 1 and rounds.finish_reason == "length" and len(whole) == 1
    texts = [candidate.text for candidate in rounds[0].candidates]
    assert rounds.text in texts  # whole, and no first token of it
    assert rounds[0].num_tokens >= 3


def test_whether_the_time_is_over():
    """Nothing else is asked: a stop text may stand at the end of the prompt, and criteria may need a new token."""
    vocabulary = Vocabulary(TOKENIZERS["byte_level"]())
    prompt = Prompt(0, [5, 6])
    asked = []
    stops = AnswerStops(vocabulary, [prompt], lambda so_far: asked.append(so_far.asks) or "length")
    assert stops.is_over(0) and stops.is_complete(0, "a") and asked == ["time", "text"]
    assert not AnswerStops(vocabulary, [prompt], lambda so_far: None).is_over(0)
    over, text = MaxTimeCriteria(1.0, initial_timestamp=0.0), MaxLengthCriteria(3)
    check = StopCheck([over, text], 1, torch.device("cpu"), with_scores=False)
    found = [check(Prompt(0, [5, 6, 7][:n], asks=asks)) for n in (2, 3) for asks in ("all", "time", "text")]
    assert found == ["length", "length", None, "length", "length", "length"]
