"""A returned cache, and a text that is not the one that it is of: what comes out is what does without a cache, and what
both texts begin with alike is not read again."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support.hosts import LONG, ensemble
from support.releases import cache_of, with_cache
from support.tiny import tiny_model
from test_host_caches import CONTINUED, Passes, call, round_ends

from hf_adafuse import AdaFuseConfig, demo, enable_adafuse
from hf_adafuse.trees.kv_cache import AdaFuseCache, common_length

CHAD, LAOS = (f"Question: What is the capital of {country}?\nAnswer:" for country in ("Chad", "Laos"))


def encoded(tokenizer, *prompts):
    """Left-padded ids and mask, made here."""
    rows = [tokenizer(prompt).input_ids for prompt in prompts]
    width = max(map(len, rows))
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


def assert_as_without(case, cache, prompts, n=8, **kwargs):
    """The cache changes nothing of the text; returns the widths of the first passes with it."""
    ids, mask = encoded(case.tokenizers[0], *prompts)
    expected = call(case, ids, mask, n, **kwargs)
    with Passes(case.models) as widths:
        output = call(case, ids, mask, n, **with_cache(cache), **kwargs)
    assert torch.equal(output.sequences, expected.sequences)
    texts = [["".join(committed.text for committed in rounds) for rounds in made.rounds] for made in (output, expected)]
    assert texts[0] == texts[1]
    return [passes[0] for passes in widths]


def test_another_question_is_answered():
    """As in a chat whose template drops what the model thought: the ids are not those of the cache."""
    (model, tokenizer), (other, other_tokenizer) = demo.load_pair()
    given = dict(tokenizer=tokenizer, assistant_models=[other], assistant_tokenizers=[other_tokenizer])
    given |= dict(max_new_tokens=8, return_dict_in_generate=True, adafuse_config=AdaFuseConfig())
    main = enable_adafuse(copy.copy(model))
    (chad, _), (laos, mask) = encoded(tokenizer, CHAD), encoded(tokenizer, LAOS)
    first = main.generate(chad, **given)
    assert tokenizer.decode(first.sequences[0, chad.shape[1] :], skip_special_tokens=True) == " N'Djamena"
    with Passes([model, other]) as widths:
        second = main.generate(laos, attention_mask=mask, **given, **with_cache(cache_of(first)))
    assert tokenizer.decode(second.sequences[0, laos.shape[1] :], skip_special_tokens=True) == " Vientiane"
    assert "".join(committed.text for committed in second.rounds[0]) == " Vientiane"
    for tok, passes in zip((tokenizer, other_tokenizer), widths, strict=True):
        rows = [tok(text).input_ids for text in (CHAD, LAOS)]
        assert passes[0] == len(rows[1]) - common_length(rows) < len(rows[1])


ONE, OTHER = "there was a cat on the tree. The cat was happy", "there was a cat on the tree. The dog is big, and old"


@pytest.mark.parametrize("members", CONTINUED.values(), ids=CONTINUED)
@pytest.mark.parametrize("prompt", [OTHER, ONE[:20], ONE, "Zoe ran", ONE + " and so was she"], ids=range(5))
def test_other_texts_of_one_row(members, prompt):
    case = ensemble(*members, prompts=[ONE], n=8)
    _, ids, mask = case.main_ids()
    first = call(case, ids, mask, 8)
    widths = assert_as_without(case, cache_of(first), [prompt])
    for width, tokenizer in zip(widths, case.tokenizers, strict=True):
        rows = [tokenizer(text).input_ids for text in (ONE, prompt)]
        left = len(rows[1]) - min(common_length(rows), len(rows[1]) - 1)
        # What was generated and stood in the cache may begin the rest.
        assert width <= left <= len(rows[1])


def test_a_text_that_goes_on_behind_the_generated_one_is_not_read_from_the_start():
    """As in a chat, whose next message follows the answer."""
    (models, tokenizers), config = zip(*demo.load_pair(), strict=True), AdaFuseConfig()
    given = dict(tokenizer=tokenizers[0], assistant_models=[models[1]], assistant_tokenizers=[tokenizers[1]])
    given |= dict(max_new_tokens=8, return_dict_in_generate=True, adafuse_config=config)
    main = enable_adafuse(copy.copy(models[0]))
    (chad, _), (both, mask) = encoded(tokenizers[0], CHAD), encoded(tokenizers[0], f"{CHAD} N'Djamena\n{LAOS}")
    first = main.generate(chad, **given)
    expected = main.generate(both, attention_mask=mask, **given)
    with Passes(models) as widths:
        output = main.generate(both, attention_mask=mask, **given, **with_cache(cache_of(first)))
    assert torch.equal(output.sequences, expected.sequences)
    for passes, tokenizer in zip(widths, tokenizers, strict=True):
        # But for the last token of the answer, which no model has read.
        assert passes[0] <= len(tokenizer(f"\n{LAOS}", add_special_tokens=False).input_ids) + 1


@pytest.mark.parametrize(
    "prompts",
    [
        (LONG[0][:30], LONG[1] + " She was glad."),  # padding on the other side
        (LONG[0], LONG[1][:12]),
        LONG[::-1],
        ("Zoe", LONG[1]),
        tuple(text + " And so on, and on." for text in LONG),
    ],
    ids=range(5),
)
@pytest.mark.parametrize("members", [CONTINUED["two"], CONTINUED["three"]], ids=["two", "three"])
def test_other_texts_of_a_batch(members, prompts):
    case = ensemble(*members, prompts=LONG, n=8)
    _, ids, mask = case.main_ids()
    first = call(case, ids, mask, 8)
    widths = assert_as_without(case, cache_of(first), prompts)
    if prompts[0].startswith(LONG[0]) and prompts[1].startswith(LONG[1]):
        for width, tokenizer in zip(widths, case.tokenizers, strict=True):
            assert width < min(len(tokenizer(prompt).input_ids) for prompt in LONG)


def test_one_row_goes_on_and_another_does_not():
    case = ensemble(*CONTINUED["three"], prompts=LONG, n=14, max_word_tokens=2, max_words=2)
    _, ids, mask = case.main_ids()
    full = call(case, ids, mask, 14)
    n = min(set(round_ends(full, 0)) & set(round_ends(full, 1)) - {14})
    first = call(case, ids, mask, n)
    going_on = first.sequences[0][mask[0].argmax() :].tolist()
    other = case.tokenizers[0]("She was there.").input_ids
    pad = len(going_on) - len(other)
    rows = torch.tensor([going_on, [case.tokenizers[0].pad_token_id] * pad + other])
    row_mask = torch.tensor([[1] * len(going_on), [0] * pad + [1] * len(other)])
    second = call(case, rows, row_mask, 14 - n, **with_cache(cache_of(first)))
    assert second.sequences[0, len(going_on) :].tolist() == full.sequences[0, ids.shape[1] + n :].tolist()
    alone = call(case, rows[1:, pad:], row_mask[1:, pad:], 14 - n)
    new = alone.sequences[0, len(other) :].tolist()
    assert second.sequences[1, len(going_on) :].tolist()[: len(new)] == new


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_of_a_cache_knows_its_ids_too(copied):
    case = ensemble(*CONTINUED["two"], prompts=[ONE], n=8)
    _, ids, mask = case.main_ids()
    cache = copied(cache_of(call(case, ids, mask, 8)))
    widths = assert_as_without(case, cache, [OTHER])
    rows = [case.tokenizers[0](text).input_ids for text in (ONE, OTHER)]
    assert widths[0] == len(rows[1]) - common_length(rows)


@pytest.mark.parametrize("change", ["places", "dtype", "adapter"])
def test_a_cache_of_another_model_is_of_no_use(change):
    """Two models of one shape: keys of the one say nothing to the other."""
    case = ensemble("llama/byte_level/0", "llama/byte_level/1", prompts=[ONE], n=8)
    _, ids, mask = case.main_ids()
    cache = cache_of(call(case, ids, mask, 8))
    if change == "places":
        case.models = case.models[::-1]
    elif change == "dtype":
        case.models = [copy.deepcopy(model).to(torch.float64) for model in case.models]
    else:
        peft = pytest.importorskip("peft")
        case.models[0] = copy.deepcopy(case.models[0])
        case.models[0].add_adapter(peft.LoraConfig(init_lora_weights=False), "other")
    assert_as_without(case, cache, [ONE, OTHER][:1])
    assert_as_without(case, cache, [OTHER])


def test_an_adapter_that_is_switched_on_makes_another_model():
    peft = pytest.importorskip("peft")
    case = ensemble("llama/byte_level/0", "gpt2/byte_level/1", prompts=[ONE], n=8)
    _, ids, mask = case.main_ids()
    case.models[0] = copy.deepcopy(case.models[0])
    case.models[0].add_adapter(peft.LoraConfig(init_lora_weights=False), "other")
    case.models[0].disable_adapters()
    cache = cache_of(call(case, ids, mask, 8))
    case.models[0].enable_adapters()
    assert_as_without(case, cache, [OTHER])


def test_what_was_cut_off_a_cache_is_not_taken_for_known():
    """Cropped, and continued by ordinary `generate()` with another text in its place."""
    case = ensemble(*CONTINUED["two"], prompts=[ONE], n=8)
    _, ids, mask = case.main_ids()
    first = call(case, ids, mask, 8)
    cache = cache_of(first)
    cache.crop(-12)
    kept = cache.get_seq_length()
    other = torch.cat([first.sequences[:, :kept], (first.sequences[:, kept:] + 7) % 300], dim=1)
    enable_adafuse(copy.copy(case.models[0])).generate(
        other, attention_mask=torch.ones_like(other), max_new_tokens=3, do_sample=False, **with_cache(cache)
    )
    assert cache.get_seq_length() == other.shape[1] + 2
    assert cache.sequences.tolist() == first.sequences[:, :kept].tolist()
    mask = torch.ones_like(first.sequences)
    fresh = call(case, first.sequences, mask, 6)
    with Passes(case.models) as widths:
        second = call(case, first.sequences, mask, 6, **with_cache(cache))
    assert torch.equal(second.sequences, fresh.sequences)
    assert widths[0][0] == first.sequences.shape[1] - kept


@pytest.mark.parametrize("how", ["reorder_cache", "batch_select_indices"])
def test_a_cache_whose_rows_have_changed_places_is_one_like_any_other(how):
    case = ensemble(*CONTINUED["two"], prompts=LONG, n=8)
    _, ids, mask = case.main_ids()
    first = call(case, ids, mask, 8)
    cache = cache_of(first)
    getattr(cache, how)(torch.tensor([1, 0]))
    assert isinstance(cache, AdaFuseCache) and cache.sequences is None
    ids = first.sequences[[1, 0]]
    mask = torch.cat([mask[[1, 0]], torch.ones(2, 8, dtype=mask.dtype)], dim=1)
    fresh = call(case, ids, mask, 6)
    with Passes(case.models) as widths:
        second = call(case, ids, mask, 6, **with_cache(cache))
    assert torch.equal(second.sequences, fresh.sequences) and widths[0][0] == 1


def test_the_cache_of_another_number_of_prompts_is_refused():
    case = ensemble(*CONTINUED["two"], prompts=LONG, n=4)
    _, ids, mask = case.main_ids()
    cache = cache_of(call(case, ids, mask, 4))
    with pytest.raises(ValueError, match="must be of the batch size of `input_ids`, 1, but is of 2"):
        call(case, ids[:1], mask[:1], 4, **with_cache(cache))


def test_given_prompts_of_assistants_are_kept():
    """Also where the main model goes on: what its caller gives an assistant is what that one reads."""
    case = ensemble("llama/byte_level/1", "gpt2/byte_level/0", prompts=[ONE], n=8)
    _, ids, mask = case.main_ids()
    first = call(case, ids, mask, 8)
    given = [{"input_ids": case.tokenizers[1](OTHER, return_tensors="pt").input_ids}]
    mask = torch.ones_like(first.sequences)
    fresh = call(case, first.sequences, mask, 6, assistant_inputs=given)
    with Passes(case.models) as widths:
        second = call(case, first.sequences, mask, 6, assistant_inputs=given, **with_cache(cache_of(first)))
    assert torch.equal(second.sequences, fresh.sequences)
    rows = [case.tokenizers[1](text).input_ids for text in (ONE, OTHER)]
    assert [widths[0][0], widths[1][0]] == [1, len(rows[1]) - common_length(rows)]


def test_weights_by_the_prompt_are_those_of_all_of_it():
    case = ensemble("llama/byte_level/1", "gpt2/byte_level/0", prompts=[ONE], n=8)
    case.config = AdaFuseConfig(max_word_tokens=4, model_weights="prompt")
    _, ids, mask = case.main_ids()
    assert_as_without(case, cache_of(call(case, ids, mask, 8)), [OTHER])


def test_the_random_models_of_these_tests_would_tell():
    """Keys of another text change the text: else these tests would say nothing."""
    case = ensemble(*CONTINUED["two"], prompts=[ONE], n=8)
    model, tokenizer = tiny_model("gemma3", "sentencepiece", 2), case.tokenizers[0]
    rows = [tokenizer(text, return_tensors="pt").input_ids for text in (ONE, OTHER)]
    with torch.no_grad():
        first, other = (model(row).logits[0, -1].argmax() for row in rows)
    assert first != other
