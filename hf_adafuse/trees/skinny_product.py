"""The product of a weight and a few vectors by the kernel in skinny_product.c, where installing the package built it.
Knows no layer and no other way to multiply.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

# As many as the kernel has room for.
MAX_TOKENS = 128
_ROW_BLOCK, _COLUMN_MULTIPLE = 16, 16


def kernel_name() -> str | None:
    """The instruction set of the kernel in use, as setup.py names it; `None` where none was built for this machine."""
    return None if _kernel() is None else _capability()


def can_multiply(num_rows: int, num_columns: int) -> bool:
    """Whether there is a kernel, and it can multiply by contiguous weights of this shape."""
    return num_rows >= _ROW_BLOCK and num_columns % _COLUMN_MULTIPLE == 0 and _kernel() is not None


def product(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """
    `inputs @ weight.T`, without a gradient, of tensors on CPU in float32.

    Args:
        inputs: of shape `(..., in)`: at most `MAX_TOKENS` vectors.
        weight: of shape `(out, in)`, contiguous, such that the kernel `can_multiply` by it.
    """
    kernel, inputs = _kernel(), inputs.contiguous()
    assert kernel is not None
    num_rows, num_columns = weight.shape
    outputs = inputs.new_empty(*inputs.shape[:-1], num_rows)
    addresses = weight.data_ptr(), inputs.data_ptr(), outputs.data_ptr()
    kernel(*addresses, num_rows, num_columns, inputs.numel() // num_columns, torch.get_num_threads())
    return outputs


def _capability() -> str:
    return torch.backends.cpu.get_cpu_capability().lower()


@functools.cache
def _kernel() -> Callable[..., None] | None:
    """Of the library for this machine. Its threads are those of torch, which has loaded the same OpenMP."""
    found = sorted(Path(__file__).parent.glob(f"_skinny_product_{_capability()}.*so"))
    if not found:
        return None
    kernel = ctypes.CDLL(str(found[-1])).skinny_product
    size, address = ctypes.c_size_t, ctypes.c_void_p
    kernel.argtypes = [address, address, address, size, size, size, ctypes.c_int]
    kernel.restype = None
    return kernel
