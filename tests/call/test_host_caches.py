"""Caches given and returned: what they hold is not run again, and they are the caller's."""

from __future__ import annotations

import copy

import pytest
import torch
from support.cases import random_case
from support.hosts import LONG, TWO, ensemble, new_ids
from support.releases import cache_of, with_cache
from transformers import DynamicCache, Gemma3nForCausalLM, Gemma3nTextConfig

from hf_adafuse import AdaFuseConfig, disable_adafuse, enable_adafuse


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
        model(ids[:, :columns], attention_mask=mask[:, :columns], position_ids=positions, **with_cache(past))
    before = [(layer.keys.clone(), layer.values.clone()) for layer in past.layers]
    expected = case.fast()
    output = case.fast(**with_cache(past))
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
        case.models[0](ids[:, columns], attention_mask=mask[:, columns], position_ids=positions, **with_cache(past))
    output = call(case, ids, mask, 8, **with_cache(past))
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
    cache = cache_of(first)
    assert cache.get_seq_length() == first.sequences.shape[1] - 1
    saved = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    with Passes(case.models) as widths:
        second = call(case, first.sequences, torch.ones_like(first.sequences), 14 - n, **with_cache(cache))
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


@pytest.mark.parametrize("number", [40026, 40030, 40037])
def test_going_on_with_a_text_does_not_begin_one(number):
    """Law 7 where a text may not begin with nothing."""
    case = random_case(number)
    case.prompts = case.prompts[:1]
    case.config = AdaFuseConfig(method="words", method_options={"allow_blank": False}, max_words=2, max_word_tokens=4)
    _, ids, mask = case.main_ids()
    full = call(case, ids, mask, 14)
    for n in round_ends(full)[:-1]:
        first = call(case, ids, mask, n)
        cache = cache_of(first)
        second = call(case, first.sequences, torch.ones_like(first.sequences), 14 - n, **with_cache(cache))
        assert torch.equal(second.sequences, full.sequences)


def test_continuing_after_a_stop_inside_a_span():
    """Then there is no longer call to equal: the assistants read the text anew, as in a call without a cache."""
    case = ensemble(*CONTINUED["three"], prompts=LONG[:1], n=14)
    _, ids, mask = case.main_ids()
    first = call(case, ids, mask, 5)
    assert not first.rounds[0][-1].is_whole
    mask = torch.ones_like(first.sequences)
    fresh = call(case, first.sequences, mask, 6)
    with Passes(case.models) as widths:
        second = call(case, first.sequences, mask, 6, **with_cache(cache_of(first)))
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
        second = call(case, first.sequences, mask, 14 - n, **with_cache(cache_of(first)))
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
        assert torch.equal(model.generate(**inputs, **with_cache(cache_of(output))), expected)
    assert widths[0][0] == 1


def sliding_pair(prompts=LONG[:1]):
    case = ensemble("gemma3/sentencepiece/0", "gpt2/byte_level/1", prompts=prompts, n=4)
    config = copy.deepcopy(case.models[0].config)
    config.sliding_window = 16
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    torch.manual_seed(5)
    case.models[0] = type(case.models[0])(config).eval()
    return case


@pytest.mark.parametrize("is_cropped", [False, True])
def test_a_text_that_leaves_a_cache_with_dropped_keys_early_is_read_anew(is_cropped):
    """The caller's own cache of a model whose layers all slide begins a call; its oldest keys are gone for good."""
    case = sliding_pair()
    _, ids, mask = case.main_ids()
    ids, mask = ids[:, mask[0] > 0], mask[:, mask[0] > 0]
    assert ids.shape[1] > 40
    past = DynamicCache(config=case.models[0].config)
    with torch.no_grad():
        case.models[0](ids[:, :-1], **with_cache(past))
    assert past.layers[0].keys.shape[2] == 15
    first = call(case, ids, mask, 4, **with_cache(past))
    assert torch.equal(first.sequences, call(case, ids, mask, 4).sequences)
    # It goes on from there, also with what the window does not see any more.
    more = torch.ones_like(first.sequences)
    expected = call(case, first.sequences, more, 6)
    with Passes(case.models) as widths:
        found = call(case, first.sequences, more, 6, **with_cache(copy.deepcopy(cache_of(first))))
    assert torch.equal(found.sequences, expected.sequences) and widths[0][0] == 1
    # A text that leaves it early does not.
    other = torch.cat([ids[:, :20], ids[:, 5:15]], dim=1)
    cache = copy.deepcopy(cache_of(first))
    if is_cropped:
        cache.crop(20 - cache.get_seq_length())
    expected = call(case, other, torch.ones_like(other), 6)
    with Passes(case.models) as widths:
        found = call(case, other, torch.ones_like(other), 6, **with_cache(cache))
    assert torch.equal(found.sequences, expected.sequences) and widths[0][0] == 30


def test_a_cache_of_layers_that_share_keys():
    """The last layers of Gemma 3n take the keys of earlier ones, and keep none."""
    config = Gemma3nTextConfig(
        vocab_size=512, vocab_size_per_layer_input=512, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_kv_shared_layers=2, sliding_window=16,
        hidden_size_per_layer_input=8, laurel_rank=8, altup_num_inputs=2, max_position_embeddings=512,
        layer_types=["sliding_attention", "full_attention"] * 2, activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    torch.manual_seed(6)
    case = ensemble("gemma3/sentencepiece/0", "gpt2/byte_level/1", prompts=LONG[:1], n=4)
    case.models[0] = Gemma3nForCausalLM(config).eval()
    case.models[0].generation_config.eos_token_id = None
    _, ids, mask = case.main_ids()
    past = DynamicCache(config=config)
    with torch.no_grad():
        case.models[0](ids[:, :-1], **with_cache(past))
    expected = call(case, ids, mask, 4)
    assert torch.equal(call(case, ids, mask, 4, **with_cache(past)).sequences, expected.sequences)


def test_dropped_keys_in_a_batch_are_no_beginning_of_a_longer_text():
    """The rows go on by texts of different lengths, so that fewer columns of one are of use."""
    case = sliding_pair([LONG[0], LONG[0]])
    _, ids, mask = case.main_ids()
    past = DynamicCache(config=case.models[0].config)
    with torch.no_grad():
        case.models[0](ids[:, :-1], attention_mask=mask[:, :-1], **with_cache(past))
    first = call(case, ids, mask, 4, **with_cache(past))
    more = torch.cat([first.sequences, first.sequences[:, :5]], dim=1)
    longer = torch.ones_like(more)
    more[0] = torch.cat([more[0, -4:], more[0, :-4]])  # the first row has four tokens of padding
    more[0, :4], longer[0, :4] = more[0, 0], 0
    more[0, 4:] = torch.cat([first.sequences[0], first.sequences[0, :1]])
    expected = call(case, more, longer, 5, output_logits=True)
    found = call(case, more, longer, 5, output_logits=True, **with_cache(copy.deepcopy(cache_of(first))))
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert torch.allclose(one, other, atol=1e-3)


def test_a_cache_that_was_emptied_is_cropped():
    case = sliding_pair()
    _, ids, mask = case.main_ids()
    cache = cache_of(call(case, ids, mask, 4))
    cache.reset()
    cache.crop(-1)
    assert cache.texts == []
