"""Logits processors and stopping criteria that remember earlier calls, and copies of such objects.

Ordinary `generate()` calls a processor once a token, with ids that grow by one. Here each branch of each prompt has a
copy that has been called just so, as if that text were generated alone. The caller's own object is left as it is. How
an object is called follows from what it is, by the first line that fits:

| what it is | how it is called |
|---|---|
| a class of transformers' own, but for the lists below | a function of the ids: many texts at once, in any order |
| of `PER_ROW`; a function, method or partial | a function of the ids, with as many rows as the batch, all of one text |
| a class with `is_function_of_ids = True` | a function of the ids |
| any other object; of `WITH_STATE` | with a state: a copy for each branch, once a token, with the batch it is for |
"""

from __future__ import annotations

import contextlib
import copy
import functools
import queue
import threading
import types
from collections import deque
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

T = TypeVar("T")

# transformers' own classes that remember earlier calls.
WITH_STATE = (
    "DiaEOSDelayPatternLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
)
# transformers' own classes that may have been made for a batch: what they do to a text follows from its row.
PER_ROW = (
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)

# What copies share: large and never changed by a call, or another thread's handle on the object.
_SHARED = (
    torch.nn.Module,
    PreTrainedTokenizerBase,
    PreTrainedConfig,
    types.ModuleType,
    threading.Event,
    threading.Thread,
    queue.Queue,
    queue.SimpleQueue,
    type(threading.Lock()),
    type(threading.RLock()),
)
# The same of libraries that need not be installed: module and class. Compiled grammars, and what they are made with.
_SHARED_NAMES = {
    ("xgrammar", "CompiledGrammar"),
    ("xgrammar", "GrammarCompiler"),
    ("xgrammar", "Grammar"),
    ("xgrammar", "TokenizerInfo"),
    ("outlines_core", "Index"),
    ("outlines_core", "Vocabulary"),
    ("llguidance", "LLTokenizer"),
    ("tokenizers", "Tokenizer"),
    ("asyncio", "Event"),
    ("multiprocessing", "Event"),
}
# Methods by which libraries copy what `copy.deepcopy` cannot.
_FORKS = ("fork", "deep_copy")


def is_stateful(thing: Any) -> bool:
    """Whether an object is called as one with a state, by the table above."""
    if isinstance(thing, list):  # `StoppingCriteriaList` in another
        return any(map(is_stateful, thing))
    cls = type(thing)
    if is_of_transformers(cls):
        return cls.__name__ in WITH_STATE
    return not isinstance(thing, _FUNCTIONS) and not getattr(cls, "is_function_of_ids", False)


def is_per_row(thing: Any) -> bool:
    """Whether a function of the ids is asked with as many rows as the batch; by the table above."""
    if isinstance(thing, list):
        return any(map(is_per_row, thing))
    cls = type(thing)
    return isinstance(thing, _FUNCTIONS) or (is_of_transformers(cls) and cls.__name__ in PER_ROW)


class CopyError(Exception):
    """A processor can no longer be copied, though it could be before its first call."""


class StatefulProcessor:
    """
    A logits processor after its calls so far, one for each token.

    Args:
        processor: not yet called; stays as it is.
    """

    def __init__(self, processor: Any) -> None:
        self._pristine = processor
        self._processor: Any = fork_processor(processor)
        self._ids: torch.Tensor | None = None  # of the last call
        self._num_prompt_tokens = 0  # of the ids of the first
        # The ids and scores of each call; `None` where it can be copied after them.
        self._calls: list[tuple[torch.Tensor, torch.Tensor]] | None = []

    def after(self, ids: torch.Tensor, scores: torch.Tensor) -> tuple[StatefulProcessor, Any]:
        """
        The processor after one more call, and what that call returned. This one stays as it is.

        Args:
            ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`), scores (`torch.FloatTensor` of shape
                `(batch_size, vocab_size)`): the arguments of the call; they stay as they are.

        Raises:
            CopyError: it can no longer be copied.
        """
        longer = object.__new__(StatefulProcessor)
        longer._pristine = self._pristine
        longer._processor = self._copied()
        longer._ids = ids
        longer._num_prompt_tokens = ids.shape[1] if self._ids is None else self._num_prompt_tokens
        result = longer._processor(ids, scores.clone())
        longer._calls = None if self._calls is None else [*self._calls, (ids, scores)]
        if self._calls == []:  # it has been called for the first time
            with contextlib.suppress(Exception):
                longer._fork()
                longer._calls = None
        return longer, result

    def _fork(self) -> Any:
        return fork_processor(self._processor, None if self._ids is None else self._ids[:, self._num_prompt_tokens :])

    def _copied(self) -> Any:
        if not self._calls:
            try:
                return self._fork()
            except Exception as error:  # whatever a part of it says
                raise CopyError(f"cannot be copied any more ({type(error).__name__}: {error})") from error
        # What came to it with its first call cannot be copied: a pristine copy goes through all of them again.
        processor = fork_processor(self._pristine)
        for ids, scores in self._calls:
            processor(ids, scores.clone())
        return processor


