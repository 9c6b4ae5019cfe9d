"""Keys and values of a caller's caches, taken in and handed out. Knows no tree.

A cache here holds every key of every layer (no sliding window drops any: the mask does the window), as tensors of shape
`(batch_size, num_heads, num_columns, head_dim)`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from ..host_internals import CACHE_NAME, holds_all_keys

KeysValues = list[tuple[torch.Tensor, torch.Tensor]]


class AdaFuseCache(DynamicCache):
    """
    The main model's cache after a call, left-padded like `sequences[:, :-1]`, which ordinary `generate()` can continue
    too. It also carries each assistant's own ids and keys, so that a later AdaFuse call goes on as one longer call.
    Where a model keeps no keys (a recurrent one), it holds the ids alone, and only AdaFuse can continue from it.

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

    def states_of(self, index: int, model: Any, fingerprint: str) -> list[tuple[list[int], KeysValues | None]] | None:
        """The ids and keys and values per prompt of assistant `index`, where it is this model with this tokenizer; of
        the first that is, where the assistants have changed places."""
        own = self.assistants[index : index + 1]
        for reference, tokenizer, states in [*own, *self.assistants]:
            if reference() == model and tokenizer == fingerprint:
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


def adopt_cache(cache: Any, length: int) -> KeysValues:
    """
    The keys and values of a caller's cache of `length` tokens; its own tensors, to be read only. A sliding layer has
    dropped its oldest keys: zeros stand in for them, which the window hides for good.

    Raises:
        ValueError: the cache is of a kind whose keys cannot be gathered (static, quantized, recurrent).
    """
    layers: KeysValues = []
    for layer in cache.layers:
        if not holds_all_keys(layer):
            raise ValueError(
                f"`{CACHE_NAME}` must be a DynamicCache with keys in all layers, but has a {type(layer).__name__}. "
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


def join_rows(rows: list[KeysValues], starts: list[int], length: int) -> KeysValues:
    """One batch of rows, row i placed at column `starts[i]` of `length`, zeros elsewhere."""

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
