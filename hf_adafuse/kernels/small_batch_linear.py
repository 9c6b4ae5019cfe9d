"""Linear layers over few tokens, on CPU, as quick as may be.

A weight times the vectors of a few tokens is a skinny product. How long MKL, which is behind `F.linear`, takes for one
differs by processor, number of tokens and shape: it may leave it to one core, or read the weight at half the speed.
Here a product can also be made by a kernel of our own (`native_product`), or of many, each of a part of the weight that
stays in a core's caches; which way is the quickest is tried out on the first products of each size:
python tests/check_linear.py

In bfloat16 and float16 nothing is tried, the kernel is taken for as many tokens as it is quicker for: rounding differs
by way, and there so much that the same call could give another text before the quickest is known than after.
"""

from __future__ import annotations

import bisect
import functools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..transformers_compat import Conv1D, has_compiled_parts, hooks_of, is_watched, modules_inside, with_modules
from .autotuner import Autotuner, timing_allowed
from .native_product import MAX_TOKENS, can_multiply, product

# The least bytes of a weight that the kernel is tried for. With more columns than `_KERNEL_COLUMNS`, parts may
# still be quicker.
_LEAST_BYTES = 2**17
_KERNEL_COLUMNS = 2048
# About the bytes of a part; a weight that is smaller than the larger ones stays whole.
_LARGE_PART = 5 * 2**17
_SMALL_PART = 2**17
# Parts are smaller where there would be fewer than about this many for each thread. The number of their rows is a
# multiple of `_ROW_MULTIPLE`, and not smaller than `_FEWEST_ROWS`.
_PARTS_PER_THREAD = 4
_ROW_MULTIPLE = 8
_FEWEST_ROWS = 16
# Numbers of tokens between two of these are alike: the same way is taken for all of them.
_TOKEN_BOUNDS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112)
_SIZES = [bisect.bisect(_TOKEN_BOUNDS, number) for number in range(MAX_TOKENS + 1)]
# Where nothing may be tried, `F.linear` is not taken for these numbers of tokens, but the kernel, else small parts.
_UNTRIED = range(4, 16)
# In half precision the kernel is taken for at most this many tokens. python tests/check_linear.py --dtype float16
_HALF_TOKENS = 32


class _Way(NamedTuple):
    """How to multiply: by the kernel; or with a weight whole (`part_rows` is `None`) or in parts of `part_rows` rows,
    on the left or on the right of the vectors."""

    part_rows: int | None = None
    is_left: bool = False
    by_kernel: bool = False


_WHOLE = _Way()
_BY_KERNEL = _Way(by_kernel=True)


