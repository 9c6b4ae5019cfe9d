"""`BranchLogitsProcessor` on hand-built scores; the examples. The end-to-end test is in test_word_by_word.py."""

from __future__ import annotations

import doctest
import math

import pytest
import torch
import transformers
from support.tiny import TOKENIZERS, tiny_model

import hf_adafuse
from hf_adafuse.logits_process import BranchLogitsProcessor
from hf_adafuse.stopping_criteria import MarginCriteria, WordBoundaryCriteria

NO = -math.inf
# The docstring's: token 1 is best, 3 as likely, then 0; 2 is forbidden.
SCORES = [0.1, 2.0, NO, 2.0]
PROMPT = torch.zeros((4, 3), dtype=torch.long)


def _process(branches, scores, num_ids=3, prompt_length=3):
    ids = torch.zeros((len(scores), num_ids), dtype=torch.long)
    return BranchLogitsProcessor(prompt_length, branches)(ids, torch.tensor(scores)).tolist()


def test_a_row_may_only_take_its_branch():
    expected = [[NO, 2.0, NO, NO], [NO, NO, NO, 2.0], [0.1, NO, NO, NO]]
    assert _process([0, 1, 2], [SCORES] * 3) == torch.tensor(expected).tolist()


def test_ties_rank_by_id():
    assert _process([0, 1, 2], [[1.0, 1.0, 1.0]] * 3) == [[1.0, NO, NO], [NO, 1.0, NO], [NO, NO, 1.0]]


def test_a_branch_beyond_the_possible_tokens_is_the_last_possible_one():
    expected = torch.tensor([[0.1, NO, NO, NO]] * 2).tolist()
    assert _process([3, 99], [SCORES] * 2) == expected
    # The rows are counted on their own: here the first has one possible token, the second three.
    assert _process([2, 2], [[NO, NO, 5.0], [3.0, 4.0, 5.0]]) == [[NO, NO, 5.0], [3.0, NO, NO]]


def test_a_row_without_possible_tokens_stays_so():
    assert _process([1], [[NO, NO]]) == [[NO, NO]]


@pytest.mark.parametrize("num_ids", [0, 2, 4, 10])
def test_other_steps_are_untouched(num_ids):
    scores = torch.randn(2, 5)
    ids = torch.zeros((2, num_ids), dtype=torch.long)
    assert torch.equal(BranchLogitsProcessor(3, [1, 2])(ids, scores), scores)


def test_scores_are_not_changed_in_place():
    scores = torch.tensor([SCORES] * 4)
    before = scores.clone()
    processed = BranchLogitsProcessor(3, [0, 1, 2, 3])(PROMPT, scores)
    assert torch.equal(scores, before)
    assert processed.data_ptr() != scores.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_gives_each_row_what_it_gives_alone(dtype):
    torch.manual_seed(0)
    scores = torch.randn(4, 50).to(dtype)  # bfloat16: with ties
    branches = [3, 0, 7, 1]
    together = BranchLogitsProcessor(3, branches)(PROMPT, scores)
    alone = [BranchLogitsProcessor(3, [b])(PROMPT[:1], scores[row : row + 1]) for row, b in enumerate(branches)]
    assert together.dtype == dtype
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("prompt_length", [-1, 2.0, None, True])
def test_prompt_length_is_checked(prompt_length):
    with pytest.raises(ValueError, match=r"`prompt_length` must be an integer of at least 0, but is .*input_ids.shape"):
        BranchLogitsProcessor(prompt_length, [0])


@pytest.mark.parametrize("branches", [[-1], [0, 1.5], [True], [None]])
def test_branches_are_checked(branches):
    with pytest.raises(ValueError, match=r"`branches` must be integers of at least 0, but is \["):
        BranchLogitsProcessor(3, branches)


def test_one_branch_per_row():
    with pytest.raises(ValueError, match=r"`branches` must be one per row of the batch, but is 2 for 4 rows\."):
        BranchLogitsProcessor(3, [0, 1])(PROMPT, torch.zeros(4, 5))


def test_generate_takes_the_branches_and_goes_on_greedily():
    tokenizer, model = TOKENIZERS["byte_level"](), tiny_model()
    inputs = tokenizer(["there was a cat"] * 3, return_tensors="pt", return_token_type_ids=False)
    length = inputs.input_ids.shape[1]
    ids = model.generate(
        **inputs, logits_processor=[BranchLogitsProcessor(length, [0, 1, 2])], do_sample=False, max_new_tokens=4
    )
    best = model(**inputs).logits[0, -1].topk(3).indices
    assert ids[:, length].tolist() == best.tolist()
    forced = torch.cat([inputs.input_ids, best[:, None]], dim=1)
    assert torch.equal(ids, model.generate(forced, do_sample=False, max_new_tokens=3, pad_token_id=2))


@pytest.mark.parametrize("name", ["BranchLogitsProcessor", "MarginCriteria", "WordBoundaryCriteria"])
def test_the_examples_run(name, monkeypatch):
    """The examples of the docstrings, with tiny models in place of those they name."""
    classes = {cls.__name__: cls for cls in (BranchLogitsProcessor, MarginCriteria, WordBoundaryCriteria)}
    for exported, cls in classes.items():
        monkeypatch.setattr(hf_adafuse, exported, cls, raising=False)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _: TOKENIZERS["byte_level"]())
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda _: tiny_model(seed=1))
    names: dict = {}
    for example in doctest.DocTestParser().get_examples(classes[name].__doc__):
        exec(example.source, names)
    results = {"BranchLogitsProcessor": "texts", "MarginCriteria": "candidates", "WordBoundaryCriteria": "words"}
    assert all(names[results[name]])
