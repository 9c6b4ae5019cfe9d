"""Words that are committed before the other members have read them: their processors and caches are as if they had."""

from __future__ import annotations

import copy

import pytest
import torch
from support.cases import Case
from support.hosts import PROMPTS, TWO, ensemble, new_ids
from support.reference_rules import decode_by_rule
from support.releases import cache_of, with_cache
from support.tiny import TOKENIZERS, tiny_model
from transformers import NoRepeatNGramLogitsProcessor

from hf_adafuse import AdaFuseConfig, enable_adafuse
from hf_adafuse.decoding.strategies.strategy import ALONE
from hf_adafuse.trees import kv_cache_backend
from hf_adafuse.trees.pass_policy import Policy

MEMBERS = [TWO, ("gpt2/byte_level/1", "llama/byte_level/2"), ("llama/characters/0", "qwen3/characters/1")]


def expected(case, process):
    rows = []
    for row in case.main_ids()[0]:
        prompts, members = case.member_prompts(row), case.ref_members()
        for k, member in enumerate(members):
            member.process = process(prompts[k])
        rows.append(decode_by_rule(members, prompts, case.config, case.max_new_tokens)[0])
    return rows


@pytest.mark.parametrize("gate", [0.2, 0.6])
@pytest.mark.parametrize("members", MEMBERS, ids=str)
def test_processors_of_members_that_read_later_equal_the_oracle(members, gate):
    case = ensemble(*members, n=14, certainty_gate=gate)
    output = case.fast(no_repeat_ngram_size=2)
    assert new_ids(case, output) == expected(case, lambda prompt: NoRepeatNGramLogitsProcessor(2))
    candidates = [candidate for prompt in output.rounds for committed in prompt for candidate in committed.candidates]
    assert any(candidate.nlls[1] is None for candidate in candidates)  # some were committed unread
    rounds = [committed for prompt in output.rounds for committed in prompt]
    assert all(
        one.weights == ([1.0, 0.0] if one.criterion == ALONE else [0.5, 0.5]) for one in rounds
    )  # a word that was not asked of the other member is the main model's alone


class Counting:
    """Rules out one token at every third call; an assistant's own."""

    def __init__(self, width):
        self.width, self.calls = width, 0

    def __call__(self, input_ids, scores):
        assert input_ids.shape[1] == self.width + self.calls
        self.calls += 1
        scores = scores.clone()
        if self.calls % 3 == 0:
            scores[:, 5 + self.calls] = -torch.inf
        return scores


@pytest.mark.parametrize("most", [2, 1000])
@pytest.mark.parametrize("gate", [0.02, 0.2, 0.6])
def test_an_assistants_processor_that_remembers_is_called_once_a_token(gate, most, monkeypatch):
    """Also where a pass reads few tokens of what the assistant has not read."""
    monkeypatch.setattr(kv_cache_backend, "_LEAST_PROMPT_COLUMNS", most)
    monkeypatch.setattr(Policy, "most_prompt_tokens", most)
    monkeypatch.setattr(Policy, "prefetched_tokens", 1)  # nothing else is in such a pass
    case = ensemble(*MEMBERS[1], prompts=PROMPTS[:1], n=16, certainty_gate=gate)
    width = len(case.member_prompts(case.main_ids()[0][0])[1])
    got = new_ids(case, case.fast(assistant_logits_processor=[[Counting(width)]]))

    def process(ids, scores):
        calls = ids.shape[1] - width + 1
        if calls % 3 == 0:
            scores[:, 5 + calls] = -torch.inf
        return scores

    row = case.main_ids()[0][0]
    members = case.ref_members()
    members[1].process = process
    assert got == [decode_by_rule(members, case.member_prompts(row), case.config, case.max_new_tokens)[0]]


@pytest.mark.parametrize("number", [2, 3])
def test_copies_of_one_model_stay_copies(number):
    """Greedy ids may not be those of their text: members with the same tokenizer take them as they are."""
    model, tokenizer = tiny_model("llama", "sentencepiece", peak=4.0), TOKENIZERS["sentencepiece"]()
    config = AdaFuseConfig(certainty_gate=0.6, num_branches=1)
    cases = [Case([model] * count, [tokenizer] * count, config, ["The capital of France"], 16) for count in (1, number)]
    one, several = [new_ids(case, case.fast()) for case in cases]
    assert several == one


def test_trust_from_the_prompt_reads_all_of_it_where_a_cache_is_given():
    case = ensemble(*TWO, prompts=PROMPTS[:1], n=8, model_weights="prompt", prompt_sharpness=8.0)
    first = case.fast()
    rest = enable_adafuse(copy.copy(case.models[0])).generate(
        input_ids=first.sequences,
        **with_cache(cache_of(first)),
        tokenizer=case.tokenizers[0],
        assistant_models=case.models[1:],
        assistant_tokenizers=case.tokenizers[1:],
        adafuse_config=case.config,
        max_new_tokens=8,
        attention_mask=torch.ones_like(first.sequences),
        do_sample=False,
    )
    ((_, _, states),) = cache_of(first).assistants
    prompts = [first.sequences[0].tolist(), states[0][0]]
    expected, _ = decode_by_rule(case.ref_members(), prompts, case.config, 8)
    assert rest[0, len(prompts[0]) :].tolist() == expected
