"""Log-likelihoods of ensembles with members behind servers: those of the same members here."""

from __future__ import annotations

import copy

import pytest
from asked import KINDS, PAIRS, members, requests
from support.stand_in import StandIn, serving

from hf_adafuse import AdaFuseConfig, ServedModel
from hf_adafuse.lab.evaluation.language_model import AdaFuseLM
from hf_adafuse.lab.evaluation.text_readings import read
from hf_adafuse.members.model_handle import ModelHandle
from hf_adafuse.trees.model_call import ModelCall

# What a server does not tell, no weights follow from: how far a prompt's content moves the next token.
ROBUST = AdaFuseConfig.robust().changed({"model_weights": "examples"})
CONFIGS = {"span": AdaFuseConfig(), "robust": ROBUST}
TEXTS = ["Once upon a time there was a girl. " * 6, "She", ""]


def language_model(pair, config):
    (main, tokenizer), (assistant, other) = pair
    return AdaFuseLM(main, [assistant], tokenizer, [other], adafuse_config=config, progress=False, batch_size=4)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("which", [0, 1])
def test_as_with_all_members_here(kind, name, which):
    here = members(*KINDS[:2])
    model, tokenizer = here[which]
    greedy = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=9, do_sample=False)
    own = tokenizer.decode(greedy[0])[len("Once upon a time") :]  # what it would write itself, longer than a walk
    pairs = [*PAIRS, ("Once upon a time", own)]
    with serving(StandIn(model, tokenizer, kind)) as url:
        eos = model.generation_config.eos_token_id
        served = list(here)
        served[which] = ServedModel(url, kind, tokenizer=tokenizer, eos_token_id=eos, num_steps=2), tokenizer
        found, expected = language_model(served, CONFIGS[name]), language_model(here, CONFIGS[name])
        for (value, is_greedy), (wanted, is_best) in zip(
            found.loglikelihood(requests("loglikelihood", pairs)),
            expected.loglikelihood(requests("loglikelihood", pairs)),
            strict=True,
        ):
            assert (value, is_greedy) == (pytest.approx(wanted, abs=1e-3), is_best)
        asked = [(text,) for text in TEXTS]
        assert found.loglikelihood_rolling(requests("loglikelihood_rolling", asked)) == pytest.approx(
            expected.loglikelihood_rolling(requests("loglikelihood_rolling", asked)), abs=1e-3
        )


def test_what_a_served_member_would_write_itself_is_known():
    (model, tokenizer) = members(KINDS[0])[0]
    ids = tokenizer("Once upon a time")["input_ids"]
    more = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=9, do_sample=False)
    more = more[0, len(ids) :].tolist()
    other = [*more[:-1], more[-1] + 1]
    with serving(StandIn(model, tokenizer)) as url:
        served = ServedModel(url, tokenizer=tokenizer, eos_token_id=model.generation_config.eos_token_id)
        handle = ModelHandle("the main model", served, tokenizer)
        pairs = [(ids, more), (ids, other), (ids, [])]
        assert [one.is_greedy for one in read(handle, ModelCall(served), pairs)] == [True, False, True]


def test_a_context_that_is_too_long_loses_its_beginning():
    (model, tokenizer) = members(KINDS[0])[0]
    stand_in = StandIn(model, tokenizer, max_length=24)
    long = " ".join(["Once upon a time"] * 20)
    with serving(stand_in) as url:
        served = ServedModel(url, tokenizer=tokenizer, eos_token_id=model.generation_config.eos_token_id)
        lm = language_model([(served, tokenizer), (copy.copy(model), tokenizer)], AdaFuseConfig())
        ((value, _),) = lm.loglikelihood(requests("loglikelihood", [(long, " there was")]))
        (rolled,) = lm.loglikelihood_rolling(requests("loglikelihood_rolling", [(long,)]))
        assert value < 0 and rolled < 10 * value
        sizes = [
            len(ids)
            for path, body, _ in stand_in.requests
            if "prompt_logprobs" in (body or {})
            for ids in body["prompt"]
        ]
        assert max(sizes) < 24
        with pytest.raises(ValueError, match="A continuation must be at most"):
            lm.loglikelihood(requests("loglikelihood", [("a", long)]))
