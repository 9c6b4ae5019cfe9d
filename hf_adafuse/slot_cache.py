"""The cache of a batch of token trees, in lanes: columns taken, written in place, given back. Knows no tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from .kv_cache import KeysValues


class SlotLayer(DynamicLayer):
    """One layer of a [`SlotCache`]: tensors with spare columns, written in place."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self.cache = cache
        self.is_initialized: bool = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = self.cache.width
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.keys, self.values = _spare(key_states, width).zero_(), _spare(value_states, width).zero_()
        self.cache.write(self.keys, key_states)
        self.cache.write(self.values, value_states)
        return self.keys[:, :, :width], self.values[:, :, :width]

    def reserve(self, width: int) -> None:
        """Make room for so many columns."""
        if self.is_initialized and self.keys.shape[2] < width:
            self.keys, self.values = _grown(self.keys, width), _grown(self.values, width)

    def get_seq_length(self) -> int:
        return self.cache.length


class SlotCache(DynamicCache):
    """
    The cache of a batch of token trees. Each lane, a row of its tensors, holds one tree or several; a pass writes into
    free columns, in place, and copies nothing of what is there. A column is seen only where the mask says so.

    Attributes:
        num_lanes (`int`)
        length (`int`), width (`int`): the columns of a lane before and after the pass that `open` prepared.
        is_written (`bool`): whether the pass has written into it.
    """

    def __init__(self, num_lanes: int) -> None:
        super().__init__()
        self.length = 0
        self._lay_out([0] * num_lanes)

    def _lay_out(self, ends: list[int]) -> None:
        self.num_lanes, self._ends, self.width = len(ends), ends, max(ends, default=0)
        self._free = [list[int]() for _ in ends]  # per lane, the columns before its end that hold nothing, ascending

    @property
    def num_used(self) -> int:
        """The columns that hold something, over all lanes."""
        return sum(self._ends) - sum(map(len, self._free))

    def take(self, lane: int, number: int) -> list[int]:
        """So many free columns of a lane, the first ones."""
        free, end = self._free[lane], self._ends[lane]
        columns, self._free[lane] = free[:number], free[number:]
        self._ends[lane] = end + number - len(columns)
        return [*columns, *range(end, self._ends[lane])]

    def release(self, lane: int, columns: Iterable[int]) -> None:
        """These columns are free again."""
        free = sorted([*self._free[lane], *columns])
        while free and free[-1] == self._ends[lane] - 1:
            self._ends[lane] = free.pop()
        self._free[lane] = free

    def open(self, columns: list[list[int]]) -> None:
        """
        Prepare a pass that writes into these columns, as many in each lane; the first one into the first columns. What
        depends on them happens here, so that `update` is the same few operations in every pass after the first (and is
        compiled once, where the model is).
        """
        self.length, self.width, self.is_written = self.width, max(self._ends), False
        self._places: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer in self.layers:
            layer.reserve(self.width)
            if layer.device not in self._places:
                lanes = torch.arange(self.num_lanes, device=layer.device)[:, None]
                self._places[layer.device] = lanes, torch.tensor(columns, device=layer.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        while len(self.layers) <= layer_idx:
            self.layers.append(SlotLayer(self))
        self.is_written = True
        return self.layers[layer_idx].update(key_states, value_states)  # type: ignore[no-any-return]

    def write(self, tensor: torch.Tensor, new: torch.Tensor) -> None:
        """Write `new`, of shape `(num_lanes, num_heads, num_new, head_dim)`, into the pass's columns."""
        if not self._places:
            tensor[:, :, : new.shape[2]] = new
            return
        lanes, columns = self._places[tensor.device]
        if self.num_lanes == 1:
            tensor.index_copy_(2, columns[0], new)  # quicker
        else:
            tensor[lanes, :, columns] = new.transpose(1, 2)

    def fill(self, layers: KeysValues) -> None:
        """Begin with these keys and values, as wide in every lane."""
        if layers:
            self.open([self.take(lane, layers[0][0].shape[2]) for lane in range(self.num_lanes)])
            for index, (keys, values) in enumerate(layers):
                self.update(keys, values, index)

    def arrange(self, sources: list[list[tuple[int, int]]]) -> None:
        """New lanes, each with the columns that were at these places, `(lane, column)`; all else is gone."""
        width = max(map(len, sources), default=0)
        padded = [[*places, *[(0, 0)] * (width - len(places))] for places in sources]
        for layer, (keys, values) in zip(self.layers, self.gather(padded), strict=True):
            layer.keys, layer.values = _grown(keys, width), _grown(values, width)
        self._lay_out(list(map(len, sources)))

    def gather(self, sources: list[list[tuple[int, int]]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer, copies of the keys and values at these places, `(lane, column)`, as many in each row."""
        index = torch.tensor(sources, dtype=torch.long).view(len(sources), len(sources[0]), 2)
        for layer in self.layers:
            yield _pick(layer.keys, index), _pick(layer.values, index)

    def append(self, other: DynamicCache, sources: list[tuple[int, int]], columns: list[int]) -> None:
        """Write what another cache holds at these places, `(row, column)`, into these columns of the only lane."""
        self.open([columns])
        index = torch.tensor([sources])
        for layer_idx, layer in enumerate(other.layers):
            self.update(_pick(layer.keys, index), _pick(layer.values, index), layer_idx)


def _pick(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    rows, columns = places.to(tensor.device).unbind(-1)
    if len(tensor) == 1:  # the quick way
        picked = tensor[0].index_select(1, columns.flatten())  # (num_heads, batch_size * num_columns, head_dim)
        return picked.view(len(picked), *columns.shape, picked.shape[-1]).transpose(0, 1)
    # Indexing by two tensors apart puts their dimensions first: (batch_size, num_columns, num_heads, head_dim).
    return tensor[rows, :, columns].transpose(1, 2)


def _spare(like: torch.Tensor, width: int) -> torch.Tensor:
    """A tensor for `width` columns and some to come, so that it grows seldom and holds little more than it must."""
    batch_size, num_heads, _, head_dim = like.shape
    return like.new_empty((batch_size, num_heads, width + max(4, width // 20), head_dim))


def _grown(tensor: torch.Tensor, width: int) -> torch.Tensor:
    larger, num_columns = _spare(tensor, width), tensor.shape[2]
    larger[:, :, :num_columns] = tensor
    larger[:, :, num_columns:] = 0  # no NaN: it would survive that a mask hides it
    return larger
