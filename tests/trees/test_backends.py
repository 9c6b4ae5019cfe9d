"""Every kind of model against the oracle, on the backend that the self-test finds for it; the backends against each
other on models that all of them can run; what they cost, and their caches.
"""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from support.cases import assert_equal, counts, random_case
from support.kinds import CPU, MANY, MODELS, ONE, ONE_ROW, case_of, force, model_of
from support.releases import STATE_NAME, cache_of, with_cache
from support.tiny import TOKENIZERS, tiny_model
from support.toys import run, toy, word_tokenizer
from transformers import DynamicCache

from hf_adafuse import AdaFuseConfig, enable_adafuse
from hf_adafuse.transformers_compat import CACHE_NAME
from hf_adafuse.trees import kv_cache_backend
from hf_adafuse.trees.backend_probe import choose_backend
from hf_adafuse.trees.pass_policy import Policy

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("role", ["main", "assistant"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_every_kind_equals_the_oracle(name, role, monkeypatch, look_ahead):
    """Alone, with the first member proposing ahead; in a batch, with linear layers that multiply by parts;
    in one with fewer places."""
    model, backend = model_of(name), MODELS[name][-1]
    assert choose_backend(model, CPU) == backend
    with warnings.catch_warnings():
        if backend == "uncached":
            warnings.filterwarnings("ignore", message=".* reads the whole text again", category=UserWarning)
        look_ahead(2, is_flat=True)
        assert_equal(case_of(model, role, batch=1))
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        assert_equal(case_of(model, role, batch=3))
        assert_equal(case_of(model, role, batch=4, places=2))


@pytest.mark.parametrize("backend", ["branch-rows", MANY, ONE, ONE_ROW, "uncached"])
@pytest.mark.parametrize("number", [1, 4, 13])
def test_each_backend_equals_the_oracle(backend, number, monkeypatch):
    """On models that every backend can run: windows, learned positions and rotary ones, one to four members."""
    force(monkeypatch, backend)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* reads the whole text again", category=UserWarning)
        assert_equal(random_case(number))


def test_rows_score_all_candidates_of_a_round_in_one_pass(monkeypatch):
    """The counts that `test_forward_counts` derives for tree attention hold for branch rows, too."""
    force(monkeypatch, "branch-rows")
    tokenizer = word_tokenizer(["So", "It", "is", "was", "red"])
    end = {"red": {"</s>": 0.99}}
    main = toy(tokenizer, {"It": {"is": 0.5, "was": 0.4}, "is": {"red": 0.9}, "was": {"red": 0.99}} | end)
    other = toy(tokenizer, {"It": {"is": 0.05, "was": 0.9}, "is": {"red": 0.9}, "was": {"red": 0.99}} | end)
    output = run([(main, tokenizer), (other, tokenizer)], AdaFuseConfig(max_words=1, num_branches=1))
    assert [committed.text for committed in output.rounds[0]] == [" was", " red", ""]
    assert counts(output) == [(1 + 1 + 2, 2 + 3), (1 + 1 + 1, 2 + 2)]


@pytest.mark.parametrize("role", ["main", "assistant"])
@pytest.mark.parametrize(
    "name", [name for name, kind in MODELS.items() if kind[-1] in ("tree-attention", "branch-rows")]
)
def test_prompts_that_are_read_in_parts_equal_the_oracle(name, role, monkeypatch):
    monkeypatch.setattr(Policy, "most_prompt_tokens", 6)
    monkeypatch.setattr(kv_cache_backend, "_LEAST_PROMPT_COLUMNS", 2)
    model = model_of(name)
    assert_equal(case_of(model, role, batch=1))
    assert_equal(case_of(model, role, batch=3))
    assert_equal(case_of(model, role, batch=4, places=2))


def test_a_pass_over_long_prompts_holds_so_many_tokens():
    """Its activations are bounded, however long the prompts are, and however many there are."""
    model, tokenizer = tiny_model("llama", "characters", 1), TOKENIZERS["characters"]()
    sizes = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    prompts = [[5 + (row + column) % 50 for column in range(1500)] for row in range(4)]
    mask = [[1] * 1500] * 4
    inputs = {"input_ids": torch.tensor(prompts), "attention_mask": torch.tensor(mask)}
    try:
        enable_adafuse(model).generate(**inputs, adafuse_config={"max_words": 1}, tokenizer=tokenizer, max_new_tokens=1)
    finally:
        hook.remove()
    assert sizes[:3] == [2048, 2048, 1904] and max(sizes[3:]) < 2048


@pytest.mark.parametrize("name", ["bloom", "qwen3_next"])
def test_what_was_committed_is_not_read_again(name):
    """Alone and without branches, a model reads each token once. One with a recurrent state reads a few after the last
    one twice."""
    case = case_of(model_of(name), n=16, branches=1, batch=1, margin_threshold=0.0)
    case.models, case.tokenizers = case.models[:1], case.tokenizers[:1]
    output = case.fast()
    ((_, tokens),) = counts(output)
    assert tokens <= len(case.main_ids()[0][0]) + 16 + 3


@pytest.mark.parametrize("role", ["main", "assistant"])
@pytest.mark.parametrize("name", ["bloom", "qwen3_next", "bart", *(["mamba"] if CACHE_NAME == "cache" else [])])
def test_continuing_from_the_returned_cache(name, role):
    """Law 7, with keys (bloom) and without: then the cache holds the ids alone, and the text is read again."""
    for seed in range(30):
        case = case_of(model_of(name), role, batch=1, n=12, seed=seed)
        full = case.fast()
        ends = [sum(r.num_tokens for r in full.rounds[0][: k + 1]) for k in range(len(full.rounds[0]))]
        if len(ends) > 2:
            break
    assert len(ends) > 2
    case.max_new_tokens = ends[len(ends) // 2 - 1]
    first = case.fast()
    assert cache_of(first).get_seq_length() == (
        0 if role == "main" and name != "bloom" else first.sequences.shape[1] - 1
    )
    case.max_new_tokens = 12 - case.max_new_tokens
    case.main_ids = lambda: ([first.sequences[0].tolist()], first.sequences, torch.ones_like(first.sequences))
    second = case.fast(**with_cache(cache_of(first)))
    assert torch.equal(second.sequences, full.sequences)


@pytest.mark.parametrize("role", ["main", "assistant"])
@pytest.mark.parametrize("name", ["bloom", "qwen3_next", "bart", *(["mamba"] if CACHE_NAME == "cache" else [])])
def test_another_text_than_that_of_the_returned_cache(name, role):
    """With keys (bloom) what both begin with is kept; without, all of it is read."""
    case = case_of(model_of(name), role, n=8)
    cache = cache_of(case.fast())
    case.prompts = ["Once upon a tree", "She was there", "The capital of Peru is"][: len(case.prompts)]
    assert torch.equal(case.fast(**with_cache(cache)).sequences, case.fast().sequences)


@pytest.mark.parametrize("name", ["mamba", "rwkv"])
def test_a_model_whose_forward_takes_no_such_argument_returns_no_cache(name):
    takes_it = CACHE_NAME in inspect.signature(type(model_of(name)).forward).parameters  # Mamba since transformers 5.24
    assert takes_it == (name == "mamba" and CACHE_NAME == "cache")
    assert (cache_of(case_of(model_of(name), batch=1).fast()) is not None) == takes_it


@pytest.mark.parametrize("name", ["qwen3_next", "bart", "mamba"])
def test_a_cache_that_cannot_be_gone_on_from_is_refused(name):
    model = model_of(name)
    case = case_of(model, batch=1)
    ids = case.main_ids()[1]
    argument = STATE_NAME if name == "mamba" else CACHE_NAME
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :2], use_cache=True, **{argument: past})
    with pytest.raises(ValueError, match=f"`{CACHE_NAME}` must be"):
        case.fast(**{argument: past})
