"""The keys and values of the `rows` backend: an ordinary cache of slots, gathered for each pass. Knows no tree."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from .kv_cache import KeysValues, make_cache


def num_slots(cache: DynamicCache) -> int:
    """The number of slots (columns) of the cache."""
    return int(cache.layers[0].keys.shape[-2]) if cache.layers and cache.layers[0].is_initialized else 0


def gather_rows(cache: DynamicCache, rows: list[int], slots: list[list[int]]) -> DynamicCache:
    """A new cache whose row i holds `slots[i]`, as many in each, of row `rows[i]`."""
    gathered = []
    for layer in cache.layers:
        columns = torch.tensor(slots, device=layer.keys.device)
        entries = torch.tensor(rows, device=layer.keys.device)[:, None].expand_as(columns)
        gathered.append((_pick(layer.keys, entries, columns), _pick(layer.values, entries, columns)))
    return make_cache(gathered)


def append_slots(cache: DynamicCache, other: DynamicCache, sources: torch.Tensor, start: int) -> None:
    """
    Append slots of another cache.

    Args:
        sources (`torch.LongTensor` of shape `(batch_size, num_new, 2)`): for each new slot, the row of `other` that it
            comes from, and its slot there after `start`.
    """
    for layer, new in zip(cache.layers, other.layers, strict=True):
        rows, slots = sources.to(new.keys.device).unbind(-1)
        layer.keys = torch.cat([layer.keys, _pick(new.keys, rows, slots + start)], dim=2)
        layer.values = torch.cat([layer.values, _pick(new.values, rows, slots + start)], dim=2)


def select_rows(cache: DynamicCache, rows: list[int]) -> None:
    """Keep only these rows of the batch, in this order."""
    for layer in cache.layers:
        index = torch.tensor(rows, device=layer.keys.device)
        layer.keys, layer.values = layer.keys.index_select(0, index), layer.values.index_select(0, index)


def select_slots(cache: DynamicCache, slots: torch.Tensor) -> None:
    """Keep only these slots of each row, in this order. `slots`: `(batch_size, num_kept)`."""
    for layer in cache.layers:
        index = slots.to(layer.keys.device)
        entries = torch.arange(len(index), device=index.device)[:, None].expand_as(index)
        layer.keys, layer.values = _pick(layer.keys, entries, index), _pick(layer.values, entries, index)


def row_slots(cache: DynamicCache, row: int, slots: list[int]) -> KeysValues:
    """A copy of these slots of one row, as keys and values of batch size 1."""
    copied = []
    for layer in cache.layers:
        index = torch.tensor(slots, device=layer.keys.device)
        copied.append(
            (layer.keys[row : row + 1].index_select(2, index), layer.values[row : row + 1].index_select(2, index))
        )
    return copied


def _pick(tensor: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    # Indexing by two tensors apart puts their dimensions first: (batch_size, num_slots, num_heads, head_dim).
    return tensor[rows, :, slots].transpose(1, 2)
