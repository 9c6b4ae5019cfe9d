"""Objects of the host that remember: logits processors and stopping criteria with a state.

The ordinary loop calls such an object once a token, with ids that grow by one. Here each branch of each prompt has a
copy of the object that has been called just so, as if that text were generated alone by ordinary `generate()`; the
caller's own object is left as it is. How an object is asked follows from what it is, by the first line that fits:

| what it is | how it is asked |
|---|---|
| a class of transformers' own, but for the lists below | a function of the ids: many texts at once, in any order |
| of `PER_ROW`; a function, method or partial | a function of the ids, with as many rows as the batch, all of one text |
| a class with `is_function_of_ids = True` | a function of the ids |
| any other object; of `WITH_STATE` | with a history: a copy for each branch, once a token, with the batch it is for |
"""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any

import torch

from .forks import fork

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


def has_history(thing: Any) -> bool:
    """Whether an object is asked with a history; by the table above."""
    if isinstance(thing, list):  # `StoppingCriteriaList` in another
        return any(map(has_history, thing))
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


class ForkError(Exception):
    """An object that could be copied no longer can."""


class History:
    """
    A logits processor that has been called once a token.

    Args:
        processor: not yet called; stays as it is.
    """

    def __init__(self, processor: Any) -> None:
        self._pristine = processor
        self._processor: Any = fork(processor)
        self._ids: torch.Tensor | None = None  # of the last call
        self._num_prompt_tokens = 0  # of the ids of the first
        # The ids and scores of each call; `None` where it can be copied after them.
        self._calls: list[tuple[torch.Tensor, torch.Tensor]] | None = []

    def after(self, ids: torch.Tensor, scores: torch.Tensor) -> tuple[History, Any]:
        """
        The history that is longer by one call, and what that gave. This one stays as it is.

        Args:
            ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`), scores (`torch.FloatTensor` of shape
                `(batch_size, vocab_size)`): of the call; they stay as they are.

        Raises:
            ForkError: it can no longer be copied.
        """
        longer = object.__new__(History)
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
        return fork(self._processor, None if self._ids is None else self._ids[:, self._num_prompt_tokens :])

    def _copied(self) -> Any:
        if not self._calls:
            try:
                return self._fork()
            except Exception as error:  # whatever a part of it says
                raise ForkError(f"cannot be copied any more ({type(error).__name__}: {error})") from error
        # What came to it with its first call cannot be copied: a pristine copy goes through all of them again.
        processor = fork(self._pristine)
        for ids, scores in self._calls:
            processor(ids, scores.clone())
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


def is_of_transformers(cls: type) -> bool:
    """Whether a class is transformers' own."""
    return cls.__module__.partition(".")[0] == "transformers"
