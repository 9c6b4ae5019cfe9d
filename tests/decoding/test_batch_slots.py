"""A batch with fewer places than prompts: who waits, who comes next, what is read when, and who is told."""

from __future__ import annotations

import copy

import pytest
import torch
from support.calls import BYTES, CHARS, LEFT, arguments, assert_refused, inputs_of, own
from support.cases import PROMPTS, Case, assert_equal, counts
from support.kinds import case_of, model_of
from support.releases import cache_of, with_cache
from support.tiny import tiny_model
from support.toys import run, toy, word_tokenizer

from hf_adafuse import AdaFuseConfig, enable_adafuse, prefix_caching
from hf_adafuse.decoding.scheduler import Scheduler
from hf_adafuse.transformers_compat import CACHE_NAME
from hf_adafuse.trees.backend import Backend
from hf_adafuse.trees.pass_policy import Policy

WORDS = word_tokenizer(["a", "b", "c", "d"])
# "a" is followed by one more word, "b" by two, "d" by none.
CHAIN = {"a": {"c": 0.99}, "b": {"a": 0.99}, "c": {"</s>": 0.99}, "d": {"</s>": 0.99}}


def case(places, prompts=PROMPTS[:4], **config):
    models = [tiny_model("llama", "byte_level"), tiny_model("gpt2", "characters")]
    return Case(models, [BYTES, CHARS], AdaFuseConfig(max_word_tokens=3, **config), list(prompts), 8, places)


@pytest.fixture
def read(monkeypatch):
    """How many prompts each member read at a time."""
    numbers = []
    plant = Backend._plant

    def planted(self, prompts):
        numbers.append(len(prompts))
        plant(self, prompts)

    monkeypatch.setattr(Backend, "_plant", planted)
    return numbers


def toys(*prompts, **kwargs):
    """Two members that agree, one word a round."""
    pair = [(toy(WORDS, CHAIN), WORDS), (toy(WORDS, CHAIN), WORDS)]
    return run(pair, AdaFuseConfig(max_words=1, num_branches=1), prompt=list(prompts), **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("places", [1, 2, 3, 4, 9])
def test_each_prompt_has_the_text_that_it_has_alone(places):
    assert_equal(case(places))


def test_who_has_tokens_left_to_do_is_known_in_a_padded_batch(monkeypatch):
    """Of each prompt all of them at first, whatever its padding; fewer from pass to pass."""
    left = {}
    serve = Scheduler._serve

    def watched(self):
        for row in {row for waiting in self._waiting for row in waiting}:
            left.setdefault(row, []).append(self._num_left(row))
        return serve(self)

    monkeypatch.setattr(Scheduler, "_serve", watched)
    case(2).fast()
    assert sorted(left) == [0, 1, 2, 3]
    assert all(of_row[0] == 8 and of_row == sorted(of_row, reverse=True) for of_row in left.values())
    assert all(of_row[-1] < 8 for of_row in left.values())


@pytest.mark.parametrize("weights", ["prompt", "examples"])
def test_weights_follow_from_prompts_that_are_read_later(weights):
    settings = {"model_weights": weights, "prompt_sharpness": 5.0}
    together, later = case(None, **settings).fast(), case(1, **settings).fast()
    assert torch.equal(together.sequences, later.sequences)


@pytest.fixture
def one_by_one(monkeypatch):
    """Nothing is guessed: a token a pass, so that the texts end in the order of their lengths."""
    monkeypatch.setattr(Policy, "longest_draft", 0)


@pytest.mark.usefixtures("one_by_one")
def test_whoever_ends_is_replaced_at_once(read):
    output = toys("d", "b", "a", "d", max_batch_size=2)
    assert [len(rounds) for rounds in output.rounds] == [1, 3, 2, 1]
    # Both places; when "d" has ended, "a"; when that, or "b" beside it, has ended, the last "d".
    assert read[-6:] == [2, 2, 1, 1, 1, 1]  # a self-test has read prompts, too


@pytest.mark.usefixtures("one_by_one")
def test_a_row_is_told_when_it_has_ended():
    told = []
    output = toys("b", "d", "a", max_batch_size=2, on_answer=lambda row, rounds: told.append((row, list(rounds))))
    assert told[0][0] == 1 and len(told) == 3
    assert dict(told) == dict(enumerate(output.rounds))


@pytest.mark.usefixtures("one_by_one")
def test_without_a_limit_all_rows_are_told():
    told = []
    toys("b", "d", "a", on_answer=lambda row, rounds: told.append(row))
    assert told == [1, 2, 0]


@pytest.mark.slow
def test_what_waiting_prompts_begin_with_is_not_read_again():
    beginning = "Question: what is the capital of France? Answer: Paris. " * 3
    few = case(1, [beginning + prompt for prompt in PROMPTS[:4]])
    all_at_once = case(None, few.prompts)
    assert_equal(few)
    tokens = [[sum(number for _, number in counts(one.fast()))] for one in (few, all_at_once)]
    assert tokens[0][0] <= tokens[1][0] + 2 * 4  # a token or so a member and prompt, to go on from
    with prefix_caching():
        assert_equal(few)


def test_a_failure_while_a_waiting_prompt_is_read(monkeypatch):
    from hf_adafuse import AdaFuseDecodingError
    from hf_adafuse.trees.backend import ForwardError

    def fail(self, *args):
        raise ForwardError("out of memory")

    monkeypatch.setattr(Backend, "admit", fail)
    with pytest.raises(AdaFuseDecodingError, match="failed in round 0: out of memory") as caught:
        case(1).fast()
    assert caught.value.texts[0] and not any(caught.value.texts[1:])


@pytest.mark.parametrize("places", [0, -1, 2.0, True, "two"])
def test_bad_numbers_of_places_are_refused(places):
    assert_refused(arguments(max_batch_size=places), "`max_batch_size` must be a whole number of at least 1")


def test_what_is_no_function_is_refused():
    assert_refused(arguments(on_answer="print"), "`on_answer` must be a function of a row and its rounds")


def test_a_cache_needs_all_places():
    main = enable_adafuse(own())
    inputs = inputs_of(BYTES, PROMPTS[0], PROMPTS[0])
    first = main.generate(**arguments(**inputs, return_dict_in_generate=True))
    longer = {"input_ids": first.sequences, "attention_mask": LEFT, **with_cache(cache_of(first))}
    assert_refused(arguments(**longer, max_batch_size=1), "`max_batch_size` must be at least the number of", main=main)
    assert main.generate(**arguments(**longer, max_batch_size=2)).shape[0] == 2


def test_the_cache_of_an_assistant_needs_all_places_too():
    """Also where the main model keeps no keys."""
    case = case_of(model_of("bamba"), batch=2)
    case.prompts = case.prompts[:1] * 2
    first, longer = case.fast(), copy.copy(case)
    longer.main_ids = lambda: (None, first.sequences, torch.ones_like(first.sequences))
    longer.max_new_tokens = 3
    assert longer.fast(**with_cache(cache_of(first))).sequences.shape[1] > first.sequences.shape[1]
    longer.max_batch_size = 1
    with pytest.raises(ValueError, match=f"number of prompts, 2, with `{CACHE_NAME}`, but is 1"):
        longer.fast(**with_cache(cache_of(first)))


def test_without_use_cache_none_is_handed_out(monkeypatch):
    monkeypatch.setattr(Backend, "keys_values", lambda *args: pytest.fail("nobody asked for it"))
    output = case(2).fast(use_cache=False)
    assert cache_of(output) is None and len(output.rounds) == 4
