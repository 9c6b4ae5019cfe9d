"""Results that follow from a model or a tokenizer alone, cached where the caller promises that it stays as it is.

`hf-adafuse serve` promises it for its own members. Elsewhere a user may move a model, hook it or change its config
between two calls of `generate()`, so each call looks again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


class ModelFacts:
    """The cached results of functions of a model, by model. Threads may share it."""

    def __init__(self) -> None:
        self._found: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()

    def find(self, function: Callable[..., T], model: Any, *args: Any) -> T:
        """What the function returns for the model and these arguments; called once, unless it raises."""
        found = self._found.setdefault(model, {})
        key = function, args
        if key not in found:
            found[key] = function(model, *args)
        made: T = found[key]
        return made


_facts: ContextVar[ModelFacts | None] = ContextVar("unchanged_models", default=None)


@contextmanager
def unchanged_models(facts: ModelFacts) -> Iterator[None]:
    """
    Within this context the caller promises not to change the models and their tokenizers: functions under
    [`cached_while_unchanged`] run once for each.

    Args:
        facts (`ModelFacts`): holds the cached results. A later context that is given the same object goes on with it,
            in another thread too.
    """
    token = _facts.set(facts)
    try:
        yield
    finally:
        _facts.reset(token)


def cached_while_unchanged(function: Callable[..., T]) -> Callable[..., T]:
    """A function of a model, or a tokenizer, and hashable arguments, whose result follows from the model as it is now:
    within [`unchanged_models`] it runs once for each model."""

    @functools.wraps(function)
    def cached(model: Any, *args: Any) -> T:
        facts = _facts.get()
        return function(model, *args) if facts is None else facts.find(function, model, *args)

    return cached
