"""What sampled texts keep to: seeds and batches, temperature, processors, stopping, caches, traces."""

from __future__ import annotations

import copy
import dataclasses
import io
import warnings
from itertools import pairwise

import pytest
import torch
from support.hosts import Forbid, ensemble, new_ids
from support.kinds import MODELS, case_of, model_of
from support.releases import cache_of, with_cache
from support.tiny import TOKENIZERS, tiny_model
from test_full_contexts import tight_case
from test_sampling import PlainSampler, sampled
from transformers.generation.streamers import BaseStreamer

from hf_adafuse import AdaFuseConfig, enable_adafuse
from hf_adafuse.call.sampling import random_streams
from hf_adafuse.members.node_logprobs import NodeLogprobs, draw_token
from hf_adafuse.outputs import count_words

MEMBERS = ("llama/byte_level/0", "qwen3/sentencepiece/1", "gpt2/byte_level/1")
SAME = ("llama/byte_level/0", "gpt2/byte_level/1")  # one tokenizer
PROMPTS = ["Once upon a time", "there was a cat on the tree. The", "She", "The capital of France"]


def seeded(case, seed=0, **kwargs):
    torch.manual_seed(seed)
    return sampled(case, **kwargs)


def texts(case, seed=0, **kwargs):
    """Per row, its new ids."""
    return new_ids(case, seeded(case, seed, **kwargs))


def with_prompts(case, prompts):
    return dataclasses.replace(case, prompts=list(prompts))


# Seeds and batches.


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_seed_gives_a_prompt_its_text_alone_and_in_any_batch(seed):
    case = ensemble(*MEMBERS, prompts=PROMPTS, n=16)
    together = dict(zip(PROMPTS, texts(case, seed), strict=True))
    assert texts(case, seed) == list(together.values())
    for order in (PROMPTS[::-1], PROMPTS[1:3], PROMPTS[2:] + PROMPTS[:2]):
        assert texts(with_prompts(case, order), seed) == [together[prompt] for prompt in order]
    for prompt in PROMPTS:
        assert texts(with_prompts(case, [prompt]), seed) == [together[prompt]]
    other = dict(zip(PROMPTS, texts(case, seed + 100), strict=True))
    assert sum(other[prompt] != together[prompt] for prompt in PROMPTS) >= 3


def test_equal_prompts_differ_and_the_first_is_as_alone():
    case = ensemble(*MEMBERS, prompts=[PROMPTS[0]], n=12)
    alone = texts(case)
    three = texts(with_prompts(case, PROMPTS[:1] * 3))
    assert three[0] == alone[0] and len(set(map(tuple, three))) == 3
    mixed = texts(with_prompts(case, [PROMPTS[0], PROMPTS[1], PROMPTS[0]]))
    assert [mixed[0], mixed[2]] == three[:2]


@pytest.mark.parametrize("given", [False, True], ids=["made", "given"])
def test_several_answers_are_those_of_repeated_prompts(given):
    """Also where an assistant's own prompts are given: once each, as the main model's are."""
    case = ensemble(*MEMBERS[:2], prompts=PROMPTS[:2], n=24)
    inputs, expected = {}, {}
    if given:  # the assistant reads another prompt than the main model
        tokenizer = case.tokenizers[1]
        own = tokenizer(["The cat", "a big tree in the park"], padding=True, return_tensors="pt")
        once = {"input_ids": own["input_ids"], "attention_mask": own["attention_mask"]}
        inputs = {"assistant_inputs": [once]}
        expected = {"assistant_inputs": [{name: rows.repeat_interleave(3, 0) for name, rows in once.items()}]}
    inputs["temperature"] = expected["temperature"] = 1.5
    got = seeded(case, num_return_sequences=3, **inputs)
    repeated = with_prompts(case, [prompt for prompt in case.prompts for _ in range(3)])
    assert new_ids(repeated, got) == texts(repeated, **expected)
    rows = new_ids(repeated, got)
    assert rows[::3] == texts(case, **inputs)
    assert len(set(map(tuple, rows[:3]))) == 3 and len(set(map(tuple, rows[3:]))) == 3
    if given:
        assert rows != texts(repeated, temperature=1.5)


def test_the_prompts_of_an_assistant_are_still_counted():
    case = ensemble(*MEMBERS[:2], prompts=PROMPTS[:2], n=4)
    own = [case.tokenizers[1](["She"] * 3, return_tensors="pt")["input_ids"]]
    with pytest.raises(ValueError, match=r"assistant_inputs\[0\]. must hold 2 prompts"):
        sampled(case, assistant_inputs=own, num_return_sequences=3)


