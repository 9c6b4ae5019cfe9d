"""What a model remembers of one sequence, a recurrent state or a cache: fork, split and join it.

Its tensors have the batch as their first dimension, of size 1.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from typing import Any

import torch

from ..transformers_compat import DynamicLayer


def fork_state(memory: Any) -> Any:
    """A copy that can be extended while the original stays. Keys and values are shared: layers only replace them."""
    return _mapped(lambda tensors, is_shared: tensors[0] if is_shared else tensors[0].clone(), [memory])


def join(memories: list[Any]) -> Any:
    """One memory of a batch of the given sequences, which must be of one length."""
    if len(memories) == 1:
        return fork_state(memories[0])
    return _mapped(lambda tensors, _: torch.cat(tensors) if tensors[0].ndim else tensors[0], memories)


def split(memory: Any, batch_size: int) -> list[Any]:
    """The memory of each sequence of a batch, as copies: one that is dropped frees its part."""
    if batch_size == 1:
        return [memory]

    def part(row: int) -> Any:
        return _mapped(
            lambda tensors, _: tensors[0][row : row + 1].clone() if _is_batch(tensors[0], batch_size) else tensors[0],
            [memory],
        )

    return [part(row) for row in range(batch_size)]


def grows(memory: Any) -> bool:
    """Whether the memory holds something for each token, so that only sequences of equal length can be joined."""
    if isinstance(memory, list):
        return False
    return any(isinstance(layer, DynamicLayer) for layer in memory.layers) if hasattr(memory, "layers") else True


def num_bytes(memory: Any) -> int:
    """The bytes of all tensors of a memory. A view counts with the whole tensor that it keeps alive."""
    sizes: dict[int, int] = {}

    def count(tensors: list[torch.Tensor], _: bool) -> torch.Tensor:
        storage = tensors[0].untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensors[0]

    _mapped(count, [memory])
    return sum(sizes.values())


def _is_batch(tensor: torch.Tensor, batch_size: int) -> bool:
    return tensor.ndim > 0 and len(tensor) == batch_size


def _mapped(change: Callable[[list[torch.Tensor], bool], Any], memories: list[Any], is_shared: bool = False) -> Any:
    """A copy of the first memory with its tensors changed; `change` sees those at the same place in all memories."""
    first = memories[0]
    if isinstance(first, torch.Tensor):
        return change(memories, is_shared)
    if isinstance(first, (list, tuple)):
        return type(first)(_mapped(change, list(parts)) for parts in zip(*memories, strict=True))
    if isinstance(first, dict):
        return type(first)((key, _mapped(change, [memory[key] for memory in memories])) for key in first)
    if not hasattr(first, "__dict__") or callable(first) or isinstance(first, enum.Enum):
        return first
    made = copy.copy(first)
    for name in vars(first):
        is_kept = isinstance(first, DynamicLayer) and name in ("keys", "values")
        setattr(made, name, _mapped(change, [getattr(memory, name) for memory in memories], is_kept))
    return made
