"""Predicts the seconds that a forward pass of a model takes on its device, by the number of tokens in it.

The curve goes through what was measured so far in this process, and follows a stated prior elsewhere. It decides which
passes are run, and never changes what is read from them.
"""

from __future__ import annotations

import bisect
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..kernels.autotuner import Autotuner, timing_allowed
from ..transformers_compat import has_compiled_parts

# Passes are measured by size: each counts for the smallest of these that it does not exceed; larger ones do not count.
SIZES = (1, 2, 4, 8, 16, 32, 64)
# Before it is measured: the cost of a pass in terms of one of one token, between these sizes by straight lines. On CPU
# about what two pairs of models took on two processors: were more tokens said to be dear, they would not be tried, nor
# measured. An accelerator waits for the weights to be read, whether for one token or for many.
CPU_PRIOR = {1: 1.0, 2: 1.15, 8: 1.6, 32: 2.6, 64: 4.5}
ACCELERATOR_PRIOR = {1: 1.0, 64: 1.0, 512: 2.0}
# A model without weights is behind a server: seconds of a request.
SERVED_PRIOR = {1: 0.05, 64: 0.1}
# Weights read per second, in bytes, which prices a pass of one token: memory of a desktop, of an accelerator.
CPU_BANDWIDTH, ACCELERATOR_BANDWIDTH = 1e10, 1e12
# A size with fewer measurements is not trusted; older ones fade.
_FEWEST = 3
_FADING = 32
# The curve is drawn anew after this many passes.
_RENEWED_EVERY = 4


class PassCosts:
    """
    The costs of one model's passes.

    Args:
        prior (`dict[int, float]`): seconds by number of tokens, for as long as nothing has been measured.
        is_measured (`bool`, *optional*, defaults to `True`): whether passes are timed; else the prior is all there is.
    """

    def __init__(self, prior: Mapping[int, float], is_measured: bool = True) -> None:
        self._prior = dict(sorted(prior.items()))
        self._is_measured = is_measured
        self._means = dict.fromkeys(SIZES, 0.0)
        self._counts = dict.fromkeys(SIZES, 0)
        self._scales: dict[int, float] = {}  # of the prior, at the known sizes
        self._seconds: dict[int, float] = {}  # by number of tokens, as far as asked for since the scales were taken

    @contextmanager
    def measured(self, num_tokens: int) -> Iterator[None]:
        """Time one pass within this context. A pass in which the autotuner tried something does not count."""
        start = time.perf_counter()
        num_trials = Autotuner.num_trials
        yield
        size = next((size for size in SIZES if num_tokens <= size), None)
        if size is None or num_trials != Autotuner.num_trials:
            return
        self._counts[size] += 1
        weight = 1 / min(self._counts[size], _FADING)
        self._means[size] += weight * (time.perf_counter() - start - self._means[size])
        if sum(self._counts.values()) % _RENEWED_EVERY == 0:
            known = [size for size in SIZES if self._counts[size] >= _FEWEST]
            self._scales = {size: self._means[size] / _on_line(self._prior, size) for size in known}
            self._seconds = {}

    def seconds(self, num_tokens: int) -> float:
        """The predicted seconds of a pass of this many tokens: the prior, scaled by the measurements at the nearest
        known sizes. Sizes above `SIZES[-1]` count as that."""
        size = min(num_tokens, SIZES[-1])
        if not self._is_measured or not timing_allowed():
            return _on_line(self._prior, size)
        scales = self._scales  # another thread may renew this and the next
        known = self._seconds
        if size not in known:
            known[size] = _on_line(self._prior, size) * (_on_line(scales, size) if scales else 1.0)
        return known[size]


def costs_of(model: Any, device: torch.device) -> PassCosts:
    """The measured costs of a model: one object as long as the model lives and stays on its device."""
    known = _KNOWN.setdefault(model, {})
    is_measured = not has_compiled_parts(model)  # in the first passes of such a model the clock is that of the compiler
    key = str(device), is_measured
    if key not in known:
        known[key] = PassCosts(_prior_of(model, device), is_measured)
    return known[key]


_KNOWN: weakref.WeakKeyDictionary[Any, dict[tuple[str, bool], PassCosts]] = weakref.WeakKeyDictionary()


def _prior_of(model: Any, device: torch.device) -> dict[int, float]:
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    if num_bytes == 0:
        return SERVED_PRIOR
    is_cpu = device.type == "cpu"
    seconds = num_bytes / (CPU_BANDWIDTH if is_cpu else ACCELERATOR_BANDWIDTH)
    return {size: seconds * cost for size, cost in (CPU_PRIOR if is_cpu else ACCELERATOR_PRIOR).items()}


def _on_line(points: Mapping[int, float], at: int) -> float:
    """The value at `at` of the line through these points, in ascending order; level before the first one, and after
    the last."""
    places = list(points)
    right = bisect.bisect_left(places, at)
    if right == 0:
        return points[places[0]]
    if right == len(places):
        return points[places[-1]]
    left, end = places[right - 1], places[right]
    share = (at - left) / (end - left)
    return points[left] + share * (points[end] - points[left])
