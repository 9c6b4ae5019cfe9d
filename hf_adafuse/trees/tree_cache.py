"""The tensors of the KV cache of a batch of token trees, written in place. `kv_slots` knows which column holds what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..transformers_compat import DynamicCache, DynamicLayer
from .backend import to_device
from .kv_slots import KVSlot

# Columns that a tree has to spare: where it is alone, few, so that the cache is hardly larger than it must be; where
# there are several, more each, up to half of what they hold: growing copies all of it.
# hf-adafuse bench --parameters 80M --prompt-tokens 20 --batch 1,8,16, time and the KV column
_SPARE_OF_ONE = 4
_SPARE_OF_EACH = 8


class TreeCacheLayer(DynamicLayer):
    """One layer of a [`TreeCache`]: tensors with spare columns, written in place. Its cache is named to it with each
    call: a reference to it would keep both in memory after their use."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.is_initialized: bool = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, cache: TreeCache, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = cache.width
        if not self.is_initialized:
            self.dtype = key_states.dtype
            self.device = key_states.device
            self.is_initialized = True
            num_columns = max(width, cache.num_expected)
            num_columns += cache.num_spare(num_columns)
            self.keys = _empty(key_states, num_columns).zero_()
            self.values = _empty(value_states, num_columns).zero_()
        cache.write(self.keys, key_states)
        cache.write(self.values, value_states)
        return self.keys[:, :, :width], self.values[:, :, :width]

    def open(self, cache: TreeCache) -> None:
        """Prepare a pass: make room for as many columns as the cache has."""
        self.length = cache.length
        if self.is_initialized and self.keys.shape[2] < cache.width:
            width = cache.width + cache.num_spare(cache.width)
            self.keys = _grown(self.keys, width)
            self.values = _grown(self.values, width)

    def get_seq_length(self) -> int:
        return self.length


