"""Objects that remember: which are taken for such, and how each branch comes to a copy that was called in order."""

from __future__ import annotations

import asyncio
import collections
import copy
import functools
import inspect
import multiprocessing
import operator
import queue
import random
import re
import threading
import time
import timeit
import types
from pathlib import Path

import outlines_core
import pytest
import torch
import transformers
import xgrammar
from calls import arguments, assert_refused, inputs_of
from hosts import ensemble, new_ids
from tiny import TOKENIZERS, tiny_model
from transformers import generation as host

import hf_adafuse
from hf_adafuse.members.forks import check_forks, fork
from hf_adafuse.members.histories import PER_ROW, WITH_STATE, ForkError, History, LiveCopy, has_history, is_per_row

BYTES = TOKENIZERS["byte_level"]()
# transformers' own that set something in a call, but nothing that a later call reads.
SET_AND_FORGET = {
    "EosTokenCriteria",
    "ExponentialDecayLengthPenalty",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "StopStringCriteria",
    "SuppressTokensAtBeginLogitsProcessor",
}


# 1. The table: what an object is


class Plain:
    """An object of a user's, or of a library's."""

    def __call__(self, ids, scores):
        return scores

    def method(self, ids, scores):
        return scores


class Declared(Plain):
    is_function_of_ids = True


class OfAUser(host.NoRepeatNGramLogitsProcessor):
    pass


def of_remote_code():
    return type("Remote", (Plain,), {"__module__": "transformers_modules.someone.code"})()


@pytest.mark.parametrize(
    "thing",
    [
        host.NoRepeatNGramLogitsProcessor(2),
        host.MaxLengthCriteria(3),
        lambda ids, scores: scores,
        max,
        operator.add,
        Plain().method,
        functools.partial(Plain()),
        Declared(),
        type("Heir", (Declared,), {})(),
    ],
)
def test_functions_of_the_ids(thing):
    assert not has_history(thing)


class Undeclared(Declared):
    is_function_of_ids = False


@pytest.mark.parametrize("thing", [Plain(), OfAUser(2), of_remote_code(), Undeclared()])
def test_any_other_object_has_a_history(thing):
    assert has_history(thing) and not is_per_row(thing)


@pytest.mark.parametrize("name", WITH_STATE)
def test_transformers_own_that_remember(name):
    assert has_history(object.__new__(getattr(host.logits_process, name)))


@pytest.mark.parametrize("name", PER_ROW)
def test_transformers_own_that_may_be_made_for_a_batch(name):
    thing = object.__new__(getattr(host.logits_process, name))
    assert is_per_row(thing) and not has_history(thing)


def test_functions_may_be_made_for_a_batch_and_declared_objects_are_not():
    assert is_per_row(lambda ids, scores: scores) and is_per_row(Plain().method) and is_per_row(functools.partial(max))
    assert not is_per_row(Declared()) and not is_per_row(host.NoRepeatNGramLogitsProcessor(2))


def test_no_other_of_transformers_own_sets_anything_in_a_call():
    changing = set()
    for module in (host.logits_process, host.stopping_criteria):
        for name, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__ != module.__name__ or name.startswith("Whisper") or not callable(cls):
                continue
            methods = [method for at, method in vars(cls).items() if inspect.isfunction(method) and at != "__init__"]
            sets = r"self\.\w+(\[.*?\])?\s*[-+*/|]?=[^=]|self\.\w+\.(append|add|update|pop|extend)\("
            if any(re.search(sets, inspect.getsource(method)) for method in methods):
                changing.add(name)
    assert changing == {*WITH_STATE, *SET_AND_FORGET}


def test_the_packages_own_are_functions_of_the_ids():
    for name in ("BranchLogitsProcessor", "WordBoundaryCriteria", "MarginCriteria"):
        assert not has_history(object.__new__(getattr(hf_adafuse, name)))


