"""Keys and values: copy, gather, compact. The only module that touches transformers' cache layers; knows no tree.

A cache here holds every key of every layer (no sliding window drops any: the mask does the window), as tensors of shape
`(batch_size, num_heads, num_slots, head_dim)`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

KeysValues = list[tuple[torch.Tensor, torch.Tensor]]


class AdaFuseCache(DynamicCache):
    """
    The main model's cache after a call, left-padded like `sequences[:, :-1]`, which ordinary `generate()` can continue
    too. It also carries each assistant's own ids and keys, so that a later AdaFuse call goes on as one longer call.

    Attributes:
        sequences (`torch.LongTensor`): the ids it belongs to.
        assistants (`list`): per assistant, a weak reference to it, its tokenizer's fingerprint, and per prompt its ids
            and its keys and values. Copies of the cache are without them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sequences: torch.Tensor | None = None
        self.assistants: list[Any] = []

    def belongs_to(self, sequences: torch.Tensor) -> bool:
        """Whether it is the cache of exactly these ids."""
        return self.sequences is not None and torch.equal(self.sequences, sequences.cpu())

    def states_of(self, model: Any, fingerprint: str) -> list[tuple[list[int], KeysValues]] | None:
        """An assistant's ids and keys and values per prompt, where it took part."""
        for reference, tokenizer, states in self.assistants:
            if reference() is model and tokenizer == fingerprint:
                return states  # type: ignore[no-any-return]
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "assistants": []}


def make_cache(layers: KeysValues, cache: DynamicCache | None = None) -> DynamicCache:
    """A cache of these keys and values."""
    cache = DynamicCache() if cache is None else cache
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache


def adopt_cache(cache: Cache, length: int) -> KeysValues:
    """
    The keys and values of a caller's cache of `length` tokens; its own tensors, to be read only. A sliding layer has
    dropped its oldest keys: zeros stand in for them, which the window hides for good.

    Raises:
        ValueError: the cache is of a kind whose keys cannot be gathered (static, quantized, recurrent).
    """
    layers: KeysValues = []
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or "Quantized" in type(layer).__name__:
            raise ValueError(
                f"`past_key_values` must be a DynamicCache, but has a {type(layer).__name__}. "
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


class SlotLayer(DynamicLayer):
    """One layer of a [`SlotCache`]: tensors with spare columns, written in place."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self.cache = cache
        self.is_initialized: bool = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = self.get_seq_length() + key_states.shape[2]
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.keys, self.values = _spare(key_states, width), _spare(value_states, width)
        elif self.keys.shape[2] < width:
            self.keys, self.values = _grown(self.keys, width), _grown(self.values, width)
        self.cache.write(self.keys, key_states)
        self.cache.write(self.values, value_states)
        return self.keys[:, :, :width], self.values[:, :, :width]

    def get_seq_length(self) -> int:
        return max(self.cache.ends, default=0)


class SlotCache(DynamicCache):
    """
    The cache of a batch of token trees. Each row of the batch grows at its own end, in place: no pass copies what is
    there. The columns after a row's end hold nothing; the mask hides them.

    Attributes:
        ends (`list[int]`): per row of the batch, the columns in use.
    """

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.ends = [0] * batch_size

    @property
    def ends(self) -> list[int]:
        return self._ends

    @ends.setter
    def ends(self, ends: list[int]) -> None:
        self._ends = ends
        self._columns: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}  # of the pass under way

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        while len(self.layers) <= layer_idx:
            self.layers.append(SlotLayer(self))
        return self.layers[layer_idx].update(key_states, value_states)  # type: ignore[no-any-return]

    def write(self, tensor: torch.Tensor, new: torch.Tensor) -> None:
        """Write `new`, of shape `(batch_size, num_heads, num_new, head_dim)`, at the end of each row."""
        start, num_new = self.ends[0], new.shape[2]
        if all(end == start for end in self.ends):
            tensor[:, :, start : start + num_new] = new
            return
        if tensor.device not in self._columns:
            rows = torch.arange(len(self.ends), device=tensor.device)[:, None]
            ends = torch.tensor(self.ends, device=tensor.device)[:, None]
            self._columns[tensor.device] = rows, ends + torch.arange(num_new, device=tensor.device)
        rows, columns = self._columns[tensor.device]
        tensor[rows, :, columns] = new.transpose(1, 2)

    def fill(self, layers: KeysValues) -> None:
        """Begin with these keys and values, as wide in every row."""
        for index, (keys, values) in enumerate(layers):
            self.update(keys, values, index)
        if layers:
            self.ends = [layers[0][0].shape[2]] * len(self.ends)

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

    @property
    def num_bytes(self) -> int:
        """What its tensors hold, spare columns and all."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers if layer.is_initialized)


def _spare(like: torch.Tensor, width: int) -> torch.Tensor:
    """A tensor for `width` columns and some to come, so that it grows seldom and holds little more than it must."""
    batch_size, num_heads, _, head_dim = like.shape
    return like.new_zeros((batch_size, num_heads, width + max(8, width // 32), head_dim))


def _grown(tensor: torch.Tensor, width: int) -> torch.Tensor:
    larger = _spare(tensor, width)
    larger[:, :, : tensor.shape[2]] = tensor
    return larger


def join_rows(rows: list[KeysValues], starts: list[int], length: int) -> KeysValues:
    """One batch of rows, row i placed at slot `starts[i]` of `length`, zeros elsewhere."""

    def place(tensors: list[torch.Tensor]) -> torch.Tensor:
        padded = [
            torch.nn.functional.pad(tensor, (0, 0, start, length - start - tensor.shape[2]))
            for tensor, start in zip(tensors, starts, strict=True)
        ]
        return torch.cat(padded)

    return [
        (place([row[index][0] for row in rows]), place([row[index][1] for row in rows]))
        for index in range(len(rows[0]))
    ]
