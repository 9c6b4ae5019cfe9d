"""What people do around `generate()`: watermarks, guidance, GGUF files, training loops. It works as on any model."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from support.cases import Case
from support.hosts import TWO, ensemble, new_ids, oracle
from support.tiny import TOKENIZERS, tiny_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    SynthIDTextWatermarkingConfig,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkingConfig,
)

from hf_adafuse import enable_adafuse

SYNTH_ID = SynthIDTextWatermarkingConfig(ngram_len=5, keys=[654, 400, 836, 123, 340], skip_first_ngram_calls=True)
WATERMARKS = {
    "lefthash": WatermarkingConfig(bias=4.0),
    "selfhash": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash"),
    "dict": {"bias": 4.0, "greenlist_ratio": 0.4},
    "SynthID": SYNTH_ID,
    "SynthID, short": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[11, 22, 33, 44]),
}


def bound(case: Case):
    """The main model of a case, with all else bound to it."""
    return enable_adafuse(
        copy.deepcopy(case.models[0]),
        assistant_models=case.models[1:],
        assistant_tokenizers=case.tokenizers[1:],
        tokenizer=case.tokenizers[0],
        adafuse_config=case.config,
    )


def ordinary(case: Case, **options) -> list[list[int]]:
    """What the main model's own `generate()` gives for each prompt alone."""
    rows = []
    for prompt in case.prompts:
        ids = torch.tensor([case.tokenizers[0](prompt).input_ids])
        options = copy.deepcopy(options)
        output = case.models[0].generate(ids, max_new_tokens=case.max_new_tokens, do_sample=False, **options)
        rows.append(output[0, ids.shape[1] :].tolist())
    return rows


# Watermarks and guidance


@pytest.mark.parametrize("name", WATERMARKS)
def test_a_watermark_is_that_of_ordinary_generate(name):
    """An ensemble of one that does not branch."""
    case = ensemble(TWO[0], n=16, num_branches=1)
    assert new_ids(case, case.fast(watermarking_config=WATERMARKS[name])) == ordinary(
        case, watermarking_config=WATERMARKS[name]
    )


def test_a_watermark_acts_through_the_main_model():
    case = ensemble(*TWO, n=16)
    processor = WATERMARKS["lefthash"].construct_processor(case.models[0].config.vocab_size, "cpu")
    expected = oracle(case, lambda row, k, prompt: (lambda ids, scores: processor(ids, scores)) if k == 0 else None)
    assert new_ids(case, case.fast(watermarking_config=WATERMARKS["lefthash"])) == expected
    assert expected != oracle(case)


def test_synth_id_in_a_batch():
    case = ensemble(*TWO, n=24)
    rows = new_ids(case, case.fast(watermarking_config=SYNTH_ID))
    assert rows != new_ids(case, case.fast())
    for row, prompt in zip(rows, case.prompts, strict=True):
        alone = ensemble(*TWO, n=24, prompts=[prompt])
        assert new_ids(alone, alone.fast(watermarking_config=SYNTH_ID)) == [row]


def test_guidance_as_a_processor():
    """`guidance_scale` is refused: it would act on the main model alone. So does this, but it says so."""
    case = ensemble(TWO[0], n=16, num_branches=1)
    processor = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, case.models[0])
    guided = new_ids(case, case.fast(logits_processor=[processor]))
    assert guided == ordinary(case, guidance_scale=1.5)
    assert guided != ordinary(case)


# Training loops


@pytest.mark.parametrize("samples", [False, True])
def test_a_model_in_training(samples):
    """As trainers generate: prepared by accelerate, unwrapped, in training mode, all settings in one object."""
    from accelerate import Accelerator

    case, accelerator = ensemble(*TWO, n=12), Accelerator(cpu=True)
    model = bound(case)
    model.config.use_cache = False
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    wrapped.train()
    _, ids, mask = case.main_ids()
    settings = dict(max_new_tokens=12, do_sample=samples, temperature=0.9, top_p=1.0, top_k=0)
    own = dict(pad_token_id=case.tokenizers[0].pad_token_id, eos_token_id=model.generation_config.eos_token_id)
    config = GenerationConfig(**settings, **own)
    torch.manual_seed(0)
    with torch.no_grad():
        found = accelerator.unwrap_model(wrapped).generate(ids, attention_mask=mask, generation_config=config)
    assert wrapped.training
    torch.manual_seed(0)
    assert torch.equal(found, bound(case).generate(ids, attention_mask=mask, **settings))
    accelerator.backward(wrapped(input_ids=found, labels=found).loss)
    assert all(parameter.grad is not None for parameter in model.parameters())
    before = found if samples else ids
    optimizer.step()
    with torch.no_grad():  # of the weights as they are now
        again = accelerator.unwrap_model(wrapped).generate(before, generation_config=config)
    assert torch.equal(again[:, : before.shape[1]], before)


@pytest.mark.parametrize("k", [0, 1])
def test_gradient_checkpointing_is_refused_while_it_is_on(k):
    """Ordinary `generate()` forgets the text there, without an error; trainers switch it off before."""
    case = ensemble(*TWO)
    case.models = [copy.deepcopy(model) for model in case.models]
    expected = new_ids(case, case.fast())
    # Its name in newer versions of transformers.
    getattr(case.models[k], "activation_checkpointing_enable", case.models[k].gradient_checkpointing_enable)()
    assert new_ids(case, case.fast()) == expected
    case.models[k].train()
    with pytest.raises(ValueError, match="must keep its keys and values, but is in training mode with gradient check"):
        case.fast()
    case.models[k].eval()
    assert new_ids(case, case.fast()) == expected


# GGUF


def write_gguf(path, model, tokenizer) -> None:
    gguf = pytest.importorskip("gguf")
    writer, config = gguf.GGUFWriter(str(path), "llama"), model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    special = tokenizer.all_special_tokens
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in special else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokenizer.eos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    parts = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{ours}": f"blk.{layer}.{theirs}" for ours, theirs in parts.items()}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for ours, theirs in names.items():
        weight = model.state_dict()[f"{ours}.weight"].float()
        if count := heads.get(ours.rpartition(".")[2]):  # the file's order of rotary pairs
            weight = weight.reshape(count, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(f"{theirs}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_model_from_a_gguf_file(tmp_path):
    """As the main model and as an assistant; with its tokenizer, which the model's name alone does not give."""
    original, tokenizer = tiny_model("llama", "byte_level", 0), TOKENIZERS["byte_level"]()
    write_gguf(tmp_path / "tiny.gguf", original, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf").eval()
    loaded = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    for order in ([0, 1], [1, 0]):
        models, tokenizers = [original, tiny_model("qwen3", "sentencepiece", 1)], [tokenizer, loaded]
        case = ensemble(*TWO)
        expected = Case([models[k] for k in order], [case.tokenizers[k] for k in order], case.config, case.prompts, 12)
        models[0], tokenizers = model, [loaded, case.tokenizers[1]]
        case = Case([models[k] for k in order], [tokenizers[k] for k in order], case.config, case.prompts, 12)
        case.models[0].generation_config.eos_token_id = expected.models[0].generation_config.eos_token_id
        model.generation_config.eos_token_id = original.generation_config.eos_token_id
        assert new_ids(case, case.fast()) == new_ids(expected, expected.fast())
    ids = case.main_ids()[1]
    with pytest.raises(ValueError, match=r"(?s)`assistant_tokenizers\[0\]` must be a tokenizer, .* Pass it\."):
        enable_adafuse(copy.copy(case.models[0])).generate(ids, tokenizer=case.tokenizers[0], assistant_models=[model])
