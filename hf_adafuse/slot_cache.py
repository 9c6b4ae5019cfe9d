"""The cache of a batch of token trees: columns written in place, moved, forked. Knows no tree."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from .kv_cache import KeysValues, make_cache


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
            self.keys, self.values = _spare(key_states, width), _spare(value_states, width)
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
    The cache of a batch of token trees. Each row of the batch grows at its own end, in place: no pass copies what is
    there. The columns after a row's end hold nothing; the mask hides them.

    Attributes:
        ends (`list[int]`): per row of the batch, the columns in use.
        length (`int`), width (`int`): the columns in use before and after the pass that `open` prepared.
    """

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.ends = [0] * batch_size
        self.length = self.width = 0

    def open(self, num_new: list[int]) -> None:
        """
        Prepare a pass of so many tokens a row. What depends on the rows' ends happens here, so that `update` is the
        same few operations in every pass (and is compiled once, where the model is). Short rows are filled up; their
        filler goes into columns after their own, all that would go beyond `width` into its last one.
        """
        num_queries, self.length = max(num_new), max(self.ends)
        self.width = max(end + n + (n < num_queries) for end, n in zip(self.ends, num_new, strict=True))
        self._is_even = all(end == self.length for end in self.ends)
        self._columns: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer in self.layers:
            layer.reserve(self.width)
            if not self._is_even and layer.device not in self._columns:
                rows = torch.arange(len(self.ends), device=layer.device)[:, None]
                columns = torch.tensor(self.ends, device=layer.device)[:, None] + torch.arange(
                    num_queries, device=layer.device
                )
                self._columns[layer.device] = rows, columns.clamp(max=self.width - 1)

    def close(self, num_new: list[int]) -> None:
        """The pass is over: its tokens are in use."""
        self.ends = [end + n for end, n in zip(self.ends, num_new, strict=True)]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        while len(self.layers) <= layer_idx:
            self.layers.append(SlotLayer(self))
        return self.layers[layer_idx].update(key_states, value_states)  # type: ignore[no-any-return]

    def write(self, tensor: torch.Tensor, new: torch.Tensor) -> None:
        """Write `new`, of shape `(batch_size, num_heads, num_new, head_dim)`, at the end of each row."""
        if self._is_even:
            tensor[:, :, self.length : self.length + new.shape[2]] = new
        else:
            rows, columns = self._columns[tensor.device]
            tensor[rows, :, columns] = new.transpose(1, 2)

    def fill(self, layers: KeysValues) -> None:
        """Begin with these keys and values, as wide in every row."""
        if layers:
            num_new = [layers[0][0].shape[2]] * len(self.ends)
            self.open(num_new)
            for index, (keys, values) in enumerate(layers):
                self.update(keys, values, index)
            self.close(num_new)

    def move(self, moves: list[tuple[int, int, int]]) -> None:
        """Copy columns: `(row of the batch, from, to)`, all read before any is written."""
        for layer in self.layers:
            if layer.is_initialized and moves:
                rows, old, new = torch.tensor(moves, device=layer.keys.device).unbind(1)
                layer.keys[rows, :, new] = layer.keys[rows, :, old]
                layer.values[rows, :, new] = layer.values[rows, :, old]

    def select_rows(self, rows: list[int]) -> None:
        """Keep only these rows of the batch, in this order."""
        self.ends = [self.ends[row] for row in rows]
        width = max(self.ends, default=0)
        for layer in self.layers:
            if layer.is_initialized:
                index = torch.tensor(rows, dtype=torch.long, device=layer.keys.device)
                layer.keys = layer.keys[:, :, :width].index_select(0, index)
                layer.values = layer.values[:, :, :width].index_select(0, index)

    def row(self, row: int, start: int, stop: int) -> KeysValues:
        """A copy of these columns of one row, as keys and values of batch size 1."""
        return [
            (layer.keys[row : row + 1, :, start:stop].clone(), layer.values[row : row + 1, :, start:stop].clone())
            for layer in self.layers
        ]

    def fork(self, rows: list[int], slots: list[list[int]]) -> DynamicCache:
        """An ordinary cache of its own whose row i holds the columns `slots[i]`, as many in each, of row `rows[i]`."""
        forked = []
        for layer in self.layers:
            columns = torch.tensor(slots, device=layer.keys.device)
            entries = torch.tensor(rows, device=layer.keys.device)[:, None].expand_as(columns)
            forked.append((_pick(layer.keys, entries, columns), _pick(layer.values, entries, columns)))
        return make_cache(forked)

    def append(self, other: DynamicCache, sources: torch.Tensor, num_new: list[int]) -> None:
        """
        Append columns of another cache.

        Args:
            num_new (`list[int]`): how many in each row; the others are filler.
            sources (`torch.LongTensor` of shape `(batch_size, num_new, 2)`): the row and column of `other` that each
                new column comes from.
        """
        self.open(num_new)
        for index, layer in enumerate(other.layers):
            rows, columns = sources.to(layer.keys.device).unbind(-1)
            self.update(_pick(layer.keys, rows, columns), _pick(layer.values, rows, columns), index)
        self.close(num_new)


def _pick(tensor: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    # Indexing by two tensors apart puts their dimensions first: (batch_size, num_columns, num_heads, head_dim).
    return tensor[rows, :, columns].transpose(1, 2)


def _spare(like: torch.Tensor, width: int) -> torch.Tensor:
    """A tensor for `width` columns and some to come, so that it grows seldom and holds little more than it must."""
    batch_size, num_heads, _, head_dim = like.shape
    return like.new_zeros((batch_size, num_heads, width + max(4, width // 32), head_dim))


def _grown(tensor: torch.Tensor, width: int) -> torch.Tensor:
    larger = _spare(tensor, width)
    larger[:, :, : tensor.shape[2]] = tensor
    return larger
