"""Takes keys and values out of a caller's cache, and hands them out in one.

A cache here holds every key of every layer, as tensors of shape `(batch_size, num_heads, num_columns, head_dim)`. A
sliding window drops none: the mask does the window.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..transformers_compat import CACHE_NAME, DynamicCache, holds_all_keys, layers_with_keys
from .adapters import base_model, model_fingerprint

KeysValues = list[tuple[torch.Tensor, torch.Tensor]]
# A member's ids of one prompt, and the keys and values of these ids where its backend keeps them.
CachedIds = tuple[list[int], KeysValues | None]


@dataclass(frozen=True)
class CachedText:
    """
    What a cache holds of one row of its batch.

    Attributes:
        ids (`list[int]`): the ids of the text, without padding.
        start (`int`): the column of the first of them.
        num_read (`int`): how many of the first ids the cache holds the keys and values of.
        length (`int`): how many tokens the text had when these were computed: LongRoPE's follow from it.
        is_whole (`bool`): whether the assistants' ids say all of the text.
    """

    ids: list[int]
    start: int
    num_read: int
    length: int
    is_whole: bool


class AdaFuseCache(DynamicCache):
    """
    The main model's cache after a call, left-padded like `sequences[:, :-1]`, which ordinary `generate()` can continue
    too. It also carries each assistant's own ids and keys, so that a later AdaFuse call goes on as one longer call.
    Where a model keeps no keys (a recurrent one), it holds the ids alone, and only AdaFuse can continue from it.

    It knows the ids that it holds. A later AdaFuse call may pass a text that differs from the cached one, or other
    padding: the common beginning is kept, and the rest is read again. An example is a chat whose template leaves out
    the thinking of earlier turns. A call may also pass the new ids alone, with the attention mask of the whole text.

    Attributes:
        sequences (`torch.LongTensor` of shape `(batch_size, sequence_length)`): the ids it belongs to; `None` where
            they are not known any more: its rows have been reordered, selected or repeated.
        texts (`list[CachedText]`): the same by row; empty where they are not known any more.
        assistants (`list`): per assistant, a weak reference to it, what else its keys follow from, and per prompt its
            ids and its keys and values. Copies of the cache are without them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sequences: torch.Tensor | None = None
        self.texts: list[CachedText] = []
        self._owner: tuple[Callable[[], Any], Any] | None = None
        self.assistants: list[Any] = []

    def set_owner(self, model: Any) -> None:
        """Note which model has computed the cache: by one of its weights, which views of the model share, and by its
        fingerprint."""
        weight = _first_weight(model)
        self._owner = (_nothing if weight is None else weakref.ref(weight)), model_fingerprint(model)

    def may_be_of(self, model: Any) -> bool:
        """Whether this model may have computed the cache. A copy does not know its model, and answers yes. Where the
        model is gone, only its fingerprint is compared."""
        if self._owner is None:
            return True
        reference, fingerprint = self._owner
        weight = reference()
        return fingerprint == model_fingerprint(model) and (weight is None or weight is _first_weight(model))

    def rows(self) -> list[CachedIds]:
        """Per row, the ids that have been read, with their keys and values."""
        layers = adopt_cache(self, self.get_seq_length()) if self.layers else []
        found: list[CachedIds] = []
        for row, text in enumerate(self.texts):
            columns = slice(text.start, text.start + text.num_read)
            own = [(keys[row : row + 1, :, columns], values[row : row + 1, :, columns]) for keys, values in layers]
            found.append((text.ids[: text.num_read], own))
        return found

    def states_of(self, index: int, model: Any, kind: Any) -> list[CachedIds] | None:
        """The ids and keys and values per prompt of assistant `index`, where it is this model of this kind; of the
        first that is, where the assistants have changed places."""
        own = self.assistants[index : index + 1]
        for reference, known, states in [*own, *self.assistants]:
            if reference() == model and known == kind:
                return states  # type: ignore[no-any-return]
        return None

    def crop(self, *args: Any, **kwargs: Any) -> None:
        usable = [not _has_stand_ins(layers) for _, layers in self.rows()] if self.texts else []
        super().crop(*args, **kwargs)
        length = self.get_seq_length()
        if self.sequences is not None:
            self.sequences = self.sequences[:, :length]
        lefts = [max(0, length - text.start) for text in self.texts]
        self.texts = [
            replace(
                text,
                ids=text.ids[:left],
                num_read=min(text.num_read, left) if is_usable or left >= text.num_read else 0,
                is_whole=False,
            )
            for text, left, is_usable in zip(self.texts, lefts, usable, strict=True)
        ]

    def reset(self) -> None:
        self._forget()
        super().reset()

    def reorder_cache(self, *args: Any, **kwargs: Any) -> None:
        self._forget()
        super().reorder_cache(*args, **kwargs)

    def batch_repeat_interleave(self, *args: Any, **kwargs: Any) -> None:
        self._forget()
        super().batch_repeat_interleave(*args, **kwargs)

    def batch_select_indices(self, *args: Any, **kwargs: Any) -> None:
        self._forget()
        super().batch_select_indices(*args, **kwargs)

    def _forget(self) -> None:
        """Its rows are others from here on: it is what any other cache is."""
        self.sequences = None
        self.texts = []
        self.assistants = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owner": None, "assistants": []}


