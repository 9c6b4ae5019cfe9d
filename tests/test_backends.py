"""Every kind of model against the oracle, on the backend that the self-test finds for it; the backends against each
other on models that all of them can run; what the self-test costs and refuses.
"""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
import transformers as hf
from cases import Case, assert_equal, random_case
from test_forward_counts import counts
from test_toys import run, toy, word_tokenizer
from tiny import TOKENIZERS, eos_ids, tiny_model
from transformers import DynamicCache, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput, CausalLMOutputWithPast

import hf_adafuse.ensemble
from hf_adafuse import AdaFuseConfig, enable_adafuse
from hf_adafuse.self_test import choose_backend

CPU = torch.device("cpu")
BYTES = TOKENIZERS["byte_level"]()
PROMPTS = ["Once upon a time", "She", "The capital of France"]
MANY, ONE, ONE_ROW = "tokenwise (several tokens)", "tokenwise", "tokenwise (one row)"

_SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, initializer_range=0.3)
_TOKENS = dict(vocab_size=len(BYTES), bos_token_id=0, eos_token_id=0, pad_token_id=2, tie_word_embeddings=False)
_PLAIN = _SMALL | _TOKENS
_GROUPED = _PLAIN | dict(num_key_value_heads=2)
_ENCODER = _PLAIN | dict(is_decoder=True, max_position_embeddings=128)
_STATE = _TOKENS | dict(hidden_size=32, num_hidden_layers=2, initializer_range=0.3)
_MAMBA_LAYERS = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=4)
_EXPERTS = dict(num_experts_per_tok=1, num_local_experts=2)
_BIAS = _TOKENS | dict(hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)

# Name: class, config, backend.
MODELS = {
    "bloom": (hf.BloomForCausalLM, hf.BloomConfig, _BIAS, "rows"),
    "mpt": (hf.MptForCausalLM, hf.MptConfig, _TOKENS | dict(d_model=32, n_layers=2, n_heads=4, max_seq_len=96), "rows"),
    "gpt_neo": (
        hf.GPTNeoForCausalLM,
        hf.GPTNeoConfig,
        _TOKENS
        | dict(hidden_size=32, num_layers=2, num_heads=4, window_size=5, initializer_range=0.3)
        | dict(attention_types=[[["global", "local"], 1]], max_position_embeddings=128),
        "rows",
    ),
    "falcon_alibi": (hf.FalconForCausalLM, hf.FalconConfig, _PLAIN | dict(alibi=True), "rows"),
    "roformer": (hf.RoFormerForCausalLM, hf.RoFormerConfig, _ENCODER, MANY),
    "roberta": (hf.RobertaForCausalLM, hf.RobertaConfig, _ENCODER, "packed"),
    "bart": (
        hf.BartForCausalLM,
        hf.BartConfig,
        _TOKENS
        | dict(d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=32, init_std=0.3)
        | dict(forced_eos_token_id=None),
        MANY,
    ),
    "mamba": (hf.MambaForCausalLM, hf.MambaConfig, _STATE | dict(state_size=4), ONE),
    "mamba2": (
        hf.Mamba2ForCausalLM,
        hf.Mamba2Config,
        _STATE | dict(state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=4),
        MANY,
    ),
    "rwkv": (
        hf.RwkvForCausalLM,
        hf.RwkvConfig,
        _TOKENS | dict(hidden_size=32, num_hidden_layers=2, attention_hidden_size=32, intermediate_size=48),
        ONE_ROW,
    ),
    "jamba": (
        hf.JambaForCausalLM,
        hf.JambaConfig,
        _GROUPED
        | dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=2)
        | dict(num_experts_per_tok=1, mamba_d_state=4, mamba_d_conv=3, mamba_dt_rank=4, use_mamba_kernels=False),
        ONE,
    ),
    "bamba": (hf.BambaForCausalLM, hf.BambaConfig, _GROUPED | _MAMBA_LAYERS | dict(attn_layer_indices=[1]), MANY),
    "qwen3_next": (
        hf.Qwen3NextForCausalLM,
        hf.Qwen3NextConfig,
        _GROUPED
        | dict(head_dim=8, layer_types=["linear_attention", "full_attention"], linear_conv_kernel_dim=3)
        | dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
        | dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16),
        MANY,
    ),
    "falcon_h1": (
        hf.FalconH1ForCausalLM,
        hf.FalconH1Config,
        _GROUPED | _MAMBA_LAYERS | dict(head_dim=8, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_conv=3),
        MANY,
    ),
    "lfm2": (
        hf.Lfm2ForCausalLM,
        hf.Lfm2Config,
        _GROUPED | dict(layer_types=["conv", "full_attention"], conv_L_cache=3, block_multiple_of=8),
        MANY,
    ),
    "minimax": (
        hf.MiniMaxForCausalLM,
        hf.MiniMaxConfig,
        _GROUPED | _EXPERTS | dict(head_dim=8, layer_types=["linear_attention", "full_attention"], block_size=4),
        ONE,
    ),
    "llama4": (
        hf.Llama4ForCausalLM,
        hf.Llama4TextConfig,
        _GROUPED
        | _EXPERTS
        | dict(head_dim=8, layer_types=["chunked_attention", "full_attention"], attention_chunk_size=5)
        | dict(intermediate_size_mlp=32),
        MANY,
    ),
    "recurrent_gemma": (
        hf.RecurrentGemmaForCausalLM,
        hf.RecurrentGemmaConfig,
        _GROUPED | dict(num_hidden_layers=3, num_key_value_heads=1, lru_width=32, attention_window_size=16, head_dim=8),
        "reencode",
    ),
    "openai_gpt": (
        hf.OpenAIGPTLMHeadModel,
        hf.OpenAIGPTConfig,
        _TOKENS | dict(n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3),
        "reencode",
    ),
}


@functools.cache
def model_of(name: str):
    """A tiny random model for the byte-level tokenizer, with the peaked output layer of `tiny_model`."""
    cls, config, settings, _ = MODELS[name]
    torch.manual_seed(1)
    return peaked(cls(config(**settings)))


def peaked(model):
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head.copy_(torch.randn(head.shape) * 1.5)
        head[eos_ids(BYTES)] *= 1.4
    model.generation_config.eos_token_id = eos_ids(BYTES)
    model.generation_config.pad_token_id = BYTES.pad_token_id
    return model.eval()


def case_of(model, role="main", batch=3, n=6, branches=2, seed=1, **config):
    config = AdaFuseConfig(num_branches=branches, max_words=2, max_word_tokens=3, **config)
    members = [(model, BYTES), (tiny_model("llama", "characters", seed), TOKENIZERS["characters"]())]
    models, tokenizers = zip(*(members if role == "main" else members[::-1]), strict=True)
    return Case(list(models), list(tokenizers), config, PROMPTS[:batch], n)


def force(monkeypatch, backend):
    monkeypatch.setattr(hf_adafuse.ensemble, "choose_backend", lambda model, device: backend)


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
