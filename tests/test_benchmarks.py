"""The enlarged models compute what the small ones do."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model

from hf_adafuse import demo
from hf_adafuse.benchmarks import enlarge
from hf_adafuse.benchmarks.enlarge import _larger_config


@pytest.fixture(scope="module")
def members():
    return demo.load_members(3)


@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize("num_parameters", [3_000_000, 50_000_000])
def test_the_same_logits_at_more_cost(members, k, num_parameters):
    model, tokenizer = members[k]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    larger = enlarge(model, num_parameters)
    assert larger.num_parameters() == pytest.approx(num_parameters, rel=0.05)
    for question in demo.test_questions(5):
        ids = tokenizer(question.prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            assert (larger(ids).logits - model(ids).logits).abs().max() < 1e-4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if num_parameters == 3_000_000:
        small, large = (m.generate(ids, max_new_tokens=20, do_sample=False).tolist() for m in (model, larger))
        assert small == large


@pytest.mark.parametrize("k", [0, 1, 2])
def test_sizes_up_to_eight_billion(members, k):
    model, _ = members[k]
    for size in (1_000_000_000, 8_000_000_000):
        config, _ = _larger_config(model.config, size)
        with torch.device("meta"):
            assert type(model)(config).num_parameters() == pytest.approx(size, rel=0.05)
        assert 20 < config.num_hidden_layers < 60


def test_refusals(members):
    with pytest.raises(ValueError, match="`model` must be one of"):
        enlarge(tiny_model("gpt2"), 10_000_000)
    with pytest.raises(ValueError, match="`num_parameters` must be at least twice the model's own"):
        enlarge(members[0][0], 1000)


def test_half_precision_and_the_callers_random_numbers(members):
    model = __import__("copy").deepcopy(members[0][0]).to(torch.bfloat16)
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    one, two = enlarge(model, 4_000_000), enlarge(model, 4_000_000)
    assert torch.rand(1) == expected and torch.get_default_dtype() == torch.float32
    assert one.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
