"""Every kind of model against the oracle, on the backend that the self-test finds for it; the backends against each
other on models that all of them can run; what the self-test costs and refuses.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from cases import assert_equal, counts, random_case
from kinds import BYTES, CPU, MANY, MODELS, ONE, ONE_ROW, case_of, force, model_of, peaked
from tiny import TOKENIZERS, tiny_model
from toys import run, toy, word_tokenizer
from transformers import DynamicCache, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput, CausalLMOutputWithPast

from hf_adafuse import AdaFuseConfig, enable_adafuse
from hf_adafuse.trees.self_test import choose_backend


@pytest.mark.parametrize("role", ["main", "assistant"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_every_kind_equals_the_oracle(name, role, monkeypatch, look_ahead):
    """Alone, with the first member proposing ahead; in a batch, with linear layers that multiply by parts."""
    model, backend = model_of(name), MODELS[name][-1]
    assert choose_backend(model, CPU) == backend
    with warnings.catch_warnings():
        if backend == "reencode":
            warnings.filterwarnings("ignore", message=".* reads the whole text again", category=UserWarning)
        look_ahead(2, is_flat=True)
        assert_equal(case_of(model, role, batch=1))
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        assert_equal(case_of(model, role, batch=3))


@pytest.mark.parametrize("backend", ["rows", MANY, ONE, ONE_ROW, "reencode"])
@pytest.mark.parametrize("number", [1, 4, 13])
def test_each_backend_equals_the_oracle(backend, number, monkeypatch):
    """On models that every backend can run: windows, learned positions and rotary ones, one to four members."""
    force(monkeypatch, backend)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* reads the whole text again", category=UserWarning)
        assert_equal(random_case(number))


# What it costs


def test_rows_score_all_candidates_of_a_round_in_one_pass(monkeypatch):
    """The counts that `test_forward_counts` derives for the packed tree hold for rows, too."""
    force(monkeypatch, "rows")
    tokenizer = word_tokenizer(["So", "It", "is", "was", "red"])
    end = {"red": {"</s>": 0.99}}
    main = toy(tokenizer, {"It": {"is": 0.5, "was": 0.4}, "is": {"red": 0.9}, "was": {"red": 0.99}} | end)
    other = toy(tokenizer, {"It": {"is": 0.05, "was": 0.9}, "is": {"red": 0.9}, "was": {"red": 0.99}} | end)
    output = run([(main, tokenizer), (other, tokenizer)], AdaFuseConfig(max_words=1, num_branches=1))
    assert [committed.text for committed in output.rounds[0]] == [" was", " red", ""]
    assert counts(output) == [(1 + 1 + 2, 2 + 3), (1 + 1 + 1, 2 + 2)]


@pytest.mark.parametrize("name", ["bloom", "qwen3_next"])
def test_what_was_committed_is_not_read_again(name):
    """Alone and without branches, a model reads each token once; with snapshots, a few after the last one twice."""
    case = case_of(model_of(name), n=16, branches=1, batch=1, margin_threshold=0.0)
    case.models, case.tokenizers = case.models[:1], case.tokenizers[:1]
    output = case.fast()
    ((_, tokens),) = counts(output)
    assert tokens <= len(case.main_ids()[0][0]) + 16 + 3


# The self-test


def passes(model, call):
    seen = []
    handle = model.register_forward_pre_hook(lambda *_: seen.append(1))
    try:
        call()
    finally:
        handle.remove()
    return len(seen)


def test_the_self_test_is_short_and_remembered():
    config = copy.deepcopy(tiny_model().config)
    config.max_position_embeddings = 509  # of which there is no other
    model = LlamaForCausalLM(config).eval()
    assert 1 <= passes(model, lambda: choose_backend(model, CPU)) <= 5
    for known in (model, copy.deepcopy(model), enable_adafuse(copy.copy(model)), LlamaForCausalLM(config).eval()):
        assert passes(known, lambda known=known: choose_backend(known, CPU)) == 0
    assert passes(model.to(torch.bfloat16), lambda: choose_backend(model, CPU)) > 0


def test_the_self_test_is_not_in_the_statistics():
    config = copy.deepcopy(tiny_model().config)
    config.max_position_embeddings = 508
    case = case_of(peaked(LlamaForCausalLM(config)))
    assert counts(case.fast()) == counts(case.fast())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "bloom", "jamba", "qwen3_next"])
def test_the_same_backend_in_half_precision(name, dtype):
    model = copy.deepcopy(tiny_model() if name == "llama" else model_of(name)).to(dtype)
    assert choose_backend(model, CPU) == ("packed" if name == "llama" else MODELS[name][-1])


class Forgetful(LlamaForCausalLM):
    """As remote code may be: it takes every argument, and knows neither masks nor caches."""

    def forward(self, input_ids, **kwargs):
        return CausalLMOutput(logits=super().forward(input_ids, use_cache=False).logits)


class Bare(LlamaForCausalLM):
    """As remote code may be, too: ids in, a tuple out."""

    def forward(self, input_ids):
        return (super().forward(input_ids, use_cache=False).logits,)


class Legacy(LlamaForCausalLM):
    """Its cache is a tuple of keys and values per layer, as it was before transformers had caches; it has no masks."""

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        past = DynamicCache(ddp_cache_data=past_key_values or ())
        output = super().forward(input_ids, past_key_values=past, use_cache=use_cache)
        layers = tuple((layer.keys, layer.values) for layer in past.layers)
        return CausalLMOutputWithPast(logits=output.logits, past_key_values=layers if use_cache else None)


class Lying(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = torch.randn_like(output.logits)
        return output


class Broken(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        raise RuntimeError("the weights are on fire")


class Empty(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * torch.nan
        return output


def of_class(cls):
    return peaked(cls(copy.deepcopy(tiny_model().config)))


@pytest.mark.parametrize("role", ["main", "assistant"])
@pytest.mark.parametrize("cls", [Forgetful, Bare])
def test_a_model_that_remembers_nothing_is_read_again_with_one_warning(cls, role, look_ahead):
    model = of_class(cls)
    plain = LlamaForCausalLM(model.config).eval()
    plain.load_state_dict(model.state_dict())

    def case(batch):
        made = case_of(model, role, batch)
        made.slow = case_of(plain, role, batch).slow  # the oracle asks for what `Bare` does not give
        return made

    name = "the main model" if role == "main" else rf"assistant 1 \({cls.__name__}\)"
    with pytest.warns(UserWarning, match=f"{name} .*reads the whole text again") as caught:
        assert_equal(case(batch=3))
    assert len(caught) == 1
    look_ahead(2)
    with warnings.catch_warnings():  # `fast` copies the main model: another one, that warns too
        warnings.filterwarnings("ignore" if role == "main" else "error", message=".* reads the whole text again")
        assert_equal(case(batch=1))


@pytest.mark.parametrize("role", ["main", "assistant"])
def test_a_model_with_a_cache_of_its_own_kind_goes_on_from_it(role):
    model = of_class(Legacy)
    assert choose_backend(model, CPU) == MANY
    for batch in (1, 3):
        assert_equal(case_of(model, role, batch))


@pytest.mark.parametrize(
    ("cls", "match"),
    [
        (Lying, "two plain forward passes over one text differ"),
        (Broken, "a plain forward pass raises RuntimeError: the weights are on fire"),
        (Empty, "a plain forward pass gives logits that are NaN"),
    ],
)
def test_a_model_that_no_backend_can_run_is_refused(cls, match):
    tokenizer = TOKENIZERS["characters"]()
    main, assistant = tiny_model("llama", "characters"), of_class(cls)
    with pytest.raises(ValueError, match=rf"but for assistant 1 \({cls.__name__}\) .*{match}.* Choose another model"):
        enable_adafuse(copy.copy(main), [assistant], [BYTES], tokenizer)
    with pytest.raises(ValueError, match=f"but for the main model .*{match}"):
        case_of(assistant).fast()


# Caches given and returned


@pytest.mark.parametrize("role", ["main", "assistant"])
@pytest.mark.parametrize("name", ["bloom", "qwen3_next", "bart"])
def test_continuing_from_the_returned_cache(name, role):
    """Law 7, with keys (bloom) and without: then the cache holds the ids alone, and the text is read again."""
    for seed in range(9):
        case = case_of(model_of(name), role, batch=1, n=12, seed=seed)
        full = case.fast()
        ends = [sum(r.num_tokens for r in full.rounds[0][: k + 1]) for k in range(len(full.rounds[0]))]
        if len(ends) > 2:
            break
    assert len(ends) > 2
    case.max_new_tokens = ends[len(ends) // 2 - 1]
    first = case.fast()
    assert first.past_key_values.get_seq_length() == (
        0 if role == "main" and name != "bloom" else first.sequences.shape[1] - 1
    )
    case.max_new_tokens = 12 - case.max_new_tokens
    case.main_ids = lambda: ([first.sequences[0].tolist()], first.sequences, torch.ones_like(first.sequences))
    second = case.fast(past_key_values=first.past_key_values)
    assert torch.equal(second.sequences, full.sequences)


@pytest.mark.parametrize("name", ["mamba", "rwkv"])
def test_a_model_that_takes_no_past_key_values_returns_none(name):
    assert case_of(model_of(name), batch=1).fast().past_key_values is None


@pytest.mark.parametrize("name", ["qwen3_next", "bart", "mamba"])
def test_a_cache_that_cannot_be_gone_on_from_is_refused(name):
    model = model_of(name)
    case = case_of(model, batch=1)
    ids = case.main_ids()[1]
    argument = "cache_params" if name == "mamba" else "past_key_values"
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :2], use_cache=True, **{argument: past})
    with pytest.raises(ValueError, match="`past_key_values` must be"):
        case.fast(**{argument: past})
