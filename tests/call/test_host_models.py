"""Models as a user has them: low precision, sliding windows, attention implementations, offloaded, compiled."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from support.cases import Case
from support.hosts import LONG, PROMPTS, TWO, ensemble, new_ids, oracle
from support.tiny import TOKENIZERS, eos_ids, tiny_model
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hf_adafuse import AdaFuseConfig, enable_adafuse
from hf_adafuse.trees.backend_probe import choose_backend


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_low_precision(dtype):
    for seed in (0, 1):
        main = copy.deepcopy(tiny_model("llama", "byte_level", seed)).to(dtype)
        case = ensemble(f"llama/byte_level/{seed}", prompts=PROMPTS[:1], n=10, num_branches=1)
        case.models = [main]
        _, ids, mask = case.main_ids()
        greedy = main.generate(input_ids=ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
        output = case.fast(output_scores=True)
        assert torch.equal(output.sequences, greedy)
        assert all(step.dtype is torch.float32 for step in output.scores)
        # NLL is in float32: it is not on bfloat16's grid, and is what the scores say.
        logs = [
            step[0].log_softmax(-1)[token].item()
            for step, token in zip(output.scores, new_ids(case, output)[0], strict=True)
        ]
        done = 0
        for committed in output.rounds[0]:
            if committed.is_whole:
                nll = -sum(logs[done : done + committed.num_tokens]) / committed.num_tokens
                assert math.isclose(committed.candidates[committed.winner].nlls[0], nll, abs_tol=1e-5)
            done += committed.num_tokens
    mixed = ensemble(*TWO, n=6)
    mixed.models = [copy.deepcopy(mixed.models[0]).to(dtype), mixed.models[1]]
    assert all(len(row) == 6 for row in new_ids(mixed, mixed.fast()))


def with_head(model, tokenizer):
    """The same peaked output layer as in `tiny_model`."""
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head.copy_(torch.randn(head.shape) * 1.5)
    model.generation_config.eos_token_id = eos_ids(tokenizer)
    return model.eval()


def gpt_oss(tokenizer):
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=6,
        max_position_embeddings=512, initializer_range=0.4, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=eos_ids(tokenizer), layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, attn_implementation="eager",
    )  # fmt: skip
    return with_head(GptOssForCausalLM(config), tokenizer)


def windowed_qwen3(tokenizer):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, use_sliding_window=True, sliding_window=5, initializer_range=0.4,
        layer_types=["full_attention", "sliding_attention"], max_position_embeddings=512, tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=eos_ids(tokenizer),
    )  # fmt: skip
    return with_head(Qwen3ForCausalLM(config), tokenizer)


WINDOWED = {
    "mistral": lambda tokenizer: tiny_model("mistral", "byte_level", 1),
    "gemma3": lambda tokenizer: tiny_model("gemma3", "byte_level", 0),
    "qwen3": windowed_qwen3,
    "gpt_oss": gpt_oss,
}


@pytest.mark.parametrize("name", WINDOWED)
def test_beyond_the_sliding_window(name):
    tokenizer = TOKENIZERS["byte_level"]()
    model = WINDOWED[name](tokenizer)
    window = model.config.sliding_window
    assistant, characters = tiny_model("mistral", "sentencepiece", 2), TOKENIZERS["sentencepiece"]()
    for members in ([model, assistant], [assistant, model]):
        tokenizers = [characters, tokenizer] if members[0] is assistant else [tokenizer, characters]
        case = Case(members, tokenizers, AdaFuseConfig(max_word_tokens=3), list(LONG), 6)
        assert min(map(len, case.main_ids()[0])) > 2 * window
        assert new_ids(case, case.fast()) == oracle(case)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2", "gemma3"])
def test_eager_equals_sdpa(architecture):
    found = []
    for attention in ("sdpa", "eager"):
        case = ensemble(f"{architecture}/byte_level/1", *TWO[1:], prompts=LONG, n=8)
        case.models[0] = tiny_model(architecture, "byte_level", 1, attention=attention)
        assert case.models[0].config._attn_implementation == attention
        found.append(new_ids(case, case.fast()))
    assert found[0] == found[1] == oracle(case)


@pytest.mark.parametrize("role", ["main", "assistant"])
@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload", "device_map"])
def test_offloaded_and_dispatched_models(how, role, tmp_path):
    case = ensemble(*TWO, n=5)
    expected = case.fast()
    index = 0 if role == "main" else 1
    model = copy.deepcopy(case.models[index])
    if how == "cpu_offload":
        cpu_offload(model, execution_device=torch.device("cpu"))
    elif how == "disk_offload":
        disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    else:
        dispatch_model(model, {"": "cpu"}, force_hooks=True)
    if how != "device_map":
        assert model.device.type == "meta"
    case.models[index] = model
    if role == "main":
        # Not a copy of the model: accelerate's hooks hold the model that they were put on.
        _, ids, mask = case.main_ids()
        output = enable_adafuse(model).generate(
            input_ids=ids, attention_mask=mask, tokenizer=case.tokenizers[0], assistant_models=case.models[1:],
            assistant_tokenizers=case.tokenizers[1:], adafuse_config=case.config, max_new_tokens=5, do_sample=False,
            return_dict_in_generate=True,
        )  # fmt: skip
    else:
        output = case.fast()
    assert torch.equal(output.sequences, expected.sequences)
    assert [[r.text for r in rounds] for rounds in output.rounds] == [
        [r.text for r in rounds] for rounds in expected.rounds
    ]


@pytest.mark.slow
def test_a_compiled_model_runs_all_passes_but_the_prompt_s_compiled():
    """What changes from pass to pass, the columns and the number of tokens, needs no graph of its own."""
    compiled_passes = []

    def backend(graph, example_inputs):
        def run(*args):
            compiled_passes.append(1)
            return graph.forward(*args)

        return run

    tokenizer = TOKENIZERS["byte_level"]()
    main, assistant = tiny_model("llama", "byte_level", 0), copy.copy(tiny_model("llama", "byte_level", 1))
    torch._dynamo.reset()
    assistant.forward = torch.compile(assistant.forward, backend=backend)
    choose_backend(assistant, torch.device("cpu"))
    compiled_passes.clear()
    output = enable_adafuse(copy.copy(main)).generate(
        **tokenizer("She", return_tensors="pt"), tokenizer=tokenizer, assistant_models=[assistant],
        assistant_tokenizers=[tokenizer], adafuse_config=AdaFuseConfig(num_branches=3), max_new_tokens=60,
        do_sample=False, return_dict_in_generate=True,
    )  # fmt: skip
    assert len(compiled_passes) == output.stats["members"][1]["forward_passes"] - 1 > 20
