"""A model's logits after prompts from which no tree grows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch

from .backend import to_device
from .model_call import ModelCall
from .static_shapes import uncompiled


@torch.no_grad()
def next_token_logits(
    call: ModelCall, device: torch.device, prompts: Sequence[Sequence[int]]
) -> Iterator[tuple[list[tuple[int, ...]], torch.Tensor]]:
    """
    Read different prompts, those of one length in one forward pass.

    Args:
        call (`ModelCall`): calls the model.
        device (`torch.device`): the device of its inputs.
        prompts (`list[list[int]]`): ids per prompt, at least one each.

    Yields:
        `tuple`: of each pass the prompts, and the logits after them, of shape `(num_prompts, vocab_size)`, in float32.

    Raises:
        ForwardError: a forward pass failed.
    """
    for _, group in itertools.groupby(sorted({tuple(ids) for ids in prompts}, key=len), key=len):
        rows = list(group)
        ids = to_device([list(row) for row in rows], device)
        positions = torch.arange(ids.shape[1], device=device).expand_as(ids)
        with uncompiled if call.is_compiled else nullcontext():
            logits, _ = call(ids, positions, use_memory=False, columns=[ids.shape[1] - 1])
        yield rows, logits[:, -1].float()
