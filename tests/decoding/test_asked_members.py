"""Members that hardly count are not asked: what that saves, what it must not change, and who is asked all the same."""

from __future__ import annotations

import copy
import math
import random

import pytest
import support.reference_rules as oracle
import torch
from support.cases import PROMPTS, Case, counts, random_case
from support.hosts import Forbid, new_ids
from support.releases import cache_of, with_cache
from support.tiny import ARCHITECTURES, TOKENIZERS, tiny_model
from support.toys import run, texts, toy, word_tokenizer

from hf_adafuse import AdaFuseConfig, SpanStrategy, register_strategy
from hf_adafuse.decoding.strategies.registry import STRATEGIES
from hf_adafuse.trees import kv_cache_backend
from hf_adafuse.trees.pass_policy import Policy

LIGHT = 0.04


def pair(number, weights, prompts=PROMPTS[:1], length=12, **rule):
    """Two members with other tokenizers, and the method `words` with these weights."""
    rng = random.Random(number)
    names = rng.sample(list(TOKENIZERS), 2)
    models = [tiny_model(rng.choice(ARCHITECTURES), name, number, peak=4.0) for name in names]
    settings = {"method": "words", "model_weights": weights, **rule}
    tokenizers = [TOKENIZERS[name]() for name in names]
    return Case(models, tokenizers, AdaFuseConfig.from_dict(settings), list(prompts), length)


def expected_of(case, process=None):
    """The oracle's new ids of each row; `process(ids, logits)` is the main model's processor."""
    found = []
    for row in case.main_ids()[0]:
        members = case.ref_members()
        members[0].process = process
        found.append(oracle.decode_by_rule(members, case.member_prompts(row), case.config, case.max_new_tokens)[0])
    return found


@pytest.mark.fast
@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("heavy", [0, 1])
def test_a_member_that_hardly_counts_reads_its_prompt_and_no_more(heavy, number, monkeypatch):
    monkeypatch.setattr(Policy, "longest_draft", 0)
    case = pair(number, [1.0, LIGHT] if heavy == 0 else [LIGHT, 1.0], num_branches=3, margin_threshold=0.9)
    output = case.fast(use_cache=False)  # no cache is returned that would have to be complete
    asked, unasked = counts(output)[heavy], counts(output)[1 - heavy]
    prompts = [len(ids) for ids in case.member_prompts(case.main_ids()[0][0])]
    assert unasked == (1, prompts[1 - heavy])
    assert asked[0] - 1 == asked[1] - prompts[heavy]  # a token a pass: no branch is read
    for committed in output.rounds[0]:
        assert committed.proposer == heavy and len(committed.candidates) == 1
        assert committed.candidates[0].nlls[1 - heavy] is None and committed.candidates[0].nlls[heavy] is not None


@pytest.mark.fast
def test_who_has_a_twentieth_of_the_largest_weight_is_asked():
    for least, is_asked in [(0.0501, True), (0.0499, False)]:
        output = pair(1, [2.0, 2 * least]).fast()
        assert all((one.candidates[0].nlls[1] is not None) == is_asked for one in output.rounds[0])


@pytest.mark.parametrize("number", range(40))
def test_an_ensemble_of_which_some_are_asked_equals_the_oracle(number):
    """Also where nothing that they propose can be committed, so that all are asked in a round."""
    rng = random.Random(number)
    case = random_case(83000 + 4 * number + 1 + number % 3)
    weights = [rng.choice([1.0, 0.8, 0.04, 0.001]) for _ in case.models]
    rule = {"method": "words", "model_weights": [max(weights) if k == number % len(weights) else one
                                                 for k, one in enumerate(weights)]}  # fmt: skip
    rule |= {"online_rate": rng.choice([0.0, 2.0]), "mean": rng.choice(["root", "arithmetic"])}
    case.config = AdaFuseConfig.from_dict(case.config.to_dict() | {"nll_normalization": "token"} | rule)
    assert new_ids(case, case.fast()) == expected_of(case)


def test_it_is_known_before_the_text_who_is_asked():
    """A word that surprises a member takes its weight for a while, and no more."""
    tokenizer = word_tokenizer(["So", "It", "a", "b"])
    main = toy(tokenizer, {"It": {"a": 0.9}, "a": {"a": 0.9}})
    other = toy(tokenizer, {"It": {"a": 1e-9, "b": 0.9}, "a": {"a": 0.999}})
    settings = {"method": "words", "online_rate": 1.0, "max_words": 1}
    rounds = run([(main, tokenizer), (other, tokenizer)], settings, max_new_tokens=8).rounds[0]
    assert min(committed.weights[1] for committed in rounds) < 0.01
    assert all(committed.candidates[0].nlls[1] is not None for committed in rounds)


