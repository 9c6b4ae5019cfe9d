"""Objects that remember: which are taken for such, and how each branch comes to a copy that was called in order."""

from __future__ import annotations

import functools
import inspect
import operator
import re
import threading
import types

import pytest
import torch
import transformers
from support.hosts import ensemble, new_ids
from transformers import generation as host

import hf_adafuse
from hf_adafuse.members.stateful_processors import (
    PER_ROW,
    WITH_STATE,
    CopyError,
    LiveCopy,
    StatefulProcessor,
    is_per_row,
    is_stateful,
)

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
    assert not is_stateful(thing)


class Undeclared(Declared):
    is_function_of_ids = False


@pytest.mark.parametrize("thing", [Plain(), OfAUser(2), of_remote_code(), Undeclared()])
def test_any_other_object_has_a_state(thing):
    assert is_stateful(thing) and not is_per_row(thing)


@pytest.mark.parametrize("name", WITH_STATE)
def test_transformers_own_that_remember(name):
    assert is_stateful(object.__new__(getattr(host.logits_process, name)))


@pytest.mark.parametrize("name", PER_ROW)
def test_transformers_own_that_may_be_made_for_a_batch(name):
    thing = object.__new__(getattr(host.logits_process, name))
    assert is_per_row(thing) and not is_stateful(thing)


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
        assert not is_stateful(object.__new__(getattr(hf_adafuse, name)))


# 2. Stateful processors


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


def called(stateful):
    """The calls that a stateful processor's object has seen."""
    return [ids[0] for ids, _ in stateful._processor.calls]


@pytest.mark.parametrize("cls", [Recorder, FirstCall])
def test_branches_go_on_from_what_they_have_in_common(cls):
    original = cls()
    start = StatefulProcessor(original)
    one, scores = start.after(*text(5))
    assert scores.tolist() == [[1, 1]]
    ends = [one.after(*text(5, last))[0] for last in (6, 7)]
    longer = [end.after(*text(5, last, 8)) for end, last in zip(ends, (6, 7), strict=True)]
    assert [called(end) for end in ends] == [[[5], [5, 6]], [[5], [5, 7]]]
    assert [called(stateful) for stateful, _ in longer] == [[[5], [5, 6], [5, 6, 8]], [[5], [5, 7], [5, 7, 8]]]
    assert all(scores.tolist() == [[3, 3]] for _, scores in longer)
    assert called(one) == [[5]] and called(start) == [] and original.calls == []
    # Each call, be it the second time, has the scores that it had, whatever was written into them.
    assert all(scores == [[float(sum(ids[0]))] * 2] for ids, scores in longer[0][0]._processor.calls)


def test_scores_are_not_kept_where_copies_are_possible():
    one, _ = StatefulProcessor(Recorder()).after(*text(5))
    assert one._calls is None
    replayed, _ = StatefulProcessor(FirstCall()).after(*text(5))
    assert len(replayed._calls) == 1


def test_what_can_no_longer_be_copied_says_so():
    stateful = StatefulProcessor(ThirdCall())
    for ids in ((5,), (5, 6), (5, 6, 7)):
        stateful, _ = stateful.after(*text(*ids))
    with pytest.raises(CopyError, match=r"cannot be copied any more .TypeError: .*generator"):
        stateful.after(*text(5, 6, 7, 8))


# 3. Copies that follow their original


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
    original = types.SimpleNamespace(event=threading.Event())
    live = LiveCopy(original)
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