class LiveCopy:
    """
    A copy of an object whose attributes follow those of the caller's original: the caller may set a flag that says
    stop.

    Args:
        original: the caller's; never called.
    """

    def __init__(self, original: Any) -> None:
        self._original = original
        self._seen = dict(getattr(original, "__dict__", {}))
        self._copy = fork_processor(original)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        for name, value in getattr(self._original, "__dict__", {}).items():
            if name not in self._seen or self._seen[name] is not value:
                self._seen[name] = value
                setattr(self._copy, name, value)
        return self._copy(*arguments, **options)


def is_of_transformers(cls: type) -> bool:
    """Whether a class is transformers' own."""
    return cls.__module__.partition(".")[0] == "transformers"


def fork_processor(thing: T, walked: torch.Tensor | None = None) -> T:
    """
    A copy that can be called while the original stays as it is. Models, tokenizers and compiled grammars are shared.

    Args:
        thing: the original.
        walked (`torch.LongTensor` of shape `(batch_size, num_tokens)`, *optional*): of a logits processor that has
            been called once a token, the ids since its first call.

    Raises:
        Exception: whatever its parts raise that cannot be copied.
    """
    known = _known_parts(thing)
    if walked is not None:
        known.update(_walked_guides(thing, walked))
    return copy.deepcopy(thing, known)


def check_copyable(things: list[Any], argument: str) -> None:
    """
    Refuse objects that cannot be copied, before anything is run.

    Raises:
        ValueError: names the object's class.
    """
    for thing in things:
        try:
            fork_processor(thing)
        except Exception as error:  # whatever a part of it says
            raise ValueError(
                f"`{argument}` must be objects that can be copied, one for each branch, but a {type(thing).__name__} "
                f"cannot ({type(error).__name__}: {error}). Give it a `__deepcopy__`, or make it a function of the ids."
            ) from error


def _known_parts(thing: Any) -> dict[int, Any]:
    """For `copy.deepcopy`: the parts that are shared, and those that know how to copy themselves."""
    known: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = [thing]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        method = next((name for name in _FORKS if callable(getattr(type(part), name, None))), None)
        if _is_shared(part):
            known[id(part)] = part
        elif method is not None:
            known[id(part)] = getattr(part, method)()
        else:
            waiting.extend(_parts(part))
    return known


def _is_shared(part: Any) -> bool:
    return isinstance(part, _SHARED) or _name(part) in _SHARED_NAMES


def _name(part: Any) -> tuple[str, str]:
    """The package and the name of an object's class."""
    return type(part).__module__.partition(".")[0], type(part).__name__


def _parts(part: Any) -> Iterator[Any]:
    if isinstance(part, types.MethodType):
        yield part.__self__
    elif isinstance(part, functools.partial):
        yield from (part.func, part.args, part.keywords)
    elif isinstance(part, dict):
        yield from part.values()
    elif isinstance(part, (list, tuple, set, frozenset, deque)):
        yield from part
    elif not isinstance(part, (type, torch.Tensor, types.FunctionType)):
        yield from getattr(part, "__dict__", {}).values()
        for cls in type(part).__mro__:
            slots = getattr(cls, "__slots__", ())
            yield from (
                getattr(part, name) for name in ([slots] if isinstance(slots, str) else slots) if hasattr(part, name)
            )


def _walked_guides(thing: Any, walked: torch.Tensor) -> dict[int, Any]:
    """
    For `copy.deepcopy`, where an object has a guide of outlines-core for each row: it would copy the whole index with
    each. In their places new ones that have gone the same way through the one index.
    """
    parts = list(getattr(thing, "__dict__", {}).values())
    index = next((part for part in parts if _name(part) == ("outlines_core", "Index")), None)
    lists = [part for part in parts if isinstance(part, list) and len(part) == len(walked)]
    guides = next((part for part in lists if all(_name(guide) == ("outlines_core", "Guide") for guide in part)), None)
    known: dict[int, Any] = {}
    if index is None or guides is None:
        return known
    for guide, tokens in zip(guides, walked.tolist(), strict=True):
        anew = type(guide)(index)
        for token in tokens:
            if not anew.is_finished() or anew.accepts_tokens([token]):  # what is after the end goes nowhere
                anew.advance(token, return_tokens=False)
        if anew.get_state() == guide.get_state():
            known[id(guide)] = anew
    return known
