"""Log-probabilities of prompts: those that are asked for are a plain forward pass's, and logits of no other token are
made.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from support.kinds import CPU, MODELS, model_of
from support.tiny import TOKENIZERS, tiny_model

import hf_adafuse
from hf_adafuse import AdaFuseEnsemble
from hf_adafuse.trees import kv_cache_backend
from hf_adafuse.trees.backend_probe import BACKENDS, choose_backend
from hf_adafuse.trees.model_call import ModelCall
from hf_adafuse.trees.pass_policy import Policy


def plain(model, ids):
    """The log-probability of each id after the first, by one pass over all of them."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
    return [math.nan, *(logits[at - 1, ids[at]].item() for at in range(1, len(ids)))]


def check(model, backend, prompts, counted):
    for ids, positions, found in zip(prompts, counted, backend.prompt_log_probs, strict=True):
        expected, first = plain(model, ids), len(ids) - len(found)
        for at in positions:
            assert found[at - first] == pytest.approx(expected[at], abs=1e-4), at


def random_prompts(rng, num, start=()):
    prompts = [[*start, *(rng.randrange(5, 40) for _ in range(rng.randint(2, 20)))] for _ in range(num)]
    return prompts, [sorted(rng.sample(range(1, len(ids)), rng.randint(0, len(ids) - 1))) for ids in prompts]


@pytest.fixture(autouse=True)
def _in_small_parts(monkeypatch):
    monkeypatch.setattr(Policy, "least_shared_tokens", 4)
    monkeypatch.setattr(kv_cache_backend, "_LEAST_PROMPT_COLUMNS", 2)


@pytest.mark.parametrize("can_leave_out", [True, False])
@pytest.mark.parametrize("name", [name for name, kind in MODELS.items() if kind[-1] != "served"])
def test_they_are_those_of_a_plain_pass(name, can_leave_out, monkeypatch):
    model, rng = model_of(name), random.Random(name)
    make = BACKENDS[choose_backend(model, CPU)]
    if not can_leave_out:
        monkeypatch.setattr("hf_adafuse.trees.model_call._takes_columns", lambda parameters: False)
    for number in range(4):
        monkeypatch.setattr(Policy, "most_prompt_tokens", rng.choice([4, 9, 1000]))
        monkeypatch.setattr(kv_cache_backend, "_MOST_PROMPT_LOGITS", rng.choice([1, 2**26]))
        start = [7, 8, 9, 10, 11, 12] * (number % 2)
        backend = make(model, CPU)
        prompts, counted = random_prompts(rng, rng.randint(1, 3), start)
        counted[0] = counted[0] or [1]
        backend.prefill(prompts, None, counted)
        check(model, backend, prompts, counted)
        later, counted_later = random_prompts(rng, 2, start)
        backend.admit(later, counted_later)
        if any(counted_later):
            check(model, backend, later, counted_later)


def test_what_was_kept_serves_as_far_as_it_is_known():
    """Call after call counts other tokens of prompts that begin alike."""
    model, rng = tiny_model("llama", "characters", 1), random.Random(1)
    make, start = BACKENDS[choose_backend(model, CPU)], [*range(20, 40)]
    with hf_adafuse.prefix_caching():
        for number in range(30):
            prompts, counted = random_prompts(rng, 1 + number % 2, start[: rng.randint(8, 20)])
            counted = counted if number % 3 else [()] * len(prompts)
            backend = make(model, CPU)
            backend.prefill(prompts, None, counted)
            if any(counted):
                check(model, backend, prompts, counted)
            backend.drop({*range(len(prompts))})
        again = make(model, CPU)
        again.prefill(prompts[:1], None, counted[:1])
        assert again.num_tokens == 1  # all of it is known but for the last token


@pytest.mark.fast
def test_logits_are_made_of_the_tokens_that_count_alone():
    model = tiny_model("llama", "characters", 1)
    backend, numbers = BACKENDS[choose_backend(model, CPU)](model, CPU), []
    hook = model.register_forward_hook(lambda module, args, output: numbers.append(output.logits.shape[1]))
    try:
        backend.prefill([[*range(5, 45)]], None, [[8, 9, 20]])
        backend.admit([[*range(5, 45)]], [()])
    finally:
        hook.remove()
    assert numbers[0] == 4 and numbers[-1] == 1 and max(numbers) == 4


@pytest.mark.fast
def test_a_prompt_without_examples_is_read_like_any_other(monkeypatch):
    """With the preset `robust` the members' log-probabilities of it are of no use."""
    models = [tiny_model("llama", "characters", number) for number in (1, 2)]
    ensemble = AdaFuseEnsemble([(model, TOKENIZERS["characters"]()) for model in models], "robust")
    columns = []
    call = ModelCall.__call__

    def noted(self, ids, *args, **kwargs):
        columns.append((ids.shape[1], kwargs.get("columns")))
        return call(self, ids, *args, **kwargs)

    monkeypatch.setattr(ModelCall, "__call__", noted)
    question = "the cat sat on a very long and very old mat by the door of the house"
    ensemble.texts([question], max_new_tokens=2)
    assert [read for width, read in columns[:1] if width > 20] == [[columns[0][0] - 1]]
    examples = "Q: a b\nA: cat\nQ: c d\nA: dog\nQ: e f\nA:"
    columns.clear()
    ensemble.texts([examples], max_new_tokens=2)
    width, read = columns[0]
    assert len(read) == len(" cat dog") + 1 and read[-1] == width - 1