def test_where_nothing_can_be_committed_of_what_is_proposed_all_are_asked():
    """The main model cannot write what the member that counts would: of that one's branches one is left."""
    own, other = word_tokenizer(["So", "It", "red", "junk"]), word_tokenizer(["So", "It", "red", "blue"])
    main = toy(own, {"It": {"junk": 0.9}, "red": {"</s>": 0.9}})
    strong = toy(other, {"It": {"blue": 0.6, "red": 0.39}, "red": {"</s>": 0.9}})
    settings = {"method": "words", "model_weights": [0.001, 1.0]}
    found = run([(main, own), (strong, other)], settings)
    assert texts(found) == [" red", ""]


def test_batches_of_prompts_that_ask_other_members_equal_single_prompts():
    """Who is asked follows from the prompt."""
    case = pair(7, "prompt", PROMPTS[:4], max_word_tokens=3)
    output = case.fast()
    asked = {tuple(nll is not None for nll in row[0].candidates[row[0].winner].nlls) for row in output.rounds}
    assert len(asked) > 1
    together, alone = new_ids(case, output), []
    for prompt in PROMPTS[:4]:
        case.prompts = [prompt]
        alone += new_ids(case, case.fast())
    assert together == alone


@pytest.mark.parametrize("number", range(3))
def test_processors_of_a_member_that_hardly_counts_forbid_all_the_same(number):
    case = pair(number, [LIGHT, 1.0])
    usual = new_ids(case, case.fast())
    forbidden = sorted({*usual[0][:3]})
    processor = Forbid(forbidden)
    got = new_ids(case, case.fast(logits_processor=[processor]))

    def process(ids, logits):
        logits = logits.clone()
        logits[:, forbidden] = -math.inf
        return logits

    assert got == expected_of(case, process)
    assert not {*got[0]} & {*forbidden}


@pytest.mark.fast
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_main_model_whose_scores_are_wanted_reads_what_the_others_write(number):
    """That changes neither the text nor the weights."""
    case = pair(number, [LIGHT, 1.0], online_rate=1.0)
    output, plain = case.fast(output_scores=True), case.fast()
    ids = new_ids(case, output)
    assert ids == new_ids(case, plain)
    for one, other in zip(output.rounds[0], plain.rounds[0], strict=True):
        assert one.weights == other.weights and one.candidates[0].nlls[0] is None
    (ids,) = ids
    main, width = case.models[0], output.sequences.shape[1] - len(ids)
    logits = main(output.sequences).logits[0, width - 1 : -1]
    expected = logits.log_softmax(-1)[range(len(ids)), ids]
    found = torch.cat(output.scores).log_softmax(-1)[range(len(ids)), ids]
    assert len(output.scores) == len(ids) and torch.allclose(found, expected, atol=1e-4)


@pytest.mark.fast
@pytest.mark.parametrize("num_ends", [1, 2])
def test_a_main_model_that_is_not_asked_ends_its_text_by_its_likeliest_end(num_ends):
    tokenizer = word_tokenizer(["So", "It", "red", "stop"])
    main = toy(tokenizer, {"red": {"stop": 0.6, "</s>": 0.3}})
    main.generation_config.eos_token_id = [tokenizer.eos_token_id, 5][:num_ends]
    other = toy(tokenizer, {"It": {"red": 0.99}, "red": {"</s>": 0.99}})
    settings = {"method": "words", "model_weights": [LIGHT, 1.0]}
    output = run([(main, tokenizer), (other, tokenizer)], settings, use_cache=False)
    assert output.sequences[0, -2:].tolist() == [4, [1, 5][num_ends - 1]]
    assert counts(output)[0][0] == num_ends  # the prompt, and the text where it has to choose


@pytest.mark.fast
@pytest.mark.parametrize("has_end", [True, False])
def test_a_member_without_an_end_is_asked_and_rules_it_out(has_end):
    tokenizer = word_tokenizer(["So", "It", "red"])
    main = toy(tokenizer, {"It": {"</s>": 0.6, "red": 0.35}, "red": {"red": 0.9}})
    other = toy(tokenizer, {})
    other_tokenizer = copy.deepcopy(tokenizer)
    if not has_end:
        other_tokenizer.eos_token = other.generation_config.eos_token_id = None
    settings = {"method": "words", "model_weights": [1.0, LIGHT]}
    found = run([(main, tokenizer), (other, other_tokenizer)], settings, max_new_tokens=3)
    assert texts(found) == ([""] if has_end else [" red", " red red"])