def test_one_answer_alone_where_nothing_is_sampled():
    case = ensemble(*MEMBERS[:2], n=4)
    case.config = dataclasses.replace(case.config, do_sample=False)
    with pytest.raises(ValueError, match="`num_return_sequences` must be 1 with AdaFuse, but is 3"):
        sampled(case, num_return_sequences=3)


@pytest.mark.parametrize("temperature", [0.001, 1.0])
def test_torchs_generator_advances_by_one_draw(temperature):
    """Whatever is drawn: so what comes after a call is the same however long its text was."""
    case = ensemble(*MEMBERS, n=10)
    for prompts in (PROMPTS[:1], PROMPTS):
        seeded(with_prompts(case, prompts), 7, temperature=temperature)
        after = torch.get_rng_state()
        torch.manual_seed(7)
        torch.randint(2**62, ())
        assert torch.equal(torch.get_rng_state(), after)


def test_a_text_that_is_not_sampled_draws_nothing():
    case = ensemble(*MEMBERS, n=10)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    case.fast()
    assert torch.equal(torch.get_rng_state(), before)


def test_streams_of_random_numbers():
    def first(prompts, seed=0, count=4):
        torch.manual_seed(seed)
        return [[next(stream) for _ in range(count)] for stream in random_streams(prompts)]

    both = first([[1, 2], [3]])
    assert both == [*first([[1, 2]]), *first([[3]])] and both[::-1] == first([[3], [1, 2]])
    one, two, three = first([[1, 2], [1, 2], [1, 23]])
    assert one == both[0] and len({tuple(numbers) for numbers in (one, two, three, *first([[12]]))}) == 4
    assert first([[1, 2]], seed=1) != first([[1, 2]])
    (many,) = first([[5]], count=10_000)
    assert all(0.0 <= number < 1.0 for number in many)
    tenths = [sum(int(number * 10) == tenth for number in many) for tenth in range(10)]
    assert sum((count - 1000) ** 2 / 1000 for count in tenths) < 27.9  # chi-squared, 9 degrees of freedom, 1 in 1,000


# Temperature.


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral", "gemma3"])
@pytest.mark.parametrize("tokenizer", list(TOKENIZERS))
def test_without_temperature_one_member_gives_ordinary_greedy_text(architecture, tokenizer):
    case = ensemble(f"{architecture}/{tokenizer}/0", prompts=PROMPTS[:2], n=16, max_word_tokens=32)
    _, ids, mask = case.main_ids()
    greedy = case.models[0].generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False)
    for settings in ({}, {"typical_p": 0.2}, {"top_k": 1}, {"top_p": 0.1, "min_p": 0.3}):
        assert seeded(case, temperature=0.001, **settings).sequences.tolist() == greedy.tolist(), settings
    assert seeded(case, 1, temperature=0.01).sequences.tolist() == greedy.tolist()


@pytest.mark.parametrize("weights", [(1.0, 2.0, 0.5), (3.0, 2.0, 2.5), (1.0, 1.5, 1.6)])
def test_without_temperature_words_are_the_heaviest_members(weights):
    # No bytes: a word with half a character would come to the main model as another one.
    members = "llama/unigram/0", "gpt2/unigram/1", "qwen3/unigram/2"
    case = ensemble(*members, n=12, max_word_tokens=32, model_weights=weights)
    heaviest = case.models[weights.index(max(weights))]
    _, ids, mask = case.main_ids()
    greedy = heaviest.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    output = seeded(case, temperature=0.001)
    assert {committed.proposer for row in output.rounds for committed in row} == {weights.index(max(weights))}
    assert output.sequences[:, ids.shape[1] :].tolist() == greedy[:, ids.shape[1] :].tolist()


def test_without_temperature_the_first_of_equals():
    case = ensemble(*SAME, n=8)
    output = seeded(case, temperature=0.001)
    assert {committed.proposer for row in output.rounds for committed in row} == {0}


# Where a text ends.


@pytest.mark.parametrize("n", range(1, 9))
def test_a_shorter_text_is_the_beginning_of_a_longer_one(n):
    case = ensemble(*MEMBERS, prompts=PROMPTS, n=24)
    whole = texts(case)
    case.max_new_tokens = n
    assert texts(case) == [row[:n] for row in whole]


