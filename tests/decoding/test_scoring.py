"""Numbers read from logits, on hand-built values."""

from __future__ import annotations

import math

import pytest
import torch

from hf_adafuse.decoding.scoring import first_lowest, fused_score, margin, span_nll
from hf_adafuse.members import node_logprobs
from hf_adafuse.members.node_logprobs import best_tokens

pytestmark = pytest.mark.fast


def test_best_tokens_breaks_ties_by_id():
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    values, ids = best_tokens(scores, 2)
    assert ids.tolist() == [[1, 2], [0, 1], [0, 1]]
    assert values.tolist() == [[3.0, 3.0], [0.0, 0.0], [5.0, 4.0]]
    assert best_tokens(scores, 9)[1].tolist()[0] == [1, 2, 4, 3, 0]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 8])
def test_best_tokens_where_scores_are_infinite_or_no_numbers(num_tokens):
    """As a stable sort of the whole has them, which puts NaN first: several in any order."""
    nan, inf = math.nan, math.inf
    for row in ([nan, 5, 5, 3, 1], [nan, nan, 3, 3, 3, 3], [-inf, 2, -inf, 2, -inf], 5 * [-inf], [inf, 1, inf, 1, 1]):
        scores = torch.tensor([row], dtype=torch.float32)
        expected = scores.sort(descending=True, stable=True)
        values, ids = best_tokens(scores, num_tokens)
        right, right_ids = (one[:, :num_tokens] for one in expected)
        assert torch.equal(values.nan_to_num(9), right.nan_to_num(9))
        assert torch.equal(scores.gather(1, ids).nan_to_num(9), values.nan_to_num(9))
        assert torch.equal(ids[~values.isnan()], right_ids[~values.isnan()])


def test_best_tokens_in_a_large_vocabulary_with_few_values():
    torch.manual_seed(0)
    scores = torch.randint(0, 50, (4, 5000)).to(torch.bfloat16).float()
    _, ids = best_tokens(scores, 5)
    assert ids.tolist() == scores.sort(dim=-1, descending=True, stable=True).indices[:, :5].tolist()


@pytest.mark.parametrize("num_values", [3, 50, 10**6])
@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("vocab_size", [20 * 512, 20 * 512 + 1, 11000, 30 * 512 - 1])
def test_best_tokens_are_found_by_blocks(vocab_size, num_tokens, num_values, monkeypatch):
    monkeypatch.setattr(node_logprobs, "_LARGE_VOCABULARY", 5000)
    widths, topk = [], torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda s, *a, **k: widths.append(s.shape[-1]) or topk(s, *a, **k))
    torch.manual_seed(vocab_size + num_values)
    for num_left in (vocab_size, 20, 2):
        scores = torch.randint(0, num_values, (5, vocab_size)).float()
        scores[torch.rand(5, vocab_size).argsort(-1) >= num_left] = -math.inf  # the others are forbidden
        expected = scores.sort(dim=-1, descending=True, stable=True)
        for found, right in zip(best_tokens(scores, num_tokens), expected[:2], strict=True):
            assert found.tolist() == right[:, :num_tokens].tolist()
    assert len(widths) == 6 and max(widths) <= 512 * (num_tokens + 2)  # of the blocks, and inside them


def test_margin():
    assert margin([math.log(0.8), math.log(0.1)]) == pytest.approx(0.7)
    assert margin([0.0]) == 1.0
    assert margin([-math.inf, -math.inf]) == 0.0


def test_span_nll():
    assert span_nll([math.log(0.5), math.log(0.25)]) == pytest.approx(1.5 * math.log(2))
    assert span_nll([math.log(0.5), math.log(0.25)], length=6) == pytest.approx(0.5 * math.log(2))
    assert span_nll([]) is None
    assert span_nll([-math.inf, -1.0]) == math.inf


def test_fused_score():
    assert fused_score([1.0, 3.0], [1.0, 1.0]) == 2.0
    assert fused_score([1.0, 3.0], [3.0, 1.0]) == 1.5
    assert fused_score([1.0, None, 3.0], [1.0, 9.0, 1.0]) == 2.0
    assert fused_score([None], [1.0]) == math.inf
    assert fused_score([0.1, math.inf], [1.0, 1.0]) == math.inf
    nlls = [0.1, 0.2, 0.3, 1e-9]
    assert len({fused_score([nlls[i] for i in order], [1.0] * 4) for order in ([0, 1, 2, 3], [3, 1, 0, 2])}) == 1


def test_first_lowest():
    assert first_lowest([2.0, 1.0, 1.0]) == 1
    assert first_lowest([1.0 + 5e-7, 1.0]) == 0
    assert first_lowest([1.0 + 5e-6, 1.0]) == 1
