"""Measures what models cost: time in forward passes, passes, tokens, bytes of the KV cache, memory, and bandwidth.

`measured_copy` makes a copy of a model that reports its passes to a [`Meter`].
"""

from __future__ import annotations

import copy
import functools
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ...transformers_compat import CACHE_NAME

_PEAK_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_ALL_PROCESSORS = Path("/proc/stat")  # see proc(5)


class Meter:
    """
    What the forward passes of several models cost since the last `reset()`.

    Attributes:
        is_on (`bool`): whether passes are counted. To time a pass the host waits for the GPU before and after it, which
            lengthens the call. Where only the time of the whole call matters, it is set to `False`.
        seconds (`list[float]`), forwards (`list[int]`), tokens (`list[int]`): for each model, the time in its passes,
            their number, and the tokens that they read, padding included.
        kv_peak_bytes (`int`): the most bytes that the caches of all models held together after a pass.
    """

    def __init__(self, num_models: int) -> None:
        self.num_models = num_models
        self.is_on = True
        self.reset()

    def reset(self) -> None:
        self.seconds = [0.0] * self.num_models
        self.forwards = [0] * self.num_models
        self.tokens = [0] * self.num_models
        self.kv_peak_bytes = 0
        self._held = [0] * self.num_models

    def count(self, index: int, seconds: float, num_tokens: int, cache: Any) -> None:
        self.seconds[index] += seconds
        self.forwards[index] += 1
        self.tokens[index] += num_tokens
        self._held[index] = cache_bytes(cache)
        self.kv_peak_bytes = max(self.kv_peak_bytes, sum(self._held))


def measured_copy(model: Any, meter: Meter, index: int) -> Any:
    """A copy of a model that shares its weights, and reports each forward pass to `meter` as that of model `index`. The
    model itself is not touched."""
    twin = copy.copy(model)
    kind = type(model)
    own = vars(twin).pop("forward", None)  # where the model has been compiled

    @functools.wraps(kind.forward)
    def measured_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        forward = functools.partial(kind.forward, self) if own is None else own
        if not meter.is_on:
            return forward(*args, **kwargs)
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        synchronize(ids.device)
        start = time.perf_counter()
        output = forward(*args, **kwargs)
        synchronize(ids.device)
        meter.count(index, time.perf_counter() - start, ids.numel(), getattr(output, CACHE_NAME, None))
        return output

    if own is not None:  # take over torch's notes on it, which say that it is compiled
        vars(measured_forward).update({**vars(own), "__wrapped__": kind.forward})
    # `forward` is replaced in the class. A model with a `forward` of its own would count as hooked.
    twin.__class__ = type(kind.__name__, (kind,), {"forward": measured_forward})
    return twin


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cache_bytes(cache: Any) -> int:
    """The bytes that a cache's keys and values keep in memory. A storage that several tensors share counts once."""
    storages: dict[int, int] = {}
    for layer in getattr(cache, "layers", []):
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def kv_bytes(model: Any, num_tokens: int) -> int:
    """The bytes of the keys and values that the model's own `generate()` keeps of a text of `num_tokens` tokens: for
    each token in each layer with attention 2 * KV heads * head size * bytes of a number. A layer with a sliding window
    keeps the tokens of its window."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        return 0
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    kinds = kinds or ["full_attention"] * config.num_hidden_layers
    with_keys = [kind for kind in kinds if kind.endswith(("attention", "hybrid")) and kind != "linear_attention"]
    window = getattr(config, "sliding_window", None) or num_tokens
    kept = sum(min(num_tokens, window) if kind.startswith("sliding") else num_tokens for kind in with_keys)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return int(2 * kept * kv_heads * head_dim * model.dtype.itemsize)


def weight_bytes(model: Any) -> int:
    """The bytes of weights that one forward pass reads: all, except an input embedding that is not the output layer."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    is_tied = head is not None and embedding.weight is head.weight
    unread = 0 if is_tied else embedding.weight.nbytes
    return int(sum(parameter.nbytes for parameter in model.parameters()) - unread)


def copy_bandwidth(device: torch.device, num_bytes: int | None = None, repeats: int = 5) -> float:
    """How many bytes per second the device reads and writes in the fastest of several copies of a large block, by as
    many threads as torch computes with now."""
    # The block is far larger than a processor's caches, as weights are: both are read from memory.
    num_bytes = num_bytes or (2**30 if device.type == "cuda" else 2**27)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * num_bytes / best


def reset_peak_memory(device: torch.device) -> None:
    """Begin to measure the peak anew, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # otherwise the peak is that of the process so far
            _PEAK_RESET.write_text("5", encoding="ascii")  # 5: only the peak, see proc(5)


def peak_memory(device: torch.device) -> int | None:
    """The most bytes in use since the reset, on the GPU or in the process; `None` where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if _STATUS.exists():
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return None
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


class Load:
    """How many processors other programs keep busy from now on."""

    def __init__(self) -> None:
        self._start = self._times()

    def so_far(self) -> float:
        """The mean number of processors. NaN where the system does not say."""
        busy, own, clock = (now - then for now, then in zip(self._times(), self._start, strict=True))
        return max((busy - own) / clock, 0.0)  # NaN stays

    @staticmethod
    def _times() -> tuple[float, float, float]:
        """Seconds that all processors were busy, that this process took of them, and of the clock."""
        busy = math.nan
        if _ALL_PROCESSORS.exists():
            user, nice, system, _idle, _waiting, *others = map(int, _ALL_PROCESSORS.read_text().split()[1:9])
            busy = (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")
        return busy, time.process_time(), time.perf_counter()


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[float, Any]:
    """The seconds that `work` takes, and what it returns."""
    synchronize(device)
    start = time.perf_counter()
    result = work()
    synchronize(device)
    return time.perf_counter() - start, result