# 2. Copies


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
PLACES = {
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
    copied = fork(Holder(part=part, own=[1]))
    assert copied.part is part and copied.own == [1]


@pytest.mark.parametrize("place", PLACES)
def test_what_is_shared_is_found_wherever_it_is_held(place):
    make, find = PLACES[place]
    original = make(BYTES)
    copied = fork(original)
    assert copied is not original and find(copied) is BYTES


def test_a_method_of_something_shared_is_shared():
    copied = fork(Holder(decode=BYTES.decode, later=functools.partial(BYTES.encode, add_special_tokens=False)))
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
    copied = fork(original)
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
    copied = fork(original)
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
    copied = fork(original)
    copied.matchers[0].ids.append(3)
    assert [matcher.ids for matcher in copied.matchers] == [[1, 3], [2]]
    assert [matcher.ids for matcher in original.matchers] == [[1], [2]]
    alone = fork(original.matchers[1])
    assert alone is not original.matchers[1] and alone.ids == [2]


def test_xgrammars_matcher_goes_its_own_way():
    original = Holder(matcher=xgrammar.GrammarMatcher(compiled()[2]))
    copied = fork(original)
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
    history, ids, scores = History(Guided(index)), torch.tensor([[7], [8]]), torch.zeros(2, 4)
    start = time.perf_counter()
    for number in range(20):
        history, _ = history.after(ids, scores)
        other, _ = history.after(torch.cat([ids, torch.tensor([[11], [12]])], dim=1), scores)  # a branch
        ids = torch.cat([ids, torch.tensor([[number + 1], [2 * number + 1]])], dim=1)
        states = [processor.seen for processor in (history._processor, other._processor)]
        assert states[1][:-1] == states[0] and len(states[0]) == number + 1
    assert time.perf_counter() - start < 40 * seconds, "40 calls in a batch of two"
    expected = Guided(index)
    for length in range(1, 21):
        expected(ids[:, :length], scores)
    assert history._processor.seen == expected.seen


def test_guides_whose_way_is_not_known_are_copied():
    words = {letter: [number] for number, letter in enumerate("abc", start=1)}
    original = Guided(outlines_core.Index("[abc]{2}b", outlines_core.Vocabulary(0, words)))
    original.guides = [outlines_core.Guide(original.index)]
    original.guides[0].advance(3)
    for walked in (None, torch.tensor([[3]]), torch.tensor([[3, 1]]), torch.tensor([[3], [3]])):
        copied = fork(original, walked)
        copied.guides[0].advance(1)
        assert sorted(copied.guides[0].get_tokens()) == [2] and sorted(original.guides[0].get_tokens()) == [1, 2, 3]


# 3. Histories


class Recorder:
    """Keeps its calls, and gives the number of them."""

    def __init__(self):
        self.calls = []

    def __call__(self, ids, scores):
        self.calls.append((ids.tolist(), scores.tolist()))
        scores.fill_(len(self.calls))
        return scores


class FirstCall(Recorder):
    """What comes to it with its first call cannot be copied."""

    def __call__(self, ids, scores):
        self.tokens = (token for token in ids)
        return super().__call__(ids, scores)


class ThirdCall(Recorder):
    def __call__(self, ids, scores):
        if len(self.calls) == 2:
            self.tokens = (token for token in ids)
        return super().__call__(ids, scores)


def text(*ids):
    return torch.tensor([ids]), torch.full((1, 2), float(sum(ids)))


def called(history):
    """The calls that a history's object has seen."""
    return [ids[0] for ids, _ in history._processor.calls]


@pytest.mark.parametrize("cls", [Recorder, FirstCall])
def test_branches_go_on_from_what_they_have_in_common(cls):
    original = cls()
    start = History(original)
    one, scores = start.after(*text(5))
    assert scores.tolist() == [[1, 1]]
    ends = [one.after(*text(5, last))[0] for last in (6, 7)]
    longer = [end.after(*text(5, last, 8)) for end, last in zip(ends, (6, 7), strict=True)]
    assert [called(end) for end in ends] == [[[5], [5, 6]], [[5], [5, 7]]]
    assert [called(history) for history, _ in longer] == [[[5], [5, 6], [5, 6, 8]], [[5], [5, 7], [5, 7, 8]]]
    assert all(scores.tolist() == [[3, 3]] for _, scores in longer)
    assert called(one) == [[5]] and called(start) == [] and original.calls == []
    # Each call, be it the second time, has the scores that it had, whatever was written into them.
    assert all(scores == [[float(sum(ids[0]))] * 2] for ids, scores in longer[0][0]._processor.calls)


def test_scores_are_not_kept_where_copies_are_possible():
    one, _ = History(Recorder()).after(*text(5))
    assert one._calls is None
    replayed, _ = History(FirstCall()).after(*text(5))
    assert len(replayed._calls) == 1


def test_what_can_no_longer_be_copied_says_so():
    history = History(ThirdCall())
    for ids in ((5,), (5, 6), (5, 6, 7)):
        history, _ = history.after(*text(*ids))
    with pytest.raises(ForkError, match=r"cannot be copied any more .TypeError: .*generator"):
        history.after(*text(5, 6, 7, 8))


# 4. What cannot be copied is refused


class WithFile:
    def __init__(self):
        self.file = Path(__file__).open(encoding="utf-8")  # noqa: SIM115

    def __call__(self, ids, scores, **kwargs):
        raise AssertionError("never called")


def test_what_cannot_be_copied_is_refused():
    thing = WithFile()
    with thing.file, pytest.raises(ValueError, match=r"`logits_processor` must be .* a WithFile cannot .TypeError"):
        check_forks([Plain(), thing], "logits_processor")
    check_forks([Plain(), Recorder(), compiled()], "logits_processor")


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


# 5. Copies that follow their original


class Flagged:
    stop = False

    def __init__(self):
        self.count, self.limit = 0, 10

    def __call__(self, ids, scores, **kwargs):
        self.count += 1
        return self.stop or self.count >= self.limit


def test_what_is_set_on_the_original_reaches_its_copies():
    original = Flagged()
    copies = [LiveCopy(original) for _ in range(2)]
    assert [live(None, None) for live in (*copies, copies[0])] == [False] * 3
    original.limit = 3
    assert [live(None, None) for live in copies] == [True, False]  # their own counts, the new limit
    assert original.count == 0
    original.stop = True  # an attribute that it did not have
    assert [live(None, None) for live in copies] == [True, True]
    original.stop = False
    assert copies[1](None, None) is True and LiveCopy(original)(None, None) is False  # four calls; none


def test_an_event_reaches_the_copies():
    original = Holder(event=threading.Event())
    live = LiveCopy(types.SimpleNamespace(event=original.event))
    original.event.set()
    assert live._copy.event.is_set()


def test_a_flag_stops_all_rows_of_a_call_that_runs():
    case, criterion, seen = ensemble("llama/byte_level/0", "gpt2/byte_level/1", n=30), Flagged(), []
    criterion.limit = 100

    def after_a_while(ids, scores):  # asked after each token, of whichever row
        seen.append(len(ids))
        criterion.stop = len(seen) >= 8
        return False

    full = new_ids(case, case.fast(min_new_tokens=30))
    rows = new_ids(case, case.fast(min_new_tokens=30, stopping_criteria=[after_a_while, criterion]))
    assert all(row == whole[: len(row)] for row, whole in zip(rows, full, strict=True))
    assert sum(map(len, rows)) == 9 and seen == [2] * 9  # one row at the eighth token, the other at its next
    assert criterion.count == 0


def test_the_lists_name_classes_that_there_are():
    assert all(hasattr(transformers.generation.logits_process, name) for name in (*WITH_STATE, *PER_ROW))
