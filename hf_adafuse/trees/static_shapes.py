"""Few shapes and fixed addresses for the tree-attention passes of a compiled model.

For a new shape torch may compile the model anew. A CUDA graph is recorded anew for a new shape, and where the keys and
values that it writes lie at other addresses.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from ..transformers_compat import has_compiled_parts, mark_static_address
from .adapters import base_model
from .tree_cache import TreeCache

# Tensors of this many shapes are kept for a model; with widths and rows that double, the largest may be half of all.
_MOST_SHAPES = 8


@dataclass
class _StaticTensors:
    """Tensors of one shape, the keys and values of each layer; and the cache that they hold, if any."""

    layout: Any
    tensors: list[torch.Tensor]
    holder: Callable[[], TreeCache | None]


class StaticMemory:
    """The tensors that hold the KV caches of one compiled model, kept as long as the model lives."""

    def __init__(self) -> None:
        self._held: list[_StaticTensors] = []  # last used last
        self._lock = threading.Lock()

    def hold(self, cache: TreeCache, width: int) -> int:
        """
        Move what a cache holds into tensors of this many columns, unless it is in such or wider ones already.

        Returns:
            how many columns they have.
        """
        own = cache.tensors()
        if not own:
            return width
        with self._lock:
            before = next((static for static in self._held if static.holder() is cache), None)
            if before is not None and _is_in(before, own) and own[0].shape[2] >= width:
                return own[0].shape[2]
            layout = _layout(own, width)
            fitting = [static for static in self._held if static.layout == layout and static.holder() in (None, cache)]
            static = fitting[-1] if fitting else _StaticTensors(layout, _make(own, width), _no_cache)
            cache.move(static.tensors)
            if before is not None:  # left once it has been copied out of
                before.holder = _no_cache
            static.holder = weakref.ref(cache)
            self._held = [*(other for other in self._held if other is not static), static][-_MOST_SHAPES:]
        return width

    def release(self, cache: TreeCache) -> None:
        """Free the tensors of this cache for others."""
        with self._lock:
            for static in self._held:
                if static.holder() is cache:
                    static.holder = _no_cache


def memory_of(model: Any, is_kept: bool) -> StaticMemory | None:
    """The static memory of a model that is compiled, or part of which is; `None` for others. `is_kept`: whether one
    object serves as long as the model lives."""
    if not has_compiled_parts(model):
        return None
    return _MEMORIES.setdefault(base_model(model), StaticMemory()) if is_kept else StaticMemory()


_MEMORIES: weakref.WeakKeyDictionary[Any, StaticMemory] = weakref.WeakKeyDictionary()


def static_size(number: int, least: int = 1) -> int:
    """The smallest of `least`, 2 `least`, 4 `least`, ... that is at least `number`."""
    size = least
    while size < number:
        size *= 2
    return size


class _Uncompiled:
    """
    Within it torch compiles nothing, which is for shapes that come once. That is set for all threads at once: the first
    that is within turns it on, the last one off.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number_within = 0
        self._stance = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._number_within == 0:
                self._stance.enter_context(torch.compiler.set_stance("force_eager"))
            self._number_within += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._number_within -= 1
            if self._number_within == 0:
                self._stance.close()


uncompiled = _Uncompiled()


def _is_in(static: _StaticTensors, tensors: list[torch.Tensor]) -> bool:
    """Whether these are the tensors there, and may be written into as things are."""
    is_same = all(one is other for one, other in zip(static.tensors, tensors, strict=True))
    return is_same and tensors[0].is_inference() == torch.is_inference_mode_enabled()


def _layout(tensors: list[torch.Tensor], width: int) -> Any:
    """What tensors of this many columns must be like, to take the place of these."""
    shapes = [(*tensor.shape[:2], width, tensor.shape[3], tensor.dtype, tensor.device) for tensor in tensors]
    return torch.is_inference_mode_enabled(), shapes  # what is made within cannot be written into outside


def _make(like: list[torch.Tensor], width: int) -> list[torch.Tensor]:
    tensors = [tensor.new_zeros((*tensor.shape[:2], width, tensor.shape[3])) for tensor in like]
    for tensor in tensors:
        mark_static_address(tensor)
    return tensors


def _no_cache() -> None:
    return None
