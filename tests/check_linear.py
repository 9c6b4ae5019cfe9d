"""Times linear layers over few tokens, in the quickest way and as PyTorch has them. Run by hand on a quiet machine.

python tests/check_linear.py --threads 1 --dtype bfloat16
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from hf_adafuse.kernels.small_batch_linear import linear

SHAPES = [(576, 576), (768, 768), (1536, 576), (640, 2048), (768, 3072), (3072, 768), (4096, 4096), (4096, 14336)]
VOCABULARIES = [(32001, 2048), (49152, 576), (50257, 768), (151936, 1024), (262144, 640)]
NUM_TOKENS = [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64, 128]


def timed(product: Callable[..., torch.Tensor], inputs: torch.Tensor, weights: list[torch.Tensor]) -> float:
    start = time.perf_counter()
    for weight in weights:
        product(inputs, weight)
    return (time.perf_counter() - start) / len(weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    print("rows x columns: tokens: milliseconds in the quickest way (over those of F.linear)")
    for shape in SHAPES + VOCABULARIES:
        # More than a processor's caches hold: in a model each weight comes from memory.
        weights = [torch.randn(shape).to(dtype) for _ in range(max(1, 100_000_000 // (shape[0] * shape[1])))]
        found = []
        for number in NUM_TOKENS:
            inputs = torch.randn(number, shape[1]).to(dtype)
            for weight in (24 * weights)[:24]:  # each of six ways is tried four times
                linear(inputs, weight)
            pairs = [[timed(one, inputs, weights) for one in (linear, F.linear)] for _ in range(args.repeats)]
            quickest, whole = map(statistics.median, zip(*pairs, strict=True))
            found.append(f"{number}: {1000 * quickest:.3g} ({quickest / whole:.2f})")
        print(f"{shape[0]} x {shape[1]}: {', '.join(found)}", flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