class TreeCache(DynamicCache):
    """
    The keys and values of a batch of token trees. A pass writes into free columns, in place, and copies nothing of what
    is there. A column is seen only where the mask says so.

    Attributes:
        num_rows (`int`): each row of its tensors holds one tree or several.
        num_sharing (`int`): how many trees share a row at most; `KVCacheBackend` sets it.
        length (`int`), width (`int`): the columns of a row before and after the pass that `open` prepared.
        num_expected (`int`): the columns for which the first pass makes room, where it needs fewer itself.
        is_written (`bool`): whether the pass has written into it.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.num_sharing = 1
        self.length = 0
        self.width = 0
        self.num_expected = 0

    def open(self, columns: list[list[int]], width: int) -> None:
        """
        Prepare a pass that writes into these columns, as many in each row; the first one into the first columns. What
        depends on them happens here, so that `update` is the same few operations in every pass after the first (and is
        compiled once, where the model is).
        """
        self.length = self.width
        self.width = width
        self.is_written = False
        self._targets: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer in self.layers:
            layer.open(self)
            if layer.device not in self._targets:
                rows = torch.arange(self.num_rows, device=layer.device)[:, None]
                self._targets[layer.device] = rows, to_device(columns, layer.device)

    def tensors(self) -> list[torch.Tensor]:
        """The keys and values of each layer that has been written, in turn."""
        return [tensor for layer in self._written() for tensor in (layer.keys, layer.values)]

    def move(self, tensors: list[torch.Tensor]) -> None:
        """Move what the cache holds into these tensors, which differ in width alone."""
        for layer, keys, values in zip(self._written(), tensors[::2], tensors[1::2], strict=True):
            layer.keys = _copied(layer.keys, keys)
            layer.values = _copied(layer.values, values)

    def _written(self) -> list[Any]:
        return [layer for layer in self.layers if layer.is_initialized]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        while len(self.layers) <= layer_idx:
            self.layers.append(TreeCacheLayer(self.length))
        self.is_written = True
        return self.layers[layer_idx].update(key_states, value_states, self)  # type: ignore[no-any-return]

    def num_spare(self, width: int) -> int:
        """The number of spare columns for a row of this many columns."""
        is_alone = self.num_rows == self.num_sharing == 1
        wanted = _SPARE_OF_ONE if is_alone else min(_SPARE_OF_EACH * self.num_sharing, width // 2)
        return max(_SPARE_OF_ONE, wanted, width // 20)

    def write(self, tensor: torch.Tensor, new: torch.Tensor) -> None:
        """Write `new`, of shape `(num_rows, num_heads, num_new, head_dim)`, into the pass's columns."""
        if not self._targets:
            tensor[:, :, : new.shape[2]] = new
            return
        rows, columns = self._targets[tensor.device]
        if self.num_rows == 1:
            tensor.index_copy_(2, columns[0], new)  # quicker
        else:
            tensor[rows, :, columns] = new.transpose(1, 2)

    def fill(self, layers: Iterable[tuple[torch.Tensor, torch.Tensor]], num_expected: int = 0) -> None:
        """
        Begin with these keys and values, as wide in every row. An iterator that makes the layers one by one spares the
        memory of a second copy of all of them.

        Args:
            layers (`Iterable`): per layer, keys and values.
            num_expected (`int`, *optional*): the columns for which there shall be room at once.
        """
        self.num_expected = num_expected
        for index, (keys, values) in enumerate(layers):
            if index == 0:
                self.open([list(range(keys.shape[2]))] * self.num_rows, keys.shape[2])
            self.update(keys, values, index)

    def rearrange(self, sources: list[list[KVSlot]]) -> None:
        """Make new rows of the columns at these places. All other columns are dropped."""
        self.num_rows = len(sources)
        self.width = max(map(len, sources), default=0)
        padded = [[*places, *[(0, 0)] * (self.width - len(places))] for places in sources]
        for layer, (keys, values) in zip(self.layers, self.gather(padded), strict=True):
            width = self.width + self.num_spare(self.width)
            layer.keys = _grown(keys, width)
            layer.values = _grown(values, width)

    def gather(self, sources: list[list[KVSlot]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer, copies of the keys and values at these places, as many in each row."""
        index = torch.tensor(sources, dtype=torch.long, device="cpu").view(len(sources), len(sources[0]), 2)
        for layer in self.layers:
            yield _pick(layer.keys, index), _pick(layer.values, index)

    def append_rows(self, other: TreeCache) -> None:
        """Append the rows of another cache."""
        self.num_rows = self.num_rows + other.num_rows
        self.width = max(self.width, other.width)
        for layer, new in zip(self.layers, other.layers, strict=True):
            layer.keys = _stacked(layer.keys, new.keys)
            layer.values = _stacked(layer.values, new.values)

    def append(self, other: DynamicCache, sources: list[KVSlot], columns: list[int], width: int) -> None:
        """Copy what another cache holds at these places into these columns of the only row."""
        self.open([columns], width)
        index = torch.tensor([sources], device="cpu")
        for layer_idx, layer in enumerate(other.layers):
            self.update(_pick(layer.keys, index), _pick(layer.values, index), layer_idx)


def _pick(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    rows, columns = to_device(places, tensor.device).unbind(-1)
    if len(tensor) == 1:  # the quick way
        picked = tensor[0].index_select(1, columns.flatten())  # (num_heads, batch_size * num_columns, head_dim)
        return picked.view(len(picked), *columns.shape, picked.shape[-1]).transpose(0, 1)
    # Indexing by two tensors apart puts their dimensions first: (batch_size, num_columns, num_heads, head_dim).
    return tensor[rows, :, columns].transpose(1, 2)


def _stacked(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The rows of both, as wide as the wider."""
    width = max(first.shape[2], second.shape[2])
    return torch.cat([torch.nn.functional.pad(one, (0, 0, 0, width - one.shape[2])) for one in (first, second)])


def _empty(like: torch.Tensor, num_columns: int) -> torch.Tensor:
    batch_size, num_heads, _, head_dim = like.shape
    return like.new_empty((batch_size, num_heads, num_columns, head_dim))


def _grown(tensor: torch.Tensor, num_columns: int) -> torch.Tensor:
    return _copied(tensor, _empty(tensor, num_columns))


def _copied(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`target`, holding what `tensor` holds, as far as that fits."""
    known = min(tensor.shape[2], target.shape[2])
    target[:, :, :known] = tensor[:, :, :known]
    target[:, :, known:] = 0  # no NaN: it would survive that a mask hides it
    return target
