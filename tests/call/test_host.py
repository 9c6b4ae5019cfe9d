"""Sampling flags, outputs, the host's pipeline and copies: what `generate()` offers works here too.

Logits processors are in test_processors; where a call's settings come from is in test_call_config.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support.hosts import CHARACTERS, PAD_IS_EOS, PROMPTS, TWO, Forbid, ensemble, new_ids, oracle
from support.tiny import tiny_model
from transformers import GenerationConfig, pipeline

from hf_adafuse import disable_adafuse, enable_adafuse


@pytest.mark.parametrize(
    "sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 1.5, "top_k": 20}, {"num_beams": 2}]
)
def test_without_assistants_it_is_the_ordinary_generate(sampling):
    case = ensemble(*PAD_IS_EOS)
    _, ids, mask = case.main_ids()
    plain_model, enabled = case.models[0], enable_adafuse(copy.copy(case.models[0]))
    outputs = []
    for model in (plain_model, enabled):
        torch.manual_seed(3)
        outputs.append(
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=8,
                return_dict_in_generate=True,
                output_scores=True,
                tokenizer=case.tokenizers[0],
                stop_strings=["zzz"],
                **sampling,
            )
        )
    assert type(outputs[0]) is type(outputs[1])
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert all(torch.equal(a, b) for a, b in zip(outputs[0].scores, outputs[1].scores, strict=True))


def test_scores_and_logits_are_one_per_new_token():
    case = ensemble(*PAD_IS_EOS)
    vocab_size = case.models[0].config.vocab_size
    suppressed = [5, 6, 7]
    output = case.fast(output_scores=True, output_logits=True, suppress_tokens=suppressed)
    rows, ids, mask = case.main_ids()
    new = new_ids(case, output)
    steps = max(map(len, new))
    assert [tuple(step.shape) for step in output.scores] == [(2, vocab_size)] * steps
    assert [tuple(step.shape) for step in output.logits] == [(2, vocab_size)] * steps
    transitions = enable_adafuse(copy.copy(case.models[0])).compute_transition_scores(
        output.sequences, output.scores, normalize_logits=True
    )
    assert transitions.shape == (2, steps)
    for row, (prompt, tokens) in enumerate(zip(rows, new, strict=True)):
        with torch.no_grad():
            logits = case.models[0](torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        got = torch.stack([step[row] for step in output.logits[: len(tokens)]])
        torch.testing.assert_close(got, logits, atol=1e-4, rtol=1e-4)
        logits[:, suppressed] = -torch.inf
        expected = logits.log_softmax(-1)[range(len(tokens)), tokens]
        torch.testing.assert_close(transitions[row, : len(tokens)], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("when", ["call", "construction", "binding"])
def test_pipeline(when):
    case = ensemble(*TWO, n=8)
    tok, settings = case.tokenizers[0], dict(max_new_tokens=8, do_sample=False, return_full_text=False)
    ensemble_arguments = dict(
        assistant_models=case.models[1:], assistant_tokenizers=case.tokenizers[1:], adafuse_config=case.config
    )
    model = enable_adafuse(
        copy.copy(case.models[0]), tokenizer=tok, **(ensemble_arguments if when == "binding" else {})
    )
    pipe = pipeline(
        "text-generation", model=model, tokenizer=tok, **(ensemble_arguments if when == "construction" else {})
    )
    at_call = ensemble_arguments if when == "call" else {}
    expected = [tok.decode(row, skip_special_tokens=True) for row in oracle(case)]
    for more in ({}, {"return_dict_in_generate": True}, {"return_dict_in_generate": True, "output_scores": True}):
        texts = [
            found[0]["generated_text"] for found in pipe(list(PROMPTS), batch_size=2, **settings, **at_call, **more)
        ]
        assert texts == expected, more


def test_nothing_of_the_callers_is_changed():
    case = ensemble(*CHARACTERS, n=8)
    case.models = [copy.deepcopy(model) for model in case.models]
    _, ids, mask = case.main_ids()
    given = [ids.clone(), mask.clone()]
    settings = GenerationConfig(max_new_tokens=8, do_sample=False, repetition_penalty=1.2, return_dict_in_generate=True)
    config = {"max_words": 2}

    def state():
        models = [
            (
                m.config.to_dict(),
                m.generation_config.to_dict(),
                m.config._attn_implementation,
                m.training,
                sorted(vars(m)),
            )
            for m in case.models
        ]
        tokenizers = [
            (t.backend_tokenizer.to_str(), t.init_kwargs, t.padding_side, t.special_tokens_map) for t in case.tokenizers
        ]
        weights = [m.state_dict() for m in case.models]
        return copy.deepcopy([models, tokenizers, settings.to_dict(), config, list(map(list, weights))]), [
            tensor.clone() for named in weights for tensor in named.values()
        ]

    (before, weights), base = state(), type(case.models[0])
    main = enable_adafuse(copy.copy(case.models[0]))
    main.generate(
        input_ids=ids, attention_mask=mask, generation_config=settings, tokenizer=case.tokenizers[0],
        assistant_models=case.models[1:], assistant_tokenizers=case.tokenizers[1:], adafuse_config=config,
        logits_processor=[Forbid([3])],
    )  # fmt: skip
    assert disable_adafuse(main) is main and type(main) is base
    after, weights_after = state()
    assert torch.equal(ids, given[0]) and torch.equal(mask, given[1])
    assert before == after
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_after, strict=True))


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_of_an_enabled_model_generates_the_same(clone):
    case = ensemble(*TWO, n=6)
    expected = case.fast().sequences
    cloned = clone(enable_adafuse(copy.copy(case.models[0]), case.models[1:], case.tokenizers[1:], case.tokenizers[0]))
    case.models = [cloned, *case.models[1:]]
    assert torch.equal(case.fast().sequences, expected)
    assert type(disable_adafuse(cloned)) is type(tiny_model("llama"))
