"""The prefix that prompts share (instructions, few-shot examples) is read once: by the prompts of a batch, and within
[`prefix_caching`] by one call after another.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from .adapters import base_model, model_fingerprint
from .kv_cache import common_length
from .pass_policy import Policy
from .recurrent_state import num_bytes


@dataclass(frozen=True)
class SharedPrefix:
    """
    The first tokens of several prompts, read once.

    Args:
        ids (`list[int]`): the tokens.
        memory (`KeysValues` or a recurrent state): what the model remembers of them, as a batch of one.
        log_probs (`list[float]`): of those after the first (nats), as far as they are known; NaN stands for one that is
            not.
        can_be_cut (`bool`, *optional*, defaults to `True`): whether the memory of its first ids is a part of it.
    """

    ids: list[int]
    memory: Any
    log_probs: Sequence[float] = ()
    can_be_cut: bool = True

    def covers(self, other: SharedPrefix) -> bool:
        """Whether this prefix serves wherever the other one does."""
        begins = self.ids[: len(other.ids)] == other.ids if self.can_be_cut else self.ids == other.ids
        return begins and all(map(self.knows, other.known_positions()))

    def known_positions(self) -> list[int]:
        """The positions of the ids whose log-probabilities are known."""
        return [at for at, value in enumerate(self.log_probs, 1) if not math.isnan(value)]

    def knows(self, position: int) -> bool:
        """Whether the log-probability of the id at a position is known."""
        return position <= len(self.log_probs) and not math.isnan(self.log_probs[position - 1])

    def num_usable(self, prompts: Sequence[list[int]], counted: Collection[int]) -> int:
        """How many of the first ids of all prompts need not be read again where the log-probabilities at the positions
        `counted` are needed."""
        number = common_length([*prompts, self.ids])
        return min((at for at in counted if 0 < at < number and not self.knows(at)), default=number)


@dataclass(frozen=True, eq=False)
class _Entry:
    model: weakref.ref[Any]
    kind: Any  # the fingerprint of the model, and whether the prefix is a text that has ended
    prefix: SharedPrefix
    num_bytes: int


class KeptPrefixes:
    """
    Prefixes that members keep for later calls.

    Args:
        max_bytes (`int`, *optional*): the most memory of all keys, values and states together. What has not been used
            for the longest time goes first. `None`: the last prompt and the last text of each member.

    Attributes:
        num_bytes (`int`): kept now.
        num_used (`int`): how many tokens did not have to be read again so far.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = self.num_used = 0
        self._entries: list[_Entry] = []  # what was used last comes last

    @property
    def keeps_many(self) -> bool:
        """Whether more prefixes are kept than the last prompt and the last text of each member."""
        return self.max_bytes is not None

    def of(self, model: Any, is_text: bool | None = None) -> list[SharedPrefix]:
        """The kept prefixes of a model: of prompts, of finished texts, or both."""
        base = base_model(model)
        fingerprint = model_fingerprint(model)
        kinds = [(fingerprint, one) for one in (False, True) if is_text in (None, one)]
        return [entry.prefix for entry in self._entries if entry.model() is base and entry.kind in kinds]

    def add(self, model: Any, prefix: SharedPrefix, is_text: bool = False) -> None:
        """Keep a prefix that a model has read."""
        base = base_model(model)
        kind = model_fingerprint(model), is_text
        size = num_bytes(prefix.memory)
        if self.max_bytes is None:
            self._set([entry for entry in self._entries if entry.model() is not base or entry.kind != kind])
        elif size > self.max_bytes or any(one.covers(prefix) for one in self.of(model)):
            return
        else:
            covered = [one for one in self.of(model) if prefix.covers(one)]
            self._set([entry for entry in self._entries if all(entry.prefix is not other for other in covered)])
            while self.num_bytes + size > self.max_bytes:
                self._set(self._entries[1:])
        self._set([*self._entries, _Entry(weakref.ref(base, self._forget), kind, prefix, size)])

    def use(self, prefix: SharedPrefix, number: int) -> None:
        """Count `number` tokens of a prefix as not read again. The prefix used last is forgotten last."""
        self.num_used += number
        self._entries.sort(key=lambda entry: entry.prefix is prefix)

    def _forget(self, model: Any) -> None:
        self._set([entry for entry in self._entries if entry.model is not model])

    def _set(self, entries: list[_Entry]) -> None:
        self._entries = entries
        self.num_bytes = sum(entry.num_bytes for entry in entries)


_current: ContextVar[KeptPrefixes | None] = ContextVar("prefix_caching", default=None)


@contextmanager
def prefix_caching(kept: KeptPrefixes | None = None) -> Iterator[None]:
    """
    Within this context each member keeps the keys and values of the last prompts. Calls of `generate()` whose prompts
    begin alike do not compute that beginning again: in a conversation each call reads the new message only. The models
    must not be changed within the context. It costs the memory of two prompts per member.

    Args:
        kept (`KeptPrefixes`, *optional*): holds what is kept. A later context that is given the same object goes on
            with it.

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
    known = _current.get() if kept is None else kept
    token = _current.set(KeptPrefixes() if known is None else known)
    try:
        yield
    finally:
        _current.reset(token)


def kept_now() -> KeptPrefixes | None:
    """The prefixes kept in this context; `None` outside of [`prefix_caching`]."""
    return _current.get()


def kept_prefixes(model: Any) -> list[SharedPrefix]:
    """The prefixes of a model that are kept in this context; none outside of [`prefix_caching`]."""
    kept = kept_now()
    return [] if kept is None else kept.of(model)


def worth_sharing(prompts: Sequence[list[int]], num_known: int, policy: type[Policy]) -> int:
    """How many first ids of the prompts are worth reading once for all, by a device's constants; 0 for none. The first
    `num_known` of them have been read."""
    number = min(common_length(prompts), min(map(len, prompts)) - 1)
    num_known = min(num_known, number)
    if (number - num_known) * (len(prompts) - 1) >= policy.least_shared_tokens:
        return number
    return num_known if num_known * len(prompts) >= policy.least_shared_tokens else 0