def test_stop_strings_and_criteria():
    case = ensemble(*MEMBERS, prompts=PROMPTS, n=24)
    whole, tokenizer = seeded(case), case.tokenizers[0]
    rows, width = new_ids(case, whole), case.main_ids()[1].shape[1]
    stop = tokenizer.decode(rows[0][3:5])  # in the middle of the first text
    assert stop.strip()
    found = texts(case, stop_strings=[stop])
    assert found[0] == next(rows[0][:n] for n in range(1, 25) if stop in tokenizer.decode(rows[0][:n]))
    assert all(row == longer[: len(row)] for row, longer in zip(found, rows, strict=True))
    three = texts(case, stopping_criteria=[lambda ids, scores: ids[:, -1] == rows[1][2]])
    assert three[1] == rows[1][: rows[1].index(rows[1][2]) + 1] and width > 0


class Collector(BaseStreamer):
    def __init__(self):
        self.pieces = []

    def put(self, value):
        self.pieces.append(value.flatten().tolist())

    def end(self):
        self.pieces.append(None)


def test_streaming_gives_the_text_as_it_grows():
    case = ensemble(*MEMBERS, prompts=PROMPTS[:1], n=16)
    expected = texts(case)
    collected = Collector()
    output = seeded(case, streamer=collected)
    assert new_ids(case, output) == expected
    prompt, *pieces, end = collected.pieces
    assert prompt == case.main_ids()[0][0] and end is None
    assert list(map(len, pieces)) == [committed.num_tokens for committed in output.rounds[0]]
    assert [token for piece in pieces for token in piece] == expected[0] and len(pieces) > 2


def test_several_answers_do_not_stream():
    case = ensemble(*MEMBERS, prompts=PROMPTS[:1], n=4)
    with pytest.raises(ValueError, match="`streamer` must be used with one prompt, but there are 2"):
        sampled(case, num_return_sequences=2, streamer=Collector())


@pytest.mark.parametrize("number", range(16))
def test_a_text_stops_where_a_context_is_full(number):
    """As in the oracle; the warning names a member that is full."""
    case, members = tight_case(number)
    rows, ids, _ = case.main_ids()
    torch.manual_seed(number)
    streams = random_streams(rows)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = seeded(case, number)
    messages, stopped = [str(warning.message) for warning in caught], 0
    for index, row in enumerate(rows):
        plain = PlainSampler(members, case.member_prompts(row), case.config, streams[index])
        expected, _ = plain.run(case.max_new_tokens)
        got = output.sequences[index, ids.shape[1] :].tolist()
        assert got[: len(expected)] == expected and set(got[len(expected) :]) <= {case.tokenizers[0].pad_token_id}
        if len(expected) < case.max_new_tokens and expected[-1:] not in [[token] for token in members[0].eos]:
            stopped += 1
            (message,) = [text for text in messages if f"prompt {index} " in text]
            assert any(f"({member.max_length} tokens)" in message for member in members if member.max_length < 512)
    assert len(messages) == stopped


@pytest.mark.slow
def test_the_contexts_do_fill_up_in_assistants_too():
    case, members = tight_case(0), []
    for number in range(16):
        case, _ = tight_case(number)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seeded(case, number)
        members += ["assistant" if "assistant" in str(warning.message) else "main" for warning in caught]
    assert members.count("main") >= 3 and members.count("assistant") >= 3


# Processors.


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("members", [MEMBERS, SAME])
def test_what_the_main_models_processors_forbid_is_never_said(members, seed):
    case = ensemble(*members, prompts=PROMPTS, n=16)
    said = {token for row in texts(case, seed) for token in row}
    forbidden = set(sorted(said)[::2]) | set(case.models[0].generation_config.eos_token_id)
    rows = texts(case, seed, logits_processor=[Forbid(forbidden)])
    assert not {token for row in rows for token in row} & forbidden
    assert all(len(row) == 16 for row in rows)  # nor did a text end


