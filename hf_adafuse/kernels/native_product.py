"""The product of a weight and a few vectors by the kernel in native_product.c, where it was built on installing."""

from __future__ import annotations

import ctypes
import functools
import sysconfig
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

logger = logging.get_logger(__name__)

# As many as the kernel has room for.
MAX_TOKENS = 128
_ROW_BLOCK = 16
_COLUMN_MULTIPLE = 16
# What weights may be of, and the kernel's name for it.
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# ABI version of the compiled kernel. A library built from older sources has another number and is not loaded.
_FUNCTION = "native_product_2"


def kernel_name() -> str | None:
    """The instruction set of the kernel in use, as setup.py names it; `None` where none was built for this machine."""
    return None if _kernel() is None else _capability()


def can_multiply(num_rows: int, num_columns: int, dtype: torch.dtype = torch.float32) -> bool:
    """Whether there is a kernel, and it can multiply by contiguous weights of this shape and precision."""
    does_fit = num_rows >= _ROW_BLOCK and num_columns % _COLUMN_MULTIPLE == 0 and dtype in _KINDS
    return does_fit and _kernel() is not None


def product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """
    `inputs @ weight.T + bias`, without a gradient, of ordinary tensors on CPU, all of one dtype. It is summed in
    float32 and rounded once; the bits for one vector do not depend on the others.

    Args:
        inputs: of shape `(..., in)`: at most `MAX_TOKENS` vectors.
        weight: of shape `(out, in)`, contiguous, such that the kernel `can_multiply` by it.
        bias: of shape `(out,)`.
    """
    kernel, vectors = _kernel(), inputs.contiguous().float()
    num_rows, num_columns = weight.shape
    num_tokens = inputs.numel() // num_columns
    assert kernel is not None
    assert num_tokens <= MAX_TOKENS
    outputs = inputs.new_empty(*inputs.shape[:-1], num_rows)
    added = None if bias is None else bias.contiguous().float()
    addresses = weight.data_ptr(), vectors.data_ptr(), None if added is None else added.data_ptr(), outputs.data_ptr()
    kernel(*addresses, num_rows, num_columns, num_tokens, _KINDS[weight.dtype], torch.get_num_threads())
    return outputs


def _capability() -> str:
    return torch.backends.cpu.get_cpu_capability().lower()


@functools.cache
def _kernel() -> Any:
    """The function of the library for this machine; `None` where none was built. Where torch has loaded the system's
    OpenMP, as its own builds for Linux do, the kernel's threads are those of torch."""
    name = f"kernel_{_capability()}{sysconfig.get_config_var('EXT_SUFFIX')}"
    path = Path(__file__).parent / name
    if not path.exists():
        return None
    try:
        kernel: Any = getattr(ctypes.CDLL(str(path)), _FUNCTION)
    except (OSError, AttributeError) as error:
        logger.warning(f"{name} is left out, products take longer: {error}. Install hf_adafuse anew, which builds it.")
        return None
    size, address = ctypes.c_size_t, ctypes.c_void_p
    kernel.argtypes = [address, address, address, address, size, size, size, ctypes.c_int, ctypes.c_int]
    kernel.restype = None
    return kernel
