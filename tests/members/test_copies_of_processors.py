"""Copies of objects of other libraries: what they share, what is their own, and what cannot be copied is refused."""

from __future__ import annotations

import asyncio
import collections
import copy
import functools
import multiprocessing
import queue
import random
import threading
import time
import timeit
from pathlib import Path

import outlines_core
import pytest
import torch
import xgrammar
from support.calls import arguments, assert_refused, inputs_of
from support.hosts import ensemble
from support.tiny import TOKENIZERS, tiny_model

from hf_adafuse.members.stateful_processors import StatefulProcessor, check_copyable, fork_processor

BYTES = TOKENIZERS["byte_level"]()


class Holder:
    def __init__(self, **parts):
        vars(self).update(parts)

    def method(self):
        return self


class Slotted:
    __slots__ = ("part",)

    def __init__(self, part):
        self.part = part


@functools.cache
def compiled():
    info = xgrammar.TokenizerInfo.from_huggingface(BYTES, vocab_size=len(BYTES))
    compiler = xgrammar.GrammarCompiler(info)
    return info, compiler, compiler.compile_regex("[a-z]{3}")


SHARED = {
    "model": lambda: tiny_model(),
    "layer": lambda: torch.nn.Linear(2, 2),
    "tokenizer": lambda: BYTES,
    "backend tokenizer": lambda: BYTES.backend_tokenizer,
    "config": lambda: tiny_model().config,
    "module": lambda: torch,
    "event": threading.Event,
    "lock": threading.Lock,
    "rlock": threading.RLock,
    "thread": threading.current_thread,
    "queue": queue.Queue,
    "simple queue": queue.SimpleQueue,
    "asyncio event": asyncio.Event,
    "multiprocessing event": multiprocessing.Event,
    "tokenizer info": lambda: compiled()[0],
    "compiler": lambda: compiled()[1],
    "compiled grammar": lambda: compiled()[2],
}
SETTING_SOURCES = {
    "attribute": (lambda part: Holder(part=part), lambda holder: holder.part),
    "slot": (lambda part: Holder(part=Slotted(part)), lambda holder: holder.part.part),
    "list": (lambda part: Holder(parts=[[0], [part]]), lambda holder: holder.parts[1][0]),
    "tuple": (lambda part: Holder(parts=(1, [part])), lambda holder: holder.parts[1][0]),
    "dict": (lambda part: Holder(parts={"a": {"b": part}}), lambda holder: holder.parts["a"]["b"]),
    "deque": (lambda part: Holder(parts=collections.deque([part])), lambda holder: holder.parts[0]),
    "partial": (lambda part: Holder(part=functools.partial(max, [part])), lambda holder: holder.part.args[0][0]),
    "object below": (lambda part: Holder(below=Holder(part=part)), lambda holder: holder.below.part),
    "method": (lambda part: Holder(call=Holder(part=part).method), lambda holder: holder.call().part),
}


@pytest.mark.parametrize("name", SHARED)
def test_copies_share_what_is_large_or_anothers_handle(name):
    part = SHARED[name]()
    copied = fork_processor(Holder(part=part, own=[1]))
    assert copied.part is part and copied.own == [1]


@pytest.mark.parametrize("place", SETTING_SOURCES)
def test_what_is_shared_is_found_wherever_it_is_held(place):
    make, find = SETTING_SOURCES[place]
    original = make(BYTES)
    copied = fork_processor(original)
    assert copied is not original and find(copied) is BYTES


def test_a_method_of_something_shared_is_shared():
    copied = fork_processor(
        Holder(decode=BYTES.decode, later=functools.partial(BYTES.encode, add_special_tokens=False))
    )
    assert copied.decode.__self__ is BYTES and copied.later.func.__self__ is BYTES


MINE = {
    "list": (lambda: [1, [2]], lambda part: part[1].append(3)),
    "dict": (lambda: {"a": [1]}, lambda part: part["a"].append(2)),
    "default dict": (lambda: collections.defaultdict(list), lambda part: part["new"].append(1)),
    "deque": (lambda: collections.deque([1]), lambda part: part.append(2)),
    "set": (lambda: {1}, lambda part: part.add(2)),
    "tensor": (lambda: torch.zeros(3), lambda part: part.add_(1)),
    "random numbers": (lambda: random.Random(1), lambda part: part.random()),
    "iterator": (lambda: iter([1, 2, 3]), lambda part: next(part)),
    "object": (lambda: Holder(count=0), lambda part: vars(part).update(count=1)),
    "slots": (lambda: Slotted([1]), lambda part: part.part.append(2)),
}


def state_of(part):
    part = vars(part) if isinstance(part, Holder) else part.part if isinstance(part, Slotted) else part
    part = part.getstate() if isinstance(part, random.Random) else part
    return list(copy.copy(part)) if hasattr(part, "__next__") else part


@pytest.mark.parametrize("name", MINE)
def test_copies_have_a_state_of_their_own(name):
    make, change = MINE[name]
    original = Holder(part=make(), parts=[make()])
    copied = fork_processor(original)
    for part, own in ((original.part, copied.part), (original.parts[0], copied.parts[0])):
        assert str(state_of(own)) == str(state_of(part))
        before = str(state_of(part))
        change(own)
        assert str(state_of(part)) == before != str(state_of(own))


def test_what_is_one_object_stays_one():
    ids = [1]
    original = Holder(one=ids, other={"same": ids})
    original.itself = original
    original.call = original.method
    copied = fork_processor(original)
    assert copied.one is copied.other["same"] is not ids
    assert copied.itself is copied and copied.call() is copied