def kept_beginnings(states: Sequence[CachedIds], prompts: Sequence[list[int]]) -> KeysValues | None:
    """
    The keys and values of what each prompt and the text that has been read in its row begin with alike, but for the
    prompt's last token, which is always read.

    Args:
        states (`list[CachedIds]`): per row, ids that have been read, and their keys and values.
        prompts (`list[list[int]]`): per row, ids without padding.

    Returns:
        those of the first columns of the left-padded prompts, as many as are known in every row; `None` for none.
    """
    width = max(map(len, prompts))
    pads = [width - len(ids) for ids in prompts]
    known = [
        min(common_length([read[: _num_columns(layers)], ids]), len(ids) - 1)
        for (read, layers), ids in zip(states, prompts, strict=True)
    ]
    length = min(pad + number for pad, number in zip(pads, known, strict=True))
    if length <= 0:
        return None
    for (_, layers), pad in zip(states, pads, strict=True):
        if length - pad < _num_columns(layers) and _has_stand_ins(layers):
            return None
    rows = [
        [(keys[:, :, : max(0, length - pad)], values[:, :, : max(0, length - pad)]) for keys, values in layers or []]
        for (_, layers), pad in zip(states, pads, strict=True)
    ]
    return list(join_rows(rows, [min(pad, length) for pad in pads], length))


def _has_stand_ins(layers: KeysValues | None) -> bool:
    """Whether zeros stand for keys that a caller's sliding layer had dropped, see [`adopt_cache`]. A text that leaves
    the cached one early would see them."""
    return any(keys.shape[2] > 0 and not keys[:, :, 0].any() for keys, _ in layers or [])


def common_length(rows: Sequence[list[int]]) -> int:
    """The number of first ids that all rows share."""
    # In lexicographic order the common prefix of all rows is that of the two extremes.
    first = min(rows)
    last = max(rows)
    length = 0
    while length < min(len(first), len(last)) and first[length] == last[length]:
        length += 1
    return length


def _first_weight(model: Any) -> Any:
    return next(base_model(model).parameters(), None)


def _nothing() -> None:
    return None


def _num_columns(layers: KeysValues | None) -> int:
    return layers[0][0].shape[2] if layers else 0


def make_cache(layers: Iterable[tuple[torch.Tensor, torch.Tensor]], cache: DynamicCache | None = None) -> DynamicCache:
    """A cache with these keys and values."""
    cache = DynamicCache() if cache is None else cache
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache


def adopt_cache(cache: Any, length: int) -> KeysValues:
    """
    The keys and values of a caller's cache of `length` tokens; its own tensors, to be read only. A sliding layer has
    dropped its oldest keys: zeros stand in for them, which the window hides from all that follows. Layers at the end
    that keep no keys, because they take those of others, are left out.

    Raises:
        ValueError: the cache is of a kind whose keys cannot be gathered (static, quantized, recurrent).
    """
    layers: KeysValues = []
    for layer in layers_with_keys(cache):
        if not holds_all_keys(layer, length):
            raise ValueError(
                f"`{CACHE_NAME}` must be a DynamicCache with the keys of {length} tokens in all layers, but has a "
                f"{type(layer).__name__} that does not hold them. "
                "Leave it out, or pass the cache that an earlier call returned."
            )
        missing = length - layer.keys.shape[-2]
        padding = (0, 0, missing, 0)
        layers.append(
            (torch.nn.functional.pad(layer.keys, padding), torch.nn.functional.pad(layer.values, padding))
            if missing
            else (layer.keys, layer.values)
        )
    return layers


def join_rows(rows: list[KeysValues], starts: list[int], length: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The keys and values of several rows as one batch, layer by layer: row i begins at column `starts[i]` of `length`,
    with zeros elsewhere."""

    def place(tensors: list[torch.Tensor]) -> torch.Tensor:
        padded = [
            torch.nn.functional.pad(tensor, (0, 0, start, length - start - tensor.shape[2]))
            for tensor, start in zip(tensors, starts, strict=True)
        ]
        return torch.cat(padded)

    for index in range(len(rows[0])):
        yield place([row[index][0] for row in rows]), place([row[index][1] for row in rows])
