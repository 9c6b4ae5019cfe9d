"""Tiny random models of every kind, by name, with the backend that runs each; cases of them."""

from __future__ import annotations

import functools

import torch
import transformers as hf

import hf_adafuse.members.model_handle
from hf_adafuse import AdaFuseConfig
from support.cases import Case
from support.tiny import TOKENIZERS, eos_ids, tiny_model

CPU = torch.device("cpu")
BYTES = TOKENIZERS["byte_level"]()
PROMPTS = ["Once upon a time", "She", "The capital of France"]
MANY, ONE, ONE_ROW = "recurrent (several tokens)", "recurrent", "recurrent (one row)"

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
    "bloom": (hf.BloomForCausalLM, hf.BloomConfig, _BIAS, "branch-rows"),
    "mpt": (
        hf.MptForCausalLM,
        hf.MptConfig,
        _TOKENS | dict(d_model=32, n_layers=2, n_heads=4, max_seq_len=96),
        "branch-rows",
    ),
    "gpt_neo": (
        hf.GPTNeoForCausalLM,
        hf.GPTNeoConfig,
        _TOKENS
        | dict(hidden_size=32, num_layers=2, num_heads=4, window_size=5, initializer_range=0.3)
        | dict(attention_types=[[["global", "local"], 1]], max_position_embeddings=128),
        "branch-rows",
    ),
    "falcon_alibi": (hf.FalconForCausalLM, hf.FalconConfig, _PLAIN | dict(alibi=True), "branch-rows"),
    "roformer": (hf.RoFormerForCausalLM, hf.RoFormerConfig, _ENCODER, MANY),
    "roberta": (hf.RobertaForCausalLM, hf.RobertaConfig, _ENCODER, "tree-attention"),
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
        "uncached",
    ),
    "openai_gpt": (
        hf.OpenAIGPTLMHeadModel,
        hf.OpenAIGPTConfig,
        _TOKENS | dict(n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3),
        "uncached",
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


def case_of(model, role="main", batch=3, n=6, branches=2, seed=1, places=None, **config):
    config = AdaFuseConfig(num_branches=branches, max_words=2, max_word_tokens=3, **config)
    members = [(model, BYTES), (tiny_model("llama", "characters", seed), TOKENIZERS["characters"]())]
    models, tokenizers = zip(*(members if role == "main" else members[::-1]), strict=True)
    return Case(list(models), list(tokenizers), config, PROMPTS[:batch], n, places)


def force(monkeypatch, backend):
    monkeypatch.setattr(hf_adafuse.members.model_handle, "choose_backend", lambda model, device: backend)
