"""The prefix that prompts share (instructions, few-shot examples), read once: by the prompts of a batch, and within
[`prefix_caching`] by calls one after the other. Calls no model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from .adapters import base_model, model_state
from .kv_cache import common_length
from .pass_policy import Policy


@dataclass(frozen=True)
class SharedPrefix:
    """
    Tokens that have been read.

    Args:
        ids (`list[int]`)
        memory (`KeysValues` or a snapshot): what the model remembers of them, as a batch of one.
        log_probs (`list[float]`, *optional*): of those after the first (nats), as far as they are known; `None` where
            nobody asked.
    """

    ids: list[int]
    memory: Any
    log_probs: list[float] | None = None


# By model and its state.
_Kept = weakref.WeakKeyDictionary[Any, dict[Any, SharedPrefix]]
_kept: ContextVar[_Kept | None] = ContextVar("prefix_caching", default=None)


@contextmanager
def prefix_caching(kept: weakref.WeakKeyDictionary[Any, Any] | None = None) -> Iterator[None]:
    """
    Within this context each member keeps what it has read of the last prompts, and calls of `generate()` whose prompts
    begin alike do not read that again: of a conversation each call reads the new message. The models must not be
    changed within it. It costs the keys and values of two prompts per member.

    Args:
        kept (`WeakKeyDictionary`, *optional*): where it is kept, at first empty: another such context goes on with it.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from hf_adafuse import enable_adafuse, prefix_caching

    >>> name = "mistralai/Mistral-7B-Instruct-v0.3"
    >>> model = enable_adafuse(AutoModelForCausalLM.from_pretrained(name))
    >>> tokenizer = AutoTokenizer.from_pretrained(name)
    >>> with prefix_caching():
    ...     for question in ("Who wrote Faust?", "Who wrote Emma?"):
    ...         inputs = tokenizer("Answer in one word. " + question, return_tensors="pt")
    ...         output = model.generate(**inputs, adafuse_config=True, max_new_tokens=4)

    ```
    """
    known = _kept.get() if kept is None else kept
    token = _kept.set(weakref.WeakKeyDictionary() if known is None else known)
    try:
        yield
    finally:
        _kept.reset(token)


def is_caching() -> bool:
    """Whether this is within [`prefix_caching`]."""
    return _kept.get() is not None


def kept_prefix(model: Any, is_text: bool = False) -> SharedPrefix | None:
    """What the model has kept, if anything: of prompts, or all of a text that has ended."""
    kept = _kept.get()
    return None if kept is None else kept.get(base_model(model), {}).get((is_text, model_state(model)))


def keep_prefix(model: Any, prefix: SharedPrefix, is_text: bool = False) -> None:
    """Keep what the model has read, instead of what it has kept so far."""
    kept = _kept.get()
    if kept is not None:
        kept.setdefault(base_model(model), {})[is_text, model_state(model)] = prefix


def kept_prefixes(model: Any) -> list[SharedPrefix]:
    """All that the model has kept."""
    return [one for one in (kept_prefix(model), kept_prefix(model, is_text=True)) if one is not None]


def worth_sharing(prompts: Sequence[list[int]], num_known: int) -> int:
    """How many first ids of the prompts are worth reading once for all; 0 for none. Of them `num_known` are known."""
    number = min(common_length(prompts), min(map(len, prompts)) - 1)
    num_known = min(num_known, number)
    if (number - num_known) * (len(prompts) - 1) >= Policy.least_shared_tokens:
        return number
    return num_known if num_known * len(prompts) >= Policy.least_shared_tokens else 0