FLAGS = [
    dict(min_new_tokens=12),
    dict(bad_words_ids=[[50], [60, 61], [70]]),
    dict(no_repeat_ngram_size=2, repetition_penalty=1.3),
]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: next(iter(flags)))
def test_flags_hold_for_what_assistants_say(flags):
    case = ensemble(*MEMBERS, prompts=PROMPTS, n=20)
    ends = set(case.models[0].generation_config.eos_token_id)
    for prompt, row in zip(case.main_ids()[0], texts(case, **flags), strict=True):
        if "min_new_tokens" in flags:
            assert len(row) >= 12 and not set(row[:12]) & ends
        elif "bad_words_ids" in flags:
            assert not {50, 70} & set(row) and (60, 61) not in pairwise(row)
        else:
            pairs = list(pairwise(prompt + row))
            new = pairs[len(prompt) - 1 :]
            assert all(pair not in pairs[: len(prompt) - 1 + index] for index, pair in enumerate(new))


def test_where_all_that_the_assistants_say_is_forbidden_the_main_model_draws():
    case = ensemble("llama/byte_level/0", "qwen3/characters/0", n=10, model_weights=[0.001, 1.0])
    spelled = {
        token for token, name in enumerate(case.tokenizers[0].convert_ids_to_tokens(range(360))) if len(name) < 3
    }
    for row in seeded(case, logits_processor=[Forbid(spelled)]).rounds:
        for committed in row:
            ids = case.tokenizers[0](committed.text, add_special_tokens=False).input_ids
            assert committed.proposer == 0 or not set(ids) & spelled


@pytest.mark.parametrize("temperature", [0.001, 1.0])
def test_an_assistant_that_may_say_nothing_says_nothing(temperature):
    case = ensemble(*MEMBERS[:2], n=8, model_weights=[0.5, 1.0])
    every = Forbid(range(len(case.tokenizers[1])))
    output = seeded(case, assistant_logits_processor=[[every]], temperature=temperature)
    assert {committed.proposer for row in output.rounds for committed in row} == {0}
    assert all(member["proposals"] >= member["wins"] for member in output.stats["members"])


def test_an_assistants_own_processors_are_kept_to():
    members = "llama/characters/0", "gpt2/characters/1"  # a text has one spelling
    case = ensemble(*members, prompts=PROMPTS, n=12, model_weights=[0.3, 1.0])
    free = {token for row in texts(case) for token in row}
    forbidden = set(sorted(free)[::2])
    output = seeded(case, assistant_logits_processor=[[Forbid(forbidden)]])
    said = {0: set(), 1: set()}
    for rounds, ids in zip(output.rounds, new_ids(case, output), strict=True):
        for committed in rounds:
            said[committed.proposer] |= set(ids[: committed.num_tokens])
            ids = ids[committed.num_tokens :]
    assert said[1] and not said[1] & forbidden and said[0] & forbidden


# What a call returns.


