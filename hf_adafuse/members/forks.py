"""Copies of objects of other libraries: what a copy shares with its original, and what copies itself."""

from __future__ import annotations

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


def fork(thing: T, walked: torch.Tensor | None = None) -> T:
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