@pytest.mark.fast
def test_a_method_of_ones_own_says_whom_it_asks(monkeypatch):
    class Second(SpanStrategy):
        asked = (1,)

        def asked_members(self, weights):
            return self.asked

    monkeypatch.delitem(STRATEGIES, "second", raising=False)
    register_strategy("second", Second)
    case = pair(4, None)
    case.config = AdaFuseConfig.from_dict({"method": "second"})
    assert {committed.proposer for committed in case.fast().rounds[0]} == {1}
    for wrong in ((), (2,), (-1,)):
        monkeypatch.setattr(Second, "asked", wrong)
        with pytest.raises(IndexError, match=r"Second\.asked_members gives must be numbers of 2 members"):
            case.fast()
    del STRATEGIES["second"]


@pytest.fixture
def reads_few(monkeypatch):
    """`reads_few(number)`: a pass reads so many tokens of a text that a member has not read."""

    def read(number):
        monkeypatch.setattr(kv_cache_backend, "_LEAST_PROMPT_COLUMNS", number)
        monkeypatch.setattr(Policy, "most_prompt_tokens", number)
        # What else a pass may hold is not drafts, and is there however long passes take.
        monkeypatch.setattr(Policy, "longest_draft", 0)
        monkeypatch.setattr(Policy, "worthwhile_ratio", 1000.0)

    return read


WORDS = [f"w{number}" for number in range(12)]
CHAIN = {above: {word: 0.9} for above, word in zip(["It", *WORDS], [*WORDS, "</s>"], strict=True)}


@pytest.mark.fast
@pytest.mark.parametrize("prompts", [["So It"], ["So It", "It"]], ids=len)
def test_a_main_model_that_reads_late_reads_in_parts(prompts, reads_few):
    """It has to choose the end of a text that it has not been asked about."""
    tokenizer = word_tokenizer(["So", "It", *WORDS, "stop"])
    main, other = toy(tokenizer, {"w11": {"</s>": 0.3, "stop": 0.6}}), toy(tokenizer, CHAIN)
    main.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("▁stop")]
    config = AdaFuseConfig.from_dict({"method": "words", "model_weights": [LIGHT, 1.0]})
    case = Case([main, other], [tokenizer] * 2, config, prompts, 20)
    reads_few(2)
    output = case.fast(use_cache=False)
    expected = tokenizer.convert_tokens_to_ids(["▁" + word for word in [*WORDS, "stop"]])
    assert new_ids(case, output) == [expected] * len(prompts)
    assert counts(output)[0][0] == 7  # the prompts, and twelve tokens of each text, two in a pass


@pytest.mark.fast
@pytest.mark.parametrize("rides", [True, False])
def test_an_assistant_that_reads_late_reads_in_parts(rides, reads_few, monkeypatch):
    """The main model is sure of all words but the last one. A processor of the assistant's is called once a token."""
    tokenizer = word_tokenizer(["So", "It", *WORDS])
    unsure = {**CHAIN, "w9": {"w10": 0.4, "w11": 0.35}}
    members = [(toy(tokenizer, unsure), tokenizer), (toy(tokenizer, {**CHAIN, "w9": {"w11": 0.9}}), tokenizer)]
    calls = []

    class Remembers:
        def __init__(self):
            self.num_calls = 0

        def __call__(self, input_ids, scores):
            self.num_calls += 1
            calls.append((self.num_calls, input_ids.shape[1]))
            return scores

    reads_few(2)
    if not rides:
        monkeypatch.setattr(Policy, "prefetched_tokens", 1)
    options = {"max_new_tokens": 20, "assistant_logits_processor": [[Remembers()]]}
    output = run(members, {"method": "words", "certainty_gate": 0.8}, **options)
    assert "".join(texts(output)).split() == [*WORDS[:10], "w11"]
    assert calls and all(number == width - 1 for number, width in calls)  # the prompt has two tokens


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("most", [2, 1000])
def test_the_cache_of_a_main_model_that_is_not_asked_has_all_of_the_text(most, number, reads_few):
    """Where an end comes after it, and where none does. It is read in parts that a pass can hold, and ordinary
    `generate()` goes on from it.
    """
    reads_few(most)
    case = pair(number, [LIGHT, 1.0])
    output = case.fast()
    assert output.rounds[0][-1].ends == (number == 1)
    main, ids = case.models[0], output.sequences
    assert cache_of(output).get_seq_length() == ids.shape[1] - 1
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
    expected = main.generate(ids, **options).tolist()
    assert main.generate(ids, **with_cache(cache_of(output)), **options).tolist() == expected
    assert (counts(output)[0][0] > 4) == (most == 2)


@pytest.mark.fast
def test_logits_of_members_that_are_not_asked_are_none():
    class Logits(SpanStrategy):
        needs_logits = True

        def asked_members(self, weights):
            return [1]

        def choose(self, candidates, weights, main_index):
            assert [len(values) > 0 for values in candidates[0].logits] == [False, True]
            return super().choose(candidates, weights, main_index)

    register_strategy("logits", Logits)
    try:
        assert pair(4, None, method="logits").fast().rounds[0]
    finally:
        del STRATEGIES["logits"]
