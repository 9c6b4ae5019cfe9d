"""Linear layers over few tokens, on CPU in float32, by all cores. Knows no model's structure, no tree and no text.

A weight times the vectors of a few tokens is a skinny product. MKL, which is behind `F.linear`, leaves skinny ones to
one core, and takes long over large weights. Here all cores multiply, each its own parts of the weight, small enough to
stay in the caches. Gemma's 262,144 words for 1, 4, 16 and 64 tokens take two cores 0.6, 0.3, 0.4 and 0.6 of the time,
and one core 0.9, 0.4, 0.6 and 0.8; a layer of 4,096 by 4,096 takes two cores 0.7, 0.4, 0.7 and 0.8:
python tests/check_linear.py
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F

from ..host_internals import Conv1D, has_compiled_parts, modules_inside, with_modules

# With more tokens `F.linear` uses all cores too.
MAX_TOKENS = 128
# About the bytes of a part; smaller weights stay whole, with one thread also those of fewer parts than that.
_PART_BYTES, _FEWEST_FOR_ONE_THREAD = 5 * 2**17, 8
# Parts are smaller where there would not be about so many for each thread. The number of their rows is a multiple of
# what is multiplied at a time, and not smaller than that.
_PARTS_PER_THREAD, _ROW_MULTIPLE, _FEWEST_ROWS = 4, 8, 16
# The weight is on the left for these numbers of tokens; and for these where it is narrow: it has not more columns than
# that, nor than rows.
_LEFT_TOKENS, _LEFT_IF_NARROW = (4, 5), {1: 640, 2: 640, 3: 1024}


def with_skinny_linears(model: Any) -> Any:
    """
    The same model, its parameters, buffers and hooks shared, in which linear layers multiply by parts: they give the
    same but for rounding. `model` itself is not touched. It is returned as it is where there is nothing to gain:
    compiled, or with layers that are all small, quantized, hooked, in another precision or on another device.

    Args:
        model (`torch.nn.Module`): what is changed on it afterwards, other than parameters, may not show in the result.
    """
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if not has_mkl or has_compiled_parts(model):
        return model
    return _twin(model, {})


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` of `inputs`, of shape `(..., in)`; by parts of the weight for at most `MAX_TOKENS` vectors."""
    num_rows, num_columns = weight.shape
    num_tokens, num_threads = inputs.numel() // num_columns, torch.get_num_threads()
    is_left = _is_left(num_tokens, num_rows, num_columns)
    part_rows = _part_rows(num_rows, num_columns, num_threads)
    may_gain = 0 < num_tokens <= MAX_TOKENS and (is_left or not num_threads == num_tokens == 1)
    if part_rows is None or not may_gain or torch.is_autocast_enabled("cpu"):
        return F.linear(inputs, weight, bias)
    vectors, rest = inputs.reshape(num_tokens, num_columns), num_rows % part_rows
    parts = weight[: num_rows - rest].view(-1, part_rows, num_columns)
    if is_left and weight.is_contiguous():
        factors = F.pad(vectors, (0, 0, 0, 1)) if num_tokens == 3 else vectors  # four are quicker than three
        products = torch.bmm(parts, factors.t().expand(len(parts), -1, -1)).flatten(0, 1).t()[:num_tokens]
    else:
        products = torch.bmm(vectors.expand(len(parts), -1, -1), parts.transpose(1, 2)).transpose(0, 1).flatten(1)
    if rest:
        products = torch.cat([products, F.linear(vectors, weight[-rest:])], dim=1)
    outputs = products.contiguous().view(*inputs.shape[:-1], num_rows)
    return outputs if bias is None else outputs + bias


def _is_left(num_tokens: int, num_rows: int, num_columns: int) -> bool:
    """Whether the product is quicker with the weight on the left."""
    return num_tokens in _LEFT_TOKENS or num_columns <= min(num_rows, _LEFT_IF_NARROW.get(num_tokens, 0))


@functools.cache
def _part_rows(num_rows: int, num_columns: int, num_threads: int) -> int | None:
    """How many rows make a part, if possible of equal parts; `None` for a weight that stays whole."""
    num_parts = 4 * num_rows * num_columns / _PART_BYTES
    is_small = num_parts < (1 if num_threads > 1 else _FEWEST_FOR_ONE_THREAD)
    if is_small or num_rows < _FEWEST_ROWS * num_threads:
        return None
    wanted = max(num_rows / max(num_parts, _PARTS_PER_THREAD * num_threads), _FEWEST_ROWS)
    allowed = range(_FEWEST_ROWS, 1 + min(num_rows, int(1.5 * wanted)), _ROW_MULTIPLE)
    near = [number for number in allowed if number >= wanted / 1.5]
    equal = [number for number in near if num_rows % number == 0]
    return min(equal or near, key=lambda number: abs(math.log(number / wanted)), default=None)


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
    if (
        type(layer) not in _TWINS
        or type(weight) is not torch.nn.Parameter
        or weight.device.type != "cpu"
        or weight.dtype is not torch.float32
        or weight.layout is not torch.strided
        or weight.dim() != 2  # what an offloader puts in its place
    ):
        return False
    num_rows, num_columns = weight.shape if isinstance(layer, torch.nn.Linear) else reversed(weight.shape)
    return _part_rows(num_rows, num_columns, torch.get_num_threads()) is not None
