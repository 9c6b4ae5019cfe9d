"""Torch's default device is no matter: all tensors are made where the models are, or on the host."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from support.calls import BYTES, CHARS, PROMPT, inputs_of
from support.cases import random_case
from support.kinds import case_of, model_of
from support.tiny import tiny_model

from hf_adafuse import AdaFuseEnsemble, enable_adafuse
from hf_adafuse.decoding.strategies.registry import STRATEGIES


@contextlib.contextmanager
def elsewhere():
    """Tensors that are made without a device have no values."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("number", range(12))
def test_random_cases(number):
    case = random_case(number)
    expected = case.fast()
    _, ids, mask = case.main_ids()
    main = enable_adafuse(copy.copy(case.models[0]))
    given = dict(
        input_ids=ids, attention_mask=mask, tokenizer=case.tokenizers[0], assistant_models=case.models[1:],
        assistant_tokenizers=case.tokenizers[1:], adafuse_config=case.config, max_new_tokens=case.max_new_tokens,
    )  # fmt: skip
    with elsewhere():
        got = main.generate(**given, max_batch_size=case.max_batch_size, do_sample=False)
    assert torch.equal(got, expected.sequences)


CALLS = {
    **{name: dict(adafuse_config={"method": name}) for name in STRATEGIES},
    "peer-review": dict(adafuse_config={"method": "peer-review", "max_score": 4}),  # the assistant cannot write a 5
    "sampled": dict(do_sample=True),
    "structured": dict(structured={"regex": "[a-z ]{2,9}"}),
    "scores": dict(return_dict_in_generate=True, output_scores=True, output_logits=True),
    "processors": dict(repetition_penalty=1.2, no_repeat_ngram_size=2, min_new_tokens=3),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_method_and_mode(name):
    assistants = dict(assistant_models=[tiny_model("gpt2", "characters")], assistant_tokenizers=[CHARS])
    call = dict(**inputs_of(BYTES, PROMPT, "She"), tokenizer=BYTES, **assistants, max_new_tokens=6, **CALLS[name])
    main = enable_adafuse(copy.copy(tiny_model("llama", "byte_level")))
    texts = []
    for place in (contextlib.nullcontext, elsewhere):
        torch.manual_seed(0)
        with place():
            output = main.generate(**call)
        texts.append(getattr(output, "sequences", output))
    assert torch.equal(*texts)


# One of each backend: tree attention, branch rows, recurrent with one and with several tokens a pass, without a cache.
@pytest.mark.parametrize("kind", ["roberta", "bloom", "gpt_neo", "mamba", "mamba2", "rwkv"])
def test_every_kind_of_model(kind):
    case = case_of(model_of(kind))
    expected = case.fast().sequences
    _, ids, mask = case.main_ids()
    with elsewhere():
        got = enable_adafuse(copy.copy(case.models[0])).generate(
            input_ids=ids, attention_mask=mask, tokenizer=case.tokenizers[0], assistant_models=case.models[1:],
            assistant_tokenizers=case.tokenizers[1:], adafuse_config=case.config, max_new_tokens=case.max_new_tokens,
            do_sample=False,
        )  # fmt: skip
    assert torch.equal(got, expected)


def test_ensembles_of_texts():
    ensemble = AdaFuseEnsemble([(tiny_model("llama", "byte_level"), BYTES), (tiny_model("gpt2", "characters"), CHARS)])
    expected = ensemble.texts([PROMPT, "She"], max_new_tokens=6)
    with elsewhere():
        assert ensemble.texts([PROMPT, "She"], max_new_tokens=6) == expected
