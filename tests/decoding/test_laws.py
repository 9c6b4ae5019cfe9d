"""The laws at the end of the algorithm's contract. Law 1, fast = slow, is `test_oracle.py`."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from support.cases import PROMPTS, Case, random_case, random_config
from support.reference import reference_decode
from support.releases import cache_of, with_cache
from support.tiny import ARCHITECTURES, TOKENIZERS, eos_ids, tiny_model

from hf_adafuse import AdaFuseConfig, disable_adafuse
from hf_adafuse.decoding.word_splitter import split_words
from hf_adafuse.members.model_handle import ModelHandle
from hf_adafuse.trees.pass_policy import Policy

NAMES = list(TOKENIZERS)


def new_tokens(case: Case, output, row: int) -> list[int]:
    """The new ids of a row without the padding after its end."""
    count = sum(committed.num_tokens for committed in output.rounds[row])
    start = case.main_ids()[1].shape[1]
    return output.sequences[row, start : start + count].tolist()


@pytest.mark.parametrize("number", range(2000, 2030))
def test_2_a_batch_gives_each_row_what_it_gives_alone(number):
    rng = random.Random(number)
    case = random_case(number)
    case.prompts = rng.sample(PROMPTS, 4)
    together = case.fast()
    for row, prompt in enumerate(case.prompts):
        alone = Case(case.models, case.tokenizers, case.config, [prompt], case.max_new_tokens)
        output = alone.fast()
        assert new_tokens(case, together, row) == new_tokens(alone, output, 0)
        for one, other in zip(together.rounds[row], output.rounds[0], strict=True):
            assert one.text == other.text
            assert [c.text for c in one.candidates] == [c.text for c in other.candidates]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_3_copies_of_one_model_give_its_greedy_text(architecture, count):
    for name in NAMES:
        model, tokenizer = tiny_model(architecture, name), TOKENIZERS[name]()
        config = AdaFuseConfig(num_branches=1, margin_threshold=0.5)
        case = Case([model] * count, [tokenizer] * count, config, [PROMPTS[0]], 20)
        ids, mask = case.main_ids()[1:]
        greedy = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
        assert case.fast().sequences.tolist() == greedy.tolist(), name


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3000, 3020))
def test_4_the_order_of_assistants_changes_nothing_but_ties(number):
    rng = random.Random(number)
    names = [rng.choice(NAMES) for _ in range(4)]
    models = [tiny_model(rng.choice(ARCHITECTURES), name, seed) for seed, name in enumerate(names)]
    tokenizers = [TOKENIZERS[name]() for name in names]
    config = random_config(rng, 4)
    weights = list(config.model_weights or [1.0] * 4)
    order = [0, *rng.sample([1, 2, 3], 3)]
    prompts = rng.sample(PROMPTS, 2)

    def case(order):
        fields = config.to_dict() | {"model_weights": [weights[k] for k in order]}
        chosen = AdaFuseConfig.from_dict(fields)
        return Case([models[k] for k in order], [tokenizers[k] for k in order], chosen, prompts, 12)

    straight, shuffled = case([0, 1, 2, 3]).fast(), case(order).fast()
    assert straight.sequences.tolist() == shuffled.sequences.tolist()
    for one, other in zip(straight.rounds[0], shuffled.rounds[0], strict=True):
        assert {c.text: c.score for c in one.candidates} == pytest.approx({c.text: c.score for c in other.candidates})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_5_the_extremes_of_tau(name):
    models = [tiny_model("llama", name), tiny_model("gpt2", "byte_level", 1)]
    tokenizers = [TOKENIZERS[name](), TOKENIZERS["byte_level"]()]

    def rounds(**settings):
        output = Case(models, tokenizers, AdaFuseConfig(**settings), PROMPTS[:2], 24).fast()
        return output.sequences.tolist(), output.rounds

    one_word, traced = rounds(margin_threshold=1.1, max_words=1, num_branches=1)
    assert one_word == rounds(commitment="fixed", max_words=1, num_branches=4)[0]
    assert all(len(committed.words) + committed.ends == 1 for prompt in traced for committed in prompt)
    for settings in (dict(margin_threshold=0.0), dict(commitment="fixed")):
        _, traced = rounds(max_words=3, num_branches=4, **settings)
        for prompt in traced:
            for committed in prompt:
                sizes = [len(c.words) + c.ends for c in committed.candidates]
                assert all(size == 3 or c.ends for size, c in zip(sizes, committed.candidates, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_6_the_spans_are_the_text(name):
    tokenizer = TOKENIZERS[name]()
    for seed in range(3):
        models = [tiny_model("qwen3", name, seed), tiny_model("llama", "sentencepiece", seed)]
        case = Case(models, [tokenizer, TOKENIZERS["sentencepiece"]()], AdaFuseConfig(), PROMPTS[:3], 40)
        output = case.fast()
        for row, prompt in enumerate(case.main_ids()[0]):
            decoded = [
                tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                for ids in (prompt, prompt + new_tokens(case, output, row))
            ]
            spans = "".join(committed.text for committed in output.rounds[row])
            if name == "sentencepiece" and "\ufffd" in spans:
                continue  # its decoder shows broken bytes differently together than apart
            assert decoded[0] + spans == decoded[1]
            words = [word for committed in output.rounds[row] for word in committed.words]
            assert "".join(words) == spans == "".join(split_words(spans))


# Cases whose text ends in its first round, or never leaves it: there is no end of a round to go on from.
ONE_ROUND = {5001, 5007, 5014, 5015}


@pytest.mark.parametrize("number", sorted({*range(5000, 5020)} - ONE_ROUND))
def test_7_continuing_at_the_end_of_a_round_is_one_longer_call(number):
    case = random_case(number)
    case.prompts, case.max_new_tokens = case.prompts[:1], 20
    whole = case.fast()
    ends = [sum(r.num_tokens for r in whole.rounds[0][:n]) for n in range(1, len(whole.rounds[0]))]
    assert ends, "a text of one round: choose another case"
    cut = ends[len(ends) // 2]
    case.max_new_tokens = cut
    first = case.fast()
    assert first.rounds[0][-1].is_whole
    main = copy.copy(case.models[0])
    from hf_adafuse import enable_adafuse

    rest = enable_adafuse(main).generate(
        input_ids=first.sequences,
        **with_cache(cache_of(first)),
        tokenizer=case.tokenizers[0],
        assistant_models=case.models[1:],
        assistant_tokenizers=case.tokenizers[1:],
        adafuse_config=case.config,
        max_new_tokens=20 - cut,
        attention_mask=torch.ones_like(first.sequences),
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert rest.sequences.tolist() == whole.sequences.tolist()
    assert [r.text for r in first.rounds[0] + rest.rounds[0]] == [r.text for r in whole.rounds[0]]


def test_8_nothing_of_the_callers_is_changed():
    for number in range(6000, 6006):
        case = random_case(number)
        rows, ids, mask = case.main_ids()

        def state(case=case):
            return [
                (
                    model.config.to_dict(),
                    model.config._attn_implementation,
                    model.generation_config.to_dict(),
                    type(model),
                    {name: (value.data_ptr(), value._version) for name, value in model.state_dict().items()},
                    tokenizer.backend_tokenizer.to_str(),
                    tokenizer.padding_side,
                )
                for model, tokenizer in zip(case.models, case.tokenizers, strict=True)
            ]

        before = state()
        case.fast()
        assert state() == before
        assert case.main_ids()[1].tolist() == ids.tolist() and rows == case.main_ids()[0] and mask.dtype == torch.int64
        assert disable_adafuse(case.models[0]) is case.models[0]


@pytest.mark.slow
def test_the_context_is_where_a_text_ends(monkeypatch):
    """Members with little room: words end, candidates drop out and prompts stop as the oracle says."""
    stopped, rooms = 0, {}  # most of these models have rotary positions, which set no limit
    monkeypatch.setattr(ModelHandle, "max_length", property(lambda self: rooms[id(self.model.config)]))
    for number in range(7000, 7016):
        case = random_case(number)
        rng = random.Random(number)
        limits = [rng.randint(24, 44) for _ in case.models]
        case.prompts, case.max_new_tokens = case.prompts[:1], 30
        names = [next(n for n in NAMES if TOKENIZERS[n]() is tok) for tok in case.tokenizers]
        for k, (name, limit) in enumerate(zip(names, limits, strict=True)):
            case.models[k] = tiny_model(rng.choice(ARCHITECTURES), name, k, 3.0, limit)
            rooms[id(case.models[k].config)] = limit
        row = case.main_ids()[0][0]
        prompts = case.member_prompts(row)
        if any(len(ids) > limit for ids, limit in zip(prompts, limits, strict=True)):
            continue
        members = case.ref_members()
        for member, limit in zip(members, limits, strict=True):
            member.max_length = limit
        expected, _ = reference_decode(members, prompts, case.config, 30)
        if len(expected) < 30 and expected[-1:] not in [[eos] for eos in eos_ids(case.tokenizers[0])]:
            stopped += 1
            with pytest.warns(UserWarning, match="outgrows the context of"):
                output = case.fast()
        else:
            output = case.fast()
        assert output.sequences[0, len(row) :].tolist() == expected
    assert stopped >= 4


@pytest.mark.slow
@pytest.mark.parametrize("num_free", [0, 32])
def test_1_what_was_read_ahead_changes_nothing_where_every_candidate_is_forbidden(num_free, look_ahead, monkeypatch):
    """The last resort commits a forbidden text: what had been read below it unprocessed is read anew."""
    monkeypatch.setattr(Policy, "prefetched_tokens", num_free)
    case = random_case(60027)
    case.prompts, case.max_new_tokens = case.prompts[:1], 12
    texts = set()
    for num_rounds, is_flat in ((0, False), (0, True), (1, True), (2, False), (2, True)):
        look_ahead(num_rounds, is_flat)
        output = case.fast(no_repeat_ngram_size=1)
        assert any(committed.winner is None for committed in output.rounds[0])
        texts.add(tuple(output.sequences[0].tolist()))
    assert len(texts) == 1
