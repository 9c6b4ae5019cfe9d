"""A batch that calls join and leave while it runs: each call gets what it gets alone."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from support.cases import PROMPTS, random_case
from support.stand_in import StandIn, serving
from support.tiny import TOKENIZERS, tiny_model

from hf_adafuse import AdaFuseConfig, AdaFuseDecodingError, AdaFuseEnsemble, ServedModel
from hf_adafuse.call.plan import plan_call
from hf_adafuse.call.planning import KnownPlans, planning
from hf_adafuse.call.running_batch import RunningBatch
from hf_adafuse.trees.backend import ForwardError
from hf_adafuse.trees.kv_cache_backend import KVCacheBackend

NUM_CALLS = 10


def random_call(rng):
    """Settings that may differ within a batch."""
    call = {"max_new_tokens": rng.randint(1, 14), "seed": rng.randrange(100)}
    kind = rng.randrange(6)
    if kind == 0:
        call["stop_strings"] = rng.choice([["a"], ["e", " t"]])
    elif kind == 1:
        call |= {"do_sample": True, "temperature": rng.choice([0.5, 1.5]), "top_k": rng.choice([5, 50])}
    elif kind == 2:
        call["structured"] = {"regex": rng.choice(["[a-z ]{3,9}", "(she|the) [a-z]+"])}
    elif kind == 3:
        call["repetition_penalty"] = 1.5
    elif kind == 4:
        call["min_new_tokens"] = min(6, call["max_new_tokens"])
    return call


def ensemble_of(case):
    pairs = [(copy.copy(m), tok) for m, tok in zip(case.models, case.tokenizers, strict=True)]
    return AdaFuseEnsemble(pairs, case.config)


def ask(ensemble, prompt, call):
    call = {"do_sample": False, **call}
    torch.manual_seed(call.pop("seed"))
    return ensemble.rounds([prompt], **call)


def planned(ensemble, prompt, call, known=None):
    with planning(known) as plans:
        call = {"do_sample": False, **call}
        torch.manual_seed(call.pop("seed"))
        inputs = ensemble.encode([prompt])
        made = ensemble.model.generate(**inputs, **call, return_dict_in_generate=True, use_cache=False)
    assert torch.equal(made, inputs["input_ids"])
    (plan,) = plans
    return plan


def shown(rounds):
    candidates = [[(one.text, one.ends, one.proposers) for one in each.candidates] for each in rounds]
    return rounds.text, rounds.finish_reason, [each.text for each in rounds], candidates


class Calls:
    """A batch, and what its calls were told."""

    def __init__(self):
        self.ended, self.told, self.batch = {}, {}, None

    def add(self, plan):
        if self.batch is None or self.batch.is_over:
            self.batch, self.ended = RunningBatch(plan, self.on_rounds, self.end), {}
            return 0
        assert self.batch.takes(plan)
        return self.batch.add(plan)

    def on_rounds(self, number):
        self.told[number] = "".join(one.text for one in self.batch.prompt(number).rounds)

    def end(self, number, rounds):
        assert number not in self.ended
        self.ended[number] = rounds


def to_the_end(batch):
    while batch.step():
        pass


def run_at_random(rng, plans):
    """The rounds of plans that join at random times; of every fifth, which leaves, `None`."""
    calls, found, numbers = Calls(), [None] * len(plans), {}
    waiting = list(enumerate(plans))
    leaving = {index for index in range(len(plans)) if index % 5 == 4}
    while waiting or not (calls.batch is None or calls.batch.is_over):
        if waiting and (calls.batch is None or calls.batch.is_over or rng.random() < 0.3):
            if calls.batch is None or calls.batch.is_over:
                numbers = {}
            index, plan = waiting.pop(0)
            numbers[calls.add(plan)] = index
        calls.batch.step()
        for number, index in numbers.items():
            if index in leaving and rng.random() < 0.5:
                calls.batch.leave(number)
        for number, rounds in calls.ended.items():
            found[numbers[number]] = rounds
            assert not rounds or calls.told[number] == rounds.text
    return [None if index in leaving else rounds for index, rounds in enumerate(found)]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(7000, 7012))
def test_each_call_gets_what_it_gets_alone(number):
    rng = random.Random(number)
    case = random_case(number)
    ensemble = ensemble_of(case)
    asked = [(rng.choice(PROMPTS), random_call(rng)) for _ in range(NUM_CALLS)]
    if not all(tok.eos_token_id is not None for tok in case.tokenizers):
        for _, call in asked:
            call.pop("structured", None)
    plans = []
    for prompt, call in asked:
        try:
            plans.append(planned(ensemble, prompt, call))
        except ValueError:  # a member that has no token for the grammar
            del call["structured"]
            plans.append(planned(ensemble, prompt, call))
    found = run_at_random(rng, plans)
    for (prompt, call), rounds in zip(asked, found, strict=True):
        if rounds is not None:
            alone = ask(ensemble, prompt, call)[0]
            assert shown(rounds) == shown(alone), (prompt, call)


@pytest.mark.parametrize("number", range(7000, 7012))
def test_a_call_like_an_earlier_one_is_planned_from_its_plan(number, monkeypatch):
    """Whatever its prompt and seed; but calls with processors or grammars are planned in full."""
    rng = random.Random(number)
    ensemble, known, in_full = ensemble_of(random_case(number)), KnownPlans(), []
    monkeypatch.setattr("hf_adafuse.generation.plan_call", lambda *args: in_full.append(args) or plan_call(*args))
    kinds = [{}, {"stop_strings": ["a"]}, {"do_sample": True, "top_k": 5}, {"repetition_penalty": 1.5}]
    calls = [{"max_new_tokens": 6, "seed": rng.randrange(99), **rng.choice(kinds)} for _ in range(NUM_CALLS)]
    asked = [(rng.choice(PROMPTS) + " she" * rng.randrange(3), call) for call in calls]
    plans = [planned(ensemble, *one, known) for one in asked]
    once = {str(call | {"seed": 0}) for call in calls if "repetition_penalty" not in call}
    assert len(in_full) == len(once) + sum("repetition_penalty" in call for call in calls)
    found = run_at_random(rng, plans)
    for (prompt, call), rounds in zip(asked, found, strict=True):
        if rounds is not None:
            assert shown(rounds) == shown(ask(ensemble, prompt, call)[0]), (prompt, call)


def test_a_prompt_that_is_too_long_is_refused_like_an_earlier_one():
    known = KnownPlans()
    ensemble = AdaFuseEnsemble([(tiny_model("gpt2", "characters"), TOKENIZERS["characters"]())])
    call, longest = {"max_new_tokens": 4, "seed": 0}, "she " * 2000
    with pytest.raises(ValueError, match="must be at most") as first:
        planned(ensemble, longest, call, known)
    assert planned(ensemble, PROMPTS[0], call, known).config == planned(ensemble, PROMPTS[1], call, known).config
    with pytest.raises(ValueError, match="must be at most") as later:
        planned(ensemble, longest, call, known)
    assert str(first.value) == str(later.value)


METHODS = ["unite", "specfuse", "rerank", "gac"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        "robust",
        *({"method": name} for name in METHODS),
        {"method": "cool-fusion", "rerank": True},
        {"model_weights": "prompt"},
    ],
    ids=str,
)
def test_methods(config):
    case = random_case(7001)
    ensemble = AdaFuseEnsemble(list(zip(case.models[:2], case.tokenizers[:2], strict=True)), config)
    rng = random.Random(1)
    calls = [(prompt, {"max_new_tokens": rng.randint(3, 12), "seed": 0}) for prompt in (*PROMPTS, *PROMPTS)]
    found = run_at_random(rng, [planned(ensemble, *one) for one in calls])
    for (prompt, call), rounds in zip(calls, found, strict=True):
        if rounds is not None:
            assert shown(rounds) == shown(ask(ensemble, prompt, call)[0]), (prompt, call)


def test_who_can_share_a_batch():
    case = random_case(7002)
    ensemble = ensemble_of(case)
    call = {"max_new_tokens": 4, "seed": 0}
    first = planned(ensemble, PROMPTS[0], call)
    batch = RunningBatch(first, lambda number: None, lambda number, rounds: None)
    assert batch.takes(planned(ensemble, PROMPTS[1], call | {"max_new_tokens": 9, "do_sample": True}))
    assert not batch.takes(planned(ensemble, PROMPTS[1], call | {"adafuse_config": AdaFuseConfig(max_words=2)}))
    other = AdaFuseEnsemble(
        list(zip(case.models, case.tokenizers, strict=True))[:1], case.config.changed({"model_weights": None})
    )
    assert not batch.takes(planned(other, PROMPTS[1], call))
    to_the_end(batch)
    assert batch.is_over and not batch.takes(first)


def test_drafts_that_are_sampled_share_no_batch():
    ensemble = AdaFuseEnsemble(
        [(tiny_model("llama", "byte_level"), TOKENIZERS["byte_level"]())], {"method": "majority"}
    )
    plans = [planned(ensemble, PROMPTS[0], {"max_new_tokens": 4, "seed": 0, "do_sample": True}) for _ in range(2)]
    batch = RunningBatch(plans[0], lambda number: None, lambda number, rounds: None)
    assert not batch.takes(plans[1])


@pytest.mark.slow
def test_a_call_that_leaves_frees_its_place_before_the_next_pass():
    ensemble = ensemble_of(random_case(7003))
    calls = Calls()
    for prompt in PROMPTS[:3]:
        calls.add(planned(ensemble, prompt, {"max_new_tokens": 40, "min_new_tokens": 40, "seed": 0}))
    for _ in range(4):
        calls.batch.step()
    members = calls.batch._members
    assert [member.num_active for member in members] == [3] * len(members)
    assert calls.batch.leave(1)
    calls.batch.step()
    assert [member.backend.active for member in members] == [[0, 2]] * len(members)
    to_the_end(calls.batch)
    assert sorted(calls.ended) == [0, 2]
    assert calls.batch.leave(1) and calls.batch.leave(2)  # again, and after the end: nothing happens


@pytest.mark.parametrize("number", range(7006, 7012))
def test_calls_that_come_when_others_end_need_no_more_passes_than_one_call_for_all(number):
    """Each takes part in the first pass after it has come: no place stays empty for a pass."""
    ensemble = ensemble_of(random_case(number))
    prompts = [f"{PROMPTS[k % len(PROMPTS)]} {k}" for k in range(7)]
    call = {"max_new_tokens": 14, "stop_strings": ["a th", "sh"], "do_sample": False}
    stats = ensemble.generate(prompts, **call, max_batch_size=2, return_dict_in_generate=True).stats["members"]
    waiting = [planned(ensemble, prompt, {**call, "seed": 0}) for prompt in prompts]
    calls, num_ended, passes = Calls(), 0, [0] * len(stats)
    while waiting:
        while waiting and (calls.batch is None or calls.batch.num_calls - len(calls.ended) < 2):
            calls.add(waiting.pop(0))
        while calls.batch.step() and (not waiting or calls.batch.num_calls - len(calls.ended) == 2):
            pass
        if calls.batch.is_over:  # both have ended in one pass: the next ones are a batch of their own
            num_ended += len(calls.ended)
            own = [member.backend.num_forwards for member in calls.batch._members]
            passes, calls = [one + other for one, other in zip(passes, own, strict=True)], Calls()
    assert num_ended == len(prompts)
    assert all(own <= one["forward_passes"] for own, one in zip(passes, stats, strict=True))


def test_what_has_ended_is_not_kept():
    ensemble = ensemble_of(random_case(7003))
    calls = Calls()
    for prompt in PROMPTS[:2]:
        calls.add(planned(ensemble, prompt, {"max_new_tokens": 3, "seed": 0}))
    to_the_end(calls.batch)
    assert all(not prompt.ids and not prompt.rounds for prompt in calls.batch._prompts)
    assert [len(rounds) > 0 for rounds in calls.ended.values()] == [True, True]


def test_a_member_that_fails_ends_the_batch(monkeypatch):
    ensemble = ensemble_of(random_case(7005))
    calls = Calls()
    calls.add(planned(ensemble, PROMPTS[0], {"max_new_tokens": 40, "min_new_tokens": 40, "seed": 0}))
    calls.batch.step()

    def broken(*args, **kwargs):
        raise ForwardError("out of memory")

    monkeypatch.setattr(KVCacheBackend, "_forward", broken)
    with pytest.raises(AdaFuseDecodingError, match="out of memory"):
        to_the_end(calls.batch)
    assert calls.batch.is_over and not calls.ended


@pytest.mark.slow
def test_members_behind_servers():
    model, tokenizer = tiny_model("llama", "byte_level"), TOKENIZERS["byte_level"]()
    other = StandIn(tiny_model("gpt2", "characters"), TOKENIZERS["characters"]())
    with serving(other) as url:
        served = ServedModel(url, tokenizer=other.tokenizer, eos_token_id=other.model.generation_config.eos_token_id)
        ensemble = AdaFuseEnsemble([(model, tokenizer), served], "paper")
        rng = random.Random(3)
        calls = [(prompt, {"max_new_tokens": rng.randint(3, 9), "seed": 0}) for prompt in PROMPTS]
        found = run_at_random(rng, [planned(ensemble, *one) for one in calls])
        for (prompt, call), rounds in zip(calls, found, strict=True):
            if rounds is not None:
                assert shown(rounds) == shown(ask(ensemble, prompt, call)[0])