@pytest.mark.parametrize("weights", [None, [0.02, 1.0]], ids=["even", "mostly the assistant"])
@pytest.mark.parametrize("main", ["llama/byte_level/0", "mistral/byte_level/1", "gemma3/byte_level/0"])
def test_the_cache_holds_all_but_the_last_token(main, weights):
    """Also where others drew the last words, which the main model need not have read."""
    seen = 0
    for seed in range(4):
        case = ensemble(main, "gpt2/byte_level/1", prompts=[PROMPTS[0]], n=9, model_weights=weights)
        output = seeded(case, seed)
        with torch.no_grad():
            expected = cache_of(case.models[0](output.sequences[:, :-1], use_cache=True))
        width = output.sequences.shape[1] - 1
        assert cache_of(output).get_seq_length() == width
        for layer, wanted in zip(cache_of(output).layers, expected.layers, strict=True):
            kept = wanted.keys.shape[2]  # a sliding layer of the model's own cache drops the oldest
            torch.testing.assert_close(layer.keys[:, :, width - kept :], wanted.keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(layer.values[:, :, width - kept :], wanted.values, atol=1e-4, rtol=1e-4)
        seen += output.rounds[0][-1].proposer
        assert output.stats["members"][0]["tokens_run"] >= width
    assert seen or weights is None


@pytest.mark.parametrize("seed", range(6))
def test_a_returned_cache_is_continued(seed):
    """With it a call gives what it gives without it; the ids are new to it, so the random numbers are too."""
    case = ensemble(*SAME, prompts=[PROMPTS[seed % 4]], n=7, model_weights=[0.2, 1.0])
    first = seeded(case, seed, min_new_tokens=7)
    main = enable_adafuse(copy.copy(case.models[0]))
    given = dict(
        tokenizer=case.tokenizers[0], assistant_models=case.models[1:], assistant_tokenizers=case.tokenizers[1:],
        adafuse_config=case.config, max_new_tokens=8, do_sample=True, return_dict_in_generate=True,
    )  # fmt: skip
    outputs = []
    for cache in (
        {},
        with_cache(copy.copy(cache_of(first))),
        with_cache(cache_of(first)),
    ):
        torch.manual_seed(seed)
        outputs.append(
            main.generate(first.sequences, attention_mask=torch.ones_like(first.sequences), **given, **cache)
        )
    assert outputs[0].sequences.tolist() == outputs[1].sequences.tolist() == outputs[2].sequences.tolist()
    runs = [output.stats["members"][0]["tokens_run"] for output in outputs]
    assert runs[1] < runs[0]
    greedy = [
        case.models[0].generate(first.sequences, max_new_tokens=5, do_sample=False, **cache).tolist()
        for cache in ({}, with_cache(copy.deepcopy(cache_of(first))))
    ]
    assert greedy[0] == greedy[1]  # ordinary `generate()` takes it too


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("role", ["main", "assistant"])
@pytest.mark.filterwarnings("ignore:.*which is slow")
def test_models_of_every_kind(name, role):
    case = case_of(model_of(name), role, batch=2)
    first, again = seeded(case, 1), seeded(case, 1)
    assert first.sequences.tolist() == again.sequences.tolist()
    members = case.ref_members()
    rows, ids, _ = case.main_ids()
    torch.manual_seed(1)
    for index, (row, stream) in enumerate(zip(rows, random_streams(rows), strict=True)):
        expected, _ = PlainSampler(members, case.member_prompts(row), case.config, stream).run(case.max_new_tokens)
        assert first.sequences[index, ids.shape[1] :].tolist()[: len(expected)] == expected


@pytest.mark.parametrize("seed", range(3))
def test_scores_and_logits_are_those_of_the_text(seed):
    case = ensemble(*MEMBERS, prompts=PROMPTS[:2], n=8)
    output = seeded(case, seed, output_scores=True, output_logits=True, min_new_tokens=8)
    assert output.sequences.tolist() == seeded(case, seed, min_new_tokens=8).sequences.tolist()
    _, ids, mask = case.main_ids()
    width = ids.shape[1]
    with torch.no_grad():
        mask = torch.cat([mask, torch.ones(2, 8, dtype=mask.dtype)], 1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = case.models[0](output.sequences, attention_mask=mask, position_ids=positions).logits
    assert len(output.scores) == len(output.logits) == 8
    for step in range(8):
        torch.testing.assert_close(output.logits[step], logits[:, width + step - 1], atol=1e-3, rtol=1e-3)
        chosen = output.scores[step].gather(1, output.sequences[:, width + step, None])
        assert (chosen > -torch.inf).all()


@pytest.mark.parametrize("members", [MEMBERS, MEMBERS[::-1]])
def test_the_rounds_are_the_text(members):
    case = ensemble(*members, prompts=PROMPTS, n=20, max_word_tokens=32)
    output = seeded(case)
    tokenizer = case.tokenizers[0]
    for prompt, ids, rounds in zip(case.main_ids()[0], new_ids(case, output), output.rounds, strict=True):
        before, after = (
            tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for row in (prompt, prompt + ids)
        )
        spans = "".join(committed.text for committed in rounds)
        words = [word for committed in rounds for word in committed.words]
        assert before + spans == after and "".join(words) == spans
        assert all(len(committed.words) + committed.ends == 1 for committed in rounds)
        for committed in rounds:
            (candidate,) = committed.candidates
            assert committed.winner == 0 and candidate.proposers == [committed.proposer]
            assert candidate.score == candidate.nlls[committed.proposer] > 0 and candidate.dropped is None
    assert {committed.proposer for rounds in output.rounds for committed in rounds} == {0, 1, 2}
    assert output.stats["rounds"] == count_words(output.rounds)["rounds"]
    wins = [member["wins"] for member in output.stats["members"]]
    assert sum(wins) == output.stats["rounds"]
    assert all(member["proposals"] >= member["wins"] for member in output.stats["members"])


def test_the_rounds_are_shown():
    case = ensemble(*MEMBERS, prompts=PROMPTS, n=12)
    output, out = seeded(case), io.StringIO()
    print(output.rounds, file=out)
    shown = out.getvalue()
    assert shown.count("Prompt ") == 4 and "Round 1" in shown and "margins" not in shown
    for rounds in output.rounds:
        for number, committed in enumerate(rounds, start=1):
            assert f"Round {number}  " in str(rounds)
            assert committed.to_dict()["margins"] == [[], [], []]
        page = rounds._repr_html_()
        assert "uncertain" not in page and page.count("<tr>") == len(rounds) + 1
    assert "uncertain" not in output.rounds._repr_html_()
    assert "uncertain" in case.fast().rounds._repr_html_()  # where margins are read, they are explained


def test_a_call_without_a_dict_gives_the_same_ids():
    case = ensemble(*MEMBERS, prompts=PROMPTS[:1], n=10)
    expected = seeded(case).sequences
    _, ids, mask = case.main_ids()
    torch.manual_seed(0)
    got = enable_adafuse(copy.copy(case.models[0])).generate(
        ids, attention_mask=mask, tokenizer=case.tokenizers[0], assistant_models=case.models[1:],
        assistant_tokenizers=case.tokenizers[1:], adafuse_config=case.config, max_new_tokens=10, do_sample=True,
    )  # fmt: skip
    assert got.tolist() == expected.tolist()


# One draw.


def reading_of(scores):
    scores = torch.tensor(scores)
    return NodeLogprobs(scores, float(scores.logsumexp(0)), [int(scores.argmax())], [0.0])


def test_a_token_is_where_the_probabilities_reach_the_number():
    reading = reading_of([-torch.inf, 0.0, -torch.inf, 0.0, 0.0, -torch.inf])
    found = [draw_token(reading, lambda scores: scores, iter([number]), None) for number in
             (0.0, 0.33, 0.34, 0.66, 0.67, 1 - 2**-53)]  # fmt: skip
    assert found == [1, 1, 3, 3, 4, 4]
    warped = draw_token(reading, lambda scores: scores.index_fill(1, torch.tensor([3]), -torch.inf), iter([0.6]), None)
    assert warped == 4


def test_a_token_that_is_not_allowed_is_drawn_again():
    reading = reading_of([0.0, 0.0, 0.0, 0.0])
    numbers = iter([0.1, 0.3, 0.6, 0.9])
    assert draw_token(reading, lambda scores: scores, numbers, lambda token: token == 2) == 2
    assert list(numbers) == [0.9]
    # In vain for long, it is drawn of those that are allowed; where none is, as it is.
    assert draw_token(reading, lambda scores: scores, iter([0.1] * 16 + [0.6]), lambda token: token in (1, 2)) == 2
    assert draw_token(reading, lambda scores: scores, iter([0.1] * 15 + [0.9]), lambda token: False) == 3


def test_few_tokens_of_a_large_vocabulary_are_asked_whether_they_are_allowed():
    asked = []

    def allow(token):
        asked.append(token)
        return token % 3 == 0

    generator = torch.Generator().manual_seed(0)
    reading = NodeLogprobs(torch.randn(100_000, generator=generator), 0.0, [0], [0.0])
    numbers = iter(torch.rand(10_000, generator=generator).tolist())
    for _ in range(100):
        assert draw_token(reading, lambda scores: scores, numbers, allow) % 3 == 0
    assert len(asked) < 1000


def test_a_token_where_every_one_is_forbidden():
    reading = NodeLogprobs(torch.full((4,), -torch.inf), 0.0, [2], [-torch.inf])
    assert draw_token(reading, lambda scores: scores, iter([0.5]), None) == 2
    assert draw_token(reading, None, iter([]), None) == 2


def test_a_greedy_token_is_the_likeliest_that_is_allowed():
    reading = reading_of([0.0, 3.0, 2.0, 1.0])
    assert draw_token(reading, None, iter([]), None) == 1
    assert draw_token(reading, None, iter([]), lambda token: token > 1) == 2
    assert draw_token(reading, None, iter([]), lambda token: False) == 1


def test_a_member_that_is_no_model_of_transformers():
    """It has logits and a config, and nothing to make warpers with."""

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny_model("gpt2", "byte_level", 1)
            self.config, self.device, self.dtype = self.inner.config, torch.device("cpu"), torch.float32

        def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
            return self.inner(
                input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                **with_cache(past_key_values),
                use_cache=use_cache,
            )

    case = ensemble(*SAME, n=10, max_word_tokens=AdaFuseConfig().max_word_tokens)
    expected = texts(case, temperature=0.8)
    case.models[1] = Plain().eval()
    assert texts(case, temperature=0.8) == expected