class Matcher:
    """Cannot be copied by Python, and knows how to copy itself."""

    def __init__(self, ids=()):
        self.ids = list(ids)

    def __reduce_ex__(self, protocol):
        raise TypeError("cannot pickle a Matcher")


class WithFork(Matcher):
    def fork(self):
        return type(self)(self.ids)


class WithDeepCopy(Matcher):
    def deep_copy(self):
        return type(self)(self.ids)


@pytest.mark.parametrize("cls", [WithFork, WithDeepCopy])
def test_what_knows_how_to_copy_itself_does(cls):
    original = Holder(matchers=[cls([1]), cls([2])])
    copied = fork_processor(original)
    copied.matchers[0].ids.append(3)
    assert [matcher.ids for matcher in copied.matchers] == [[1, 3], [2]]
    assert [matcher.ids for matcher in original.matchers] == [[1], [2]]
    alone = fork_processor(original.matchers[1])
    assert alone is not original.matchers[1] and alone.ids == [2]


def test_xgrammars_matcher_goes_its_own_way():
    original = Holder(matcher=xgrammar.GrammarMatcher(compiled()[2]))
    copied = fork_processor(original)
    letter = BYTES.convert_tokens_to_ids("q")
    assert copied.matcher.accept_token(letter) and copied.matcher.accept_token(letter)
    bitmasks = [xgrammar.allocate_token_bitmask(1, len(BYTES)) for _ in range(2)]
    original.matcher.fill_next_token_bitmask(bitmasks[0])
    xgrammar.GrammarMatcher(compiled()[2]).fill_next_token_bitmask(bitmasks[1])
    assert torch.equal(*bitmasks)


class Guided:
    """As outlines' own: a guide for each row, all of one index."""

    def __init__(self, index):
        self.index, self.guides, self.seen = index, [], []

    def __call__(self, ids, scores):
        if not self.guides:
            self.guides = [outlines_core.Guide(self.index) for _ in ids]
        else:
            for guide, token in zip(self.guides, ids[:, -1].tolist(), strict=True):
                guide.advance(token, return_tokens=False)
        self.seen = [*self.seen, [guide.get_state() for guide in self.guides]]
        return scores


def test_guides_of_outlines_do_not_copy_their_index():
    words = {f"w{number}": [number + 1] for number in range(5000)}
    index = outlines_core.Index(r"(w[0-9]{1,4}){1,50}", outlines_core.Vocabulary(0, words))
    seconds = min(timeit.repeat(lambda: copy.deepcopy(outlines_core.Guide(index)), number=1, repeat=3))
    stateful, ids, scores = StatefulProcessor(Guided(index)), torch.tensor([[7], [8]]), torch.zeros(2, 4)
    start = time.perf_counter()
    for number in range(20):
        stateful, _ = stateful.after(ids, scores)
        other, _ = stateful.after(torch.cat([ids, torch.tensor([[11], [12]])], dim=1), scores)  # a branch
        ids = torch.cat([ids, torch.tensor([[number + 1], [2 * number + 1]])], dim=1)
        states = [processor.seen for processor in (stateful._processor, other._processor)]
        assert states[1][:-1] == states[0] and len(states[0]) == number + 1
    assert time.perf_counter() - start < 40 * seconds, "40 calls in a batch of two"
    expected = Guided(index)
    for length in range(1, 21):
        expected(ids[:, :length], scores)
    assert stateful._processor.seen == expected.seen


def test_guides_whose_way_is_not_known_are_copied():
    words = {letter: [number] for number, letter in enumerate("abc", start=1)}
    original = Guided(outlines_core.Index("[abc]{2}b", outlines_core.Vocabulary(0, words)))
    original.guides = [outlines_core.Guide(original.index)]
    original.guides[0].advance(3)
    for walked in (None, torch.tensor([[3]]), torch.tensor([[3, 1]]), torch.tensor([[3], [3]])):
        copied = fork_processor(original, walked)
        copied.guides[0].advance(1)
        assert sorted(copied.guides[0].get_tokens()) == [2] and sorted(original.guides[0].get_tokens()) == [1, 2, 3]


class WithFile:
    def __init__(self):
        self.file = Path(__file__).open(encoding="utf-8")  # noqa: SIM115

    def __call__(self, ids, scores, **kwargs):
        raise AssertionError("never called")


def test_what_cannot_be_copied_is_refused():
    thing = WithFile()
    with thing.file, pytest.raises(ValueError, match=r"`logits_processor` must be .* a WithFile cannot .TypeError"):
        check_copyable([Holder(), thing], "logits_processor")
    check_copyable([Holder(), compiled()], "logits_processor")


@pytest.mark.parametrize("argument", ["logits_processor", "assistant_logits_processor", "stopping_criteria"])
def test_it_is_refused_before_the_first_pass(argument):
    thing = WithFile()
    given = [[thing]] if argument == "assistant_logits_processor" else [thing]
    prompts = inputs_of(BYTES, "She", "Once upon a time")
    with thing.file:
        message = assert_refused(
            arguments(**prompts, **{argument: given}), f"`{argument}` must be .* a WithFile cannot"
        )
    assert message.endswith("Give it a `__deepcopy__`, or make it a function of the ids.")


def test_a_prompt_alone_asks_a_criterion_that_cannot_be_copied():
    case = ensemble("llama/byte_level/0", prompts=["She"], n=3)
    calls = []

    class Asked(WithFile):
        def __call__(self, ids, scores, **kwargs):
            calls.append(ids.shape)
            return torch.tensor([False])

    criterion = Asked()
    with criterion.file:
        case.fast(stopping_criteria=[criterion])
    assert len(calls) == 3
