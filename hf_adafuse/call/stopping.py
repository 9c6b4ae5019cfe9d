"""Asks the stopping criteria of a call after each committed token, as the ordinary loop of `generate()` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import MaxLengthCriteria, MaxTimeCriteria

from ..decoding.progress import Prompt
from ..members.stateful_processors import LiveCopy, check_copyable, is_of_transformers, is_per_row, is_stateful
from ..trees.backend import as_tensor

# Criteria that end a text wherever it is.
_LIMITS = (MaxLengthCriteria, MaxTimeCriteria)


class StopCheck:
    """
    The stopping criteria of a call.

    A prompt alone asks the caller's own objects, in the order of the ordinary loop. In a batch prompts come to each
    length at different times: criteria that may be made for the batch are asked with as many rows as it has, all of
    them one prompt's, and those that remember earlier calls are copied for each prompt. transformers' own are asked on
    the host: nobody waits for a device then.

    Args:
        criteria (`list`): the stopping criteria of the call.
        num_prompts (`int`): the number of prompts of the call.
        device (`torch.device`): of the ids.
        with_scores (`bool`): whether they are given the scores of each new token.

    Raises:
        ValueError: one that remembers earlier calls cannot be copied.
    """

    def __init__(self, criteria: Sequence[Any], num_prompts: int, device: torch.device, with_scores: bool) -> None:
        self._device = device
        self._with_scores = with_scores
        self._num_prompts = num_prompts
        if num_prompts > 1:
            check_copyable([one for one in criteria if is_stateful(one)], "stopping_criteria")
        self._criteria = [[self._own(one) for one in criteria] for _ in range(num_prompts)]

    def __call__(self, prompt: Prompt, row: int | None = None) -> str | None:
        """
        Why the prompt stops: `"length"` where only the most tokens or seconds of the call are reached, `"stop"` where
        another criterion says so; `None` where it goes on. Each criterion that `prompt.asks` names is asked, as
        in the ordinary loop.

        Args:
            prompt (`Prompt`): the prompt whose text is checked.
            row (`int`, *optional*): which of the prompts of the call it is; by default its index.
        """
        row = prompt.index if row is None else row
        ids = torch.tensor([prompt.ids], device="cpu")
        reasons = set[str]()
        for criterion, num_rows in self._criteria[row]:
            if prompt.asks != "all" and (prompt.asks == "time") != isinstance(criterion, MaxTimeCriteria):
                continue
            scores = tuple(one.expand(num_rows, -1) for one in prompt.scores) if self._with_scores else None
            rows = ids if is_of_transformers(type(criterion)) else ids.to(self._device)
            rows = rows if num_rows == 1 else rows.repeat(num_rows, 1)
            if _answer(criterion(rows, scores), row):
                reasons.add("length" if isinstance(criterion, _LIMITS) else "stop")
        if "stop" in reasons:
            return "stop"
        return "length" if reasons else None

    def _own(self, criterion: Any) -> tuple[Any, int]:
        """What a prompt asks in the place of a criterion, and with how many rows."""
        if self._num_prompts > 1 and is_stateful(criterion):
            return LiveCopy(criterion), self._num_prompts
        return criterion, self._num_prompts if is_per_row(criterion) else 1


def _answer(result: Any, row: int) -> bool:
    """What a criterion says of a row: it may return one value for all."""
    values = as_tensor(result).flatten()
    return bool(values[row] if len(values) > row else values.all())
