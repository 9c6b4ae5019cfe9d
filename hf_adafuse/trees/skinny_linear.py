"""Linear layers over few tokens, on CPU in float32, by all cores. Knows no model's structure, no tree and no text.

A weight times the vectors of a few tokens is a skinny product. MKL, which is behind `F.linear`, leaves skinny ones to
one core. Here all cores multiply, each with its own parts of the weight: 1.4 to 2 times as fast on two cores. The very
skinny ones of tall weights, a large vocabulary's above all, are quicker still with the weight on the left, on one core
too: Gemma's 262,144 words for one, two and four tokens take two cores 22, 30 and 41 ms, instead of 69, 140 and 140, or
38, 76 and 80 by parts.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F

from ..host_internals import Conv1D, is_compiled, modules_inside, with_modules

# With more tokens `F.linear` uses all cores too.
MAX_TOKENS = 128
# Parts of a weight for each thread: small ones stay in a core's cache; so few at least, so many at most.
_PARTS_PER_THREAD, _FEWEST, _MOST = 4, 1, 16
# The weight is on the left where it has so many rows and, for so few tokens, so many times as many rows as columns.
_TALL = 4096
_FEW_TOKENS = {3: 4, 8: 32}


def with_skinny_linears(model: Any) -> Any:
    """
    The same model, its parameters, buffers and hooks shared, in which linear layers multiply by parts: they give the
    same but for rounding. `model` itself is not touched. It is returned as it is where there is nothing to gain:
    compiled, or with layers that are all quantized, hooked, in another precision or on another device, or, for one
    thread, not tall.

    Args:
        model (`torch.nn.Module`): what is changed on it afterwards, other than parameters, may not show in the result.
    """
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if not has_mkl or any(map(is_compiled, model.modules())):
        return model
    return _twin(model, {})


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` of `inputs`, of shape `(..., in)`; by parts of the weight for at most `MAX_TOKENS` vectors."""
    num_threads, num_tokens = torch.get_num_threads(), inputs.numel() // inputs.shape[-1]
    num_parts, is_left = _num_parts(len(weight), num_threads), _is_very_skinny(num_tokens, weight)
    may_gain = num_parts is not None and 0 < num_tokens <= MAX_TOKENS and (num_threads > 1 or is_left)
    if num_parts is None or not may_gain or torch.is_autocast_enabled("cpu"):
        return F.linear(inputs, weight, bias)
    vectors = inputs.reshape(1, num_tokens, -1).expand(num_parts, -1, -1)
    parts = weight.unflatten(0, (num_parts, -1))  # type: ignore[no-untyped-call]
    if is_left:
        outputs = torch.bmm(parts, vectors.transpose(1, 2)).flatten(0, 1).t()
    else:
        outputs = torch.bmm(vectors, parts.transpose(1, 2)).transpose(0, 1)
    outputs = outputs.contiguous().view(*inputs.shape[:-1], len(weight))
    return outputs if bias is None else outputs + bias


def _is_very_skinny(num_tokens: int, weight: torch.Tensor) -> bool:
    """Whether the product is quicker with the weight on the left."""
    num_rows, num_columns = weight.shape
    times = next((times for most, times in _FEW_TOKENS.items() if num_tokens <= most), None)
    return times is not None and num_rows >= max(_TALL, times * num_columns) and weight.is_contiguous()


@functools.cache
def _num_parts(num_rows: int, num_threads: int) -> int | None:
    """Into how many equal parts a weight falls, about `_PARTS_PER_THREAD` for each thread; `None` where into none."""
    allowed = range(_FEWEST * num_threads, _MOST * num_threads + 1)
    divisors = [n for n in allowed if n <= num_rows and num_rows % n == 0]
    return min(divisors, key=lambda n: abs(math.log(n / num_threads / _PARTS_PER_THREAD)), default=None)


class _SkinnyLinear(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


class _SkinnyConv1D(Conv1D):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight.t(), self.bias)


_TWINS = {torch.nn.Linear: _SkinnyLinear, Conv1D: _SkinnyConv1D}


def _twin(module: Any, known: dict[int, Any]) -> Any:
    """The module itself where no layer below is to be another, else one that shares all but those layers."""
    if id(module) not in known:
        known[id(module)] = module
        if not isinstance(module, torch.jit.ScriptModule) and "forward" not in vars(module):
            before = modules_inside(module)
            children = {name: child and _twin(child, known) for name, child in before.items()}
            kind = _TWINS[type(module)] if _is_eligible(module) else None
            if kind is not None or any(children[name] is not child for name, child in before.items()):
                known[id(module)] = with_modules(module, kind or type(module), children)
    return known[id(module)]


def _is_eligible(layer: Any) -> bool:
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    return (
        type(layer) in _TWINS
        and type(weight) is torch.nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype is torch.float32
        and weight.layout is torch.strided
        and weight.numel() > 0
        and (torch.get_num_threads() > 1 or _is_very_skinny(1, weight))
    )
