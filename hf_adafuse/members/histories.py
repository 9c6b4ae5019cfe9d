"""Objects of the host that remember: logits processors and stopping criteria with a state. Knows no tree or text.

The ordinary loop calls such an object once a token, with ids that grow by one. Here each branch of each prompt has a
copy of the object that has been called just so, as if that text were generated alone by ordinary `generate()`; the
caller's own object is left as it is. How an object is asked follows from what it is, by the first line that fits:

| what it is | how it is asked |
|---|---|
| a class of transformers' own, but for `WITH_STATE` | a function of the ids: about many texts at once, in any order |
| a class with `is_function_of_ids = True`; a function, method or partial | likewise |
| any other object | it has a history: a copy for each branch, called once a token with the batch it was made for |
"""

from __future__ import annotations

import contextlib
import copy
import functools
import queue
import threading
import types
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
# What copies share: large and never changed by a call, or another thread's handle on the object.
_SHARED = (
    torch.nn.Module,
    PreTrainedTokenizerBase,
    PreTrainedConfig,
    types.ModuleType,
    threading.Event,
    threading.Thread,
    queue.Queue,
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
}
# Methods by which libraries copy what `copy.deepcopy` cannot.
_FORKS = ("fork", "deep_copy")


def has_history(thing: Any) -> bool:
    """Whether an object is asked with a history; by the table above."""
    cls = type(thing)
    if isinstance(thing, (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)):
        return False
    package = cls.__module__.partition(".")[0]
    if package == "transformers":
        return cls.__name__ in WITH_STATE
    return not getattr(cls, "is_function_of_ids", False)


def fork(thing: T) -> T:
    """
    A copy that can be called while the original stays as it is. Models, tokenizers and compiled grammars are shared.

    Raises:
        Exception: whatever its parts raise that cannot be copied.
    """
    return copy.deepcopy(thing, _known_parts(thing))


def check_forks(things: list[Any], argument: str) -> None:
    """
    Refuse objects that cannot be copied, before anything is run.

    Raises:
        ValueError: names the object's class.
    """
    for thing in things:
        try:
            fork(thing)
        except Exception as error:  # whatever a part of it says
            raise ValueError(
                f"`{argument}` must be objects that can be copied, one for each branch, but a {type(thing).__name__} "
                f"cannot ({type(error).__name__}: {error}). Give it a `__deepcopy__`, or make it a function of the ids."
            ) from error


class History:
    """
    A logits processor that has been called once a token.

    Args:
        processor: not yet called; stays as it is.
    """

    def __init__(self, processor: Any) -> None:
        self._pristine = processor
        self._processor: Any = fork(processor)
        self._calls: list[torch.Tensor] | None = []  # the ids of each; `None` where copies have shown to be possible

    def after(self, ids: torch.Tensor, scores: torch.Tensor) -> tuple[History, Any]:
        """
        The history that is longer by one call, and what that gave. This one stays as it is.

        Args:
            ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`), scores (`torch.FloatTensor` of shape
                `(batch_size, vocab_size)`): of the call.
        """
        longer = object.__new__(History)
        longer._pristine = self._pristine
        longer._processor = self._copied(scores)
        result = longer._processor(ids, scores)
        longer._calls = None if self._calls is None else [*self._calls, ids]
        if self._calls == []:  # it has been called for the first time
            with contextlib.suppress(Exception):
                fork(longer._processor)
                longer._calls = None
        return longer, result

    def _copied(self, like: torch.Tensor) -> Any:
        if self._calls is None or not self._calls:
            return fork(self._processor)
        # What came to it with its calls cannot be copied: a pristine copy goes through them again.
        processor = fork(self._pristine)
        for ids in self._calls:
            processor(ids, torch.zeros_like(like))
        return processor


class LiveCopy:
    """
    A copy of an object on which the caller may go on to change something, a flag that says stop, say.

    Args:
        original: the caller's; never called.
    """

    def __init__(self, original: Any) -> None:
        self._original = original
        self._seen = dict(getattr(original, "__dict__", {}))
        self._copy = fork(original)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        for name, value in getattr(self._original, "__dict__", {}).items():
            if name not in self._seen or self._seen[name] is not value:
                self._seen[name] = value
                setattr(self._copy, name, value)
        return self._copy(*arguments, **options)


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
        elif method is not None and part is not thing:
            known[id(part)] = getattr(part, method)()
        else:
            waiting.extend(_parts(part))
    return known


def _is_shared(part: Any) -> bool:
    package = type(part).__module__.partition(".")[0]
    return isinstance(part, _SHARED) or (package, type(part).__name__) in _SHARED_NAMES


def _parts(part: Any) -> Iterator[Any]:
    if isinstance(part, dict):
        yield from part.values()
    elif isinstance(part, (list, tuple, set, frozenset)):
        yield from part
    elif not isinstance(part, (type, torch.Tensor, types.FunctionType)):
        yield from getattr(part, "__dict__", {}).values()
        for cls in type(part).__mro__:
            slots = getattr(cls, "__slots__", ())
            yield from (
                getattr(part, name) for name in ([slots] if isinstance(slots, str) else slots) if hasattr(part, name)
            )
