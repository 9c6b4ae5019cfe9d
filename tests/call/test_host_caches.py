"""Caches given and returned, low precision, attention implementations, sliding windows, offloaded weights."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from cases import Case
from hosts import PROMPTS, TWO, ensemble, new_ids, oracle
from tiny import TOKENIZERS, eos_ids, tiny_model
from transformers import DynamicCache, GptOssConfig, GptOssForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hf_adafuse import AdaFuseConfig, disable_adafuse, enable_adafuse
from hf_adafuse.trees.self_test import choose_backend

LONG = (
    "Two foxes jump over 17 lazy dogs, again, and then he sat.",
    "My old green bus is big, but Zoe ran home before 9.",
)


class Passes:
    """The widths of the forward passes of models, by model, while open."""

    def __init__(self, models):
        self.widths = [[] for _ in models]
        self.hooks = [
            model.register_forward_pre_hook(
                lambda _, args, kwargs, widths=widths: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
            )
            for model, widths in zip(models, self.widths, strict=True)
        ]

    def __enter__(self):
        return self.widths

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()


def call(case, ids, mask, n, **kwargs):
    return enable_adafuse(copy.copy(case.models[0])).generate(
        input_ids=ids, attention_mask=mask, tokenizer=case.tokenizers[0], assistant_models=case.models[1:],
        assistant_tokenizers=case.tokenizers[1:], adafuse_config=case.config, max_new_tokens=n, do_sample=False,
        return_dict_in_generate=True, **kwargs,
    )  # fmt: skip


@pytest.mark.parametrize("with_config", [False, True], ids=["plain", "by_config"])
@pytest.mark.parametrize("main", ["llama/byte_level/0", "mistral/byte_level/1", "gemma3/sentencepiece/0"])
def test_past_key_values_of_the_caller(main, with_config):
    case = ensemble(main, "gpt2/byte_level/1", prompts=LONG, n=8)
    _, ids, mask = case.main_ids()
    columns = ids.shape[1] - 3
    model = case.models[0]
    past = DynamicCache(config=model.config) if with_config else DynamicCache()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, :columns]
    with torch.no_grad():
        model(ids[:, :columns], attention_mask=mask[:, :columns], position_ids=positions, past_key_values=past)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in past.layers]
    expected = case.fast()
    output = case.fast(past_key_values=past)
    assert torch.equal(output.sequences, expected.sequences)
    saved = expected.stats["members"][0]["tokens_run"] - output.stats["members"][0]["tokens_run"]
    assert saved == mask[:, :columns].sum()
    assert past.get_seq_length() == columns
    for layer, (keys, values) in zip(past.layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


@pytest.mark.parametrize("num_cached", [2, 5, 8])
def test_past_key_values_with_padding_in_every_row(num_cached):
    """As in ordinary `generate()`; also where the cache holds nothing but padding."""
    case = ensemble("gpt2/byte_level/0", "llama/byte_level/1", prompts=LONG[:1], n=8)
    _, ids, mask = case.main_ids()
    ids, mask = (torch.nn.functional.pad(tensor, (3, 0)) for tensor in (ids, mask))
    past, columns = DynamicCache(), slice(num_cached)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, columns]
    with torch.no_grad():
        case.models[0](ids[:, columns], attention_mask=mask[:, columns], position_ids=positions, past_key_values=past)
    output = call(case, ids, mask, 8, past_key_values=past)
    assert torch.equal(output.sequences, call(case, ids, mask, 8).sequences)


CONTINUED = {
    "one": ("llama/byte_level/1",),
    "window": ("mistral/sentencepiece/2",),
    "two": ("gemma3/sentencepiece/2", "qwen3/byte_level/1"),
    "three": ("llama/byte_level/2", "mistral/sentencepiece/1", "gpt2/characters/0"),
}


def round_ends(output, row=0):
    sizes = [committed.num_tokens for committed in output.rounds[row]]
    return [sum(sizes[: i + 1]) for i in range(len(sizes))]


@pytest.mark.parametrize("members", CONTINUED.values(), ids=CONTINUED)
def test_continuing_from_the_returned_cache(members):
    """Law 7."""
    case = ensemble(*members, prompts=LONG[:1], n=14, max_word_tokens=3, max_words=2)
    _, ids, mask = case.main_ids()
    full = call(case, ids, mask, 14)
    n = round_ends(full)[-2]
    assert n >= 4
    first = call(case, ids, mask, n)
    cache = first.past_key_values
    assert cache.get_seq_length() == first.sequences.shape[1] - 1
    saved = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    with Passes(case.models) as widths:
        second = call(case, first.sequences, torch.ones_like(first.sequences), 14 - n, past_key_values=cache)
    assert torch.equal(second.sequences, full.sequences)
    spans = [committed.text for committed in first.rounds[0] + second.rounds[0]]
    assert spans == [committed.text for committed in full.rounds[0]]
    # Nothing committed is run again: the main model reads its last token, an assistant what it had not run yet.
    assert widths[0][0] == 1
    last = first.rounds[0][-1].text
    for passes, tokenizer in zip(widths[1:], case.tokenizers[1:], strict=True):
        assert passes[0] <= len(tokenizer(last, add_special_tokens=False).input_ids) + 1
    for k in range(len(members)):
        parts = [output.stats["members"][k]["tokens_run"] for output in (first, second, full)]
        assert parts[0] + parts[1] <= parts[2] + 3 * 3 * 3 * len(members)  # at most one round's tree is lost
        assert parts[1] < parts[2] - ids.shape[1] + 3 * 3 * 3 * len(members)
    # The cache is the caller's now, and was not changed.
    for layer, (keys, values) in zip(cache.layers, saved, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


def test_continuing_after_a_stop_inside_a_span():
    """Then there is no longer call to equal: the assistants read the text anew, as in a call without a cache."""
    case = ensemble(*CONTINUED["three"], prompts=LONG[:1], n=14)
    _, ids, mask = case.main_ids()
    first = call(case, ids, mask, 5)
    assert not first.rounds[0][-1].is_whole
    mask = torch.ones_like(first.sequences)
    fresh = call(case, first.sequences, mask, 6)
    with Passes(case.models) as widths:
        second = call(case, first.sequences, mask, 6, past_key_values=first.past_key_values)
    assert torch.equal(second.sequences, fresh.sequences)
    assert widths[0][0] <= 1 + first.rounds[0][-1].num_tokens


def test_continuing_a_batch():
    case = ensemble("llama/byte_level/1", "mistral/sentencepiece/1", prompts=LONG, n=14, max_word_tokens=2, max_words=2)
    _, ids, mask = case.main_ids()
    full = call(case, ids, mask, 14)
    common = set(round_ends(full, 0)) & set(round_ends(full, 1)) - {14}
    assert common, "the rounds of the rows never end together: choose another case"
    n = min(common)
    first = call(case, ids, mask, n)
    mask = torch.cat([mask, torch.ones(2, n, dtype=mask.dtype)], dim=1)
    with Passes(case.models) as widths:
        second = call(case, first.sequences, mask, 14 - n, past_key_values=first.past_key_values)
    assert torch.equal(second.sequences, full.sequences)
    assert widths[0][0] == 1 and widths[1][0] <= 6


@pytest.mark.parametrize(
    "members", [("gemma3/sentencepiece/1",), CONTINUED["window"], TWO], ids=["gemma3", "mistral", "llama"]
)
def test_ordinary_generate_continues_from_the_cache(members):
    case = ensemble(*members, prompts=LONG, n=7)
    _, ids, mask = case.main_ids()
    output = call(case, ids, mask, 7)
    assert output.sequences.shape[1] == ids.shape[1] + 7 and all(len(row) == 7 for row in new_ids(case, output))
    mask = torch.cat([mask, torch.ones(2, 7, dtype=mask.dtype)], dim=1)
    model = disable_adafuse(enable_adafuse(copy.copy(case.models[0])))
    inputs = dict(input_ids=output.sequences, attention_mask=mask, max_new_tokens=6, do_sample=False)
    expected = model.generate(**inputs)
    with Passes([model]) as widths:
        assert torch.equal(model.generate(**inputs, past_key_values=output.past_key_values), expected)
    assert widths[0][0] == 1


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


def test_a_compiled_model_runs_all_passes_compiled():
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
    assert len(compiled_passes) == output.stats["members"][1]["forward_passes"] > 20