def with_small_batch_linears(model: Any) -> Any:
    """
    The same model, its parameters and buffers shared, in which linear layers multiply in the quickest way: they
    give the same but for rounding. `model` itself is not touched. It is returned as it is where there is nothing to
    gain: compiled, or with layers that are all small, quantized, hooked, in float64 or on another device; in half
    precision, where there is no kernel.

    Args:
        model (`torch.nn.Module`): what is changed on it afterwards, other than parameters, may not show in the result.
    """
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if not has_mkl or has_compiled_parts(model):
        return model
    return _twin(model, {})


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` of `inputs`, of shape `(..., in)`; for few vectors in a quicker way, if there is one."""
    if weight.dim() != 2 or not weight.numel():  # what an offloader has put in its place
        return F.linear(inputs, weight, bias)
    (num_rows, num_columns), dtype = weight.shape, weight.dtype
    num_tokens = inputs.numel() // num_columns
    # What does not match is told by `F.linear`: the kernel would read what is not there.
    is_plain = _is_plain(inputs, dtype) and _is_plain(weight, dtype) and (bias is None or _is_plain(bias, dtype))
    does_match = is_plain and inputs.shape[-1] == num_columns and (bias is None or bias.shape == (num_rows,))
    if not does_match or not 0 < num_tokens <= MAX_TOKENS or torch.is_autocast_enabled("cpu") or is_watched():
        return F.linear(inputs, weight, bias)
    is_contiguous = weight.is_contiguous()
    # The kernel knows no gradients.
    has_kernel = is_contiguous and not torch.is_grad_enabled() and _fits_kernel(num_rows, num_columns, dtype)
    if dtype is not torch.float32:
        by_kernel = has_kernel and num_tokens <= _HALF_TOKENS
        return _multiplied(inputs, weight, bias, _BY_KERNEL if by_kernel else _WHOLE)
    size = _SIZES[num_tokens]
    tuner = _tuner(num_rows, num_columns, size, torch.get_num_threads(), is_contiguous, has_kernel, timing_allowed())
    if tuner.winner is not None:
        return _multiplied(inputs, weight, bias, tuner.winner)
    return tuner.run(lambda way: _multiplied(inputs, weight, bias, way))


def _is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether it is no more than numbers in memory, all of this dtype."""
    is_ordinary = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_ordinary and tensor.is_cpu and tensor.dtype is dtype and not tensor.is_neg()


def _multiplied(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, way: _Way) -> torch.Tensor:
    if way is _WHOLE:
        return F.linear(inputs, weight, bias)
    if way is _BY_KERNEL:
        return product(inputs, weight, bias)
    products = _product(inputs.reshape(-1, inputs.shape[-1]), weight, way)
    outputs = products.contiguous().view(*inputs.shape[:-1], len(weight))
    return outputs if bias is None else outputs + bias


def _product(vectors: torch.Tensor, weight: torch.Tensor, way: _Way) -> torch.Tensor:
    """`vectors`, of shape `(tokens, in)`, times the weight: `(tokens, out)`."""
    if way.part_rows is None:
        return torch.mm(weight, vectors.t()).t()
    (num_rows, num_columns), num_tokens = weight.shape, len(vectors)
    rest = num_rows % way.part_rows
    parts = weight[: num_rows - rest].view(-1, way.part_rows, num_columns)
    if way.is_left:
        factors = F.pad(vectors, (0, 0, 0, 1)) if num_tokens == 3 else vectors  # four are quicker than three
        products = torch.bmm(parts, factors.t().expand(len(parts), -1, -1)).flatten(0, 1).t()[:num_tokens]
    else:
        products = torch.bmm(vectors.expand(len(parts), -1, -1), parts.transpose(1, 2)).transpose(0, 1).flatten(1)
    return torch.cat([products, F.linear(vectors, weight[-rest:])], dim=1) if rest else products


@functools.cache
def _tuner(
    num_rows: int, num_columns: int, size: int, num_threads: int, is_contiguous: bool, has_kernel: bool, may_try: bool
) -> Autotuner[_Way]:
    """The tuner that chooses among the ways for weights and numbers of tokens of this kind. Where nothing may be tried,
    there is one way."""
    by_kernel = [_BY_KERNEL] if has_kernel else []
    large = _part_rows(num_rows, num_columns, num_threads, _LARGE_PART)
    small = _part_rows(num_rows, num_columns, num_threads, _SMALL_PART)
    has_parts = large is not None and not (has_kernel and num_columns <= _KERNEL_COLUMNS)
    in_parts = [_Way(part_rows) for part_rows in dict.fromkeys((small, large)) if part_rows] if has_parts else []
    if not may_try:
        sizes = {_SIZES[number] for number in _UNTRIED}
        return Autotuner([*(by_kernel + in_parts if size in sizes else []), _WHOLE][:1])
    ways = [_WHOLE, *by_kernel, *in_parts]
    if has_parts:
        ways.append(_Way(None, is_left=True))
    if has_parts and is_contiguous:
        ways.append(_Way(large, is_left=True))
    return Autotuner(ways)


def _fits_kernel(num_rows: int, num_columns: int, dtype: torch.dtype) -> bool:
    return dtype.itemsize * num_rows * num_columns >= _LEAST_BYTES and can_multiply(num_rows, num_columns, dtype)


def _part_rows(num_rows: int, num_columns: int, num_threads: int, part_bytes: int) -> int | None:
    """How many rows make a part, if possible of equal parts; `None` for a weight that stays whole."""
    num_parts = 4 * num_rows * num_columns / part_bytes
    if num_parts < 1 or num_rows < _FEWEST_ROWS * num_threads:
        return None
    wanted = max(num_rows / max(num_parts, _PARTS_PER_THREAD * num_threads), _FEWEST_ROWS)
    allowed = range(_FEWEST_ROWS, 1 + min(num_rows, int(1.5 * wanted)), _ROW_MULTIPLE)
    near = [number for number in allowed if number >= wanted / 1.5]
    equal = [number for number in near if num_rows % number == 0]
    return min(equal or near, key=lambda number: abs(math.log(number / wanted)), default=None)


class _SmallBatchLinear(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


class _SmallBatchConv1D(Conv1D):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight.t(), self.bias)


_TWINS = {torch.nn.Linear: _SmallBatchLinear, Conv1D: _SmallBatchConv1D}


def _twin(module: Any, known: dict[int, Any]) -> Any:
    """The module itself where no layer below is to be another, else one that shares all but those layers. A module with
    hooks stays itself: a hook may look its module up, or write on it."""
    if id(module) not in known:
        known[id(module)] = module
        is_plain = "forward" not in vars(module) and not hooks_of(module)
        if is_plain and not isinstance(module, torch.jit.ScriptModule):
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
        or weight.layout is not torch.strided
        or weight.dim() != 2  # what an offloader puts in its place
    ):
        return False
    is_linear = isinstance(layer, torch.nn.Linear)
    num_rows, num_columns = weight.shape if is_linear else reversed(weight.shape)
    is_large = _part_rows(num_rows, num_columns, torch.get_num_threads(), _LARGE_PART) is not None
    is_in_parts = is_large and weight.dtype is torch.float32
    return is_in_parts or (is_linear and _fits_kernel(num_rows, num_columns, weight.dtype))
