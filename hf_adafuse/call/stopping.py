"""Whether a prompt stops: the criteria of the call, asked after each committed token as the ordinary loop asks them.
Knows ids; no word, member or tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..decoding.progress import Prompt
from ..members.histories import LiveCopy, check_forks, has_history


class StopCheck:
    """
    The stopping criteria of a call.

    A prompt alone asks the caller's own objects, in the order of the ordinary loop. In a batch prompts come to each
    length at different times: criteria that remember earlier calls are copied for each prompt, and asked with as many
    rows as the batch has, all of them that prompt's.

    Args:
        criteria (`list`): of the call.
        num_prompts (`int`)
        device (`torch.device`): of the ids.
        with_scores (`bool`): whether they are given the scores of each new token.

    Raises:
        ValueError: one that remembers earlier calls cannot be copied.
    """

    def __init__(self, criteria: Sequence[Any], num_prompts: int, device: torch.device, with_scores: bool) -> None:
        self._device, self._with_scores, self._num_prompts = device, with_scores, num_prompts
        copied = [one for one in criteria if num_prompts > 1 and has_history(one)]
        check_forks(copied, "stopping_criteria")
        self._direct = [one for one in criteria if all(one is not other for other in copied)]
        self._copies = [[LiveCopy(one) for one in copied] for _ in range(num_prompts)]

    def __call__(self, prompt: Prompt) -> bool:
        """Whether one of them stops the prompt; all are asked, as in the ordinary loop."""
        ids = torch.tensor([prompt.ids], device=self._device)
        scores = tuple(row[None] for row in prompt.scores) if self._with_scores else None
        answers = [_answer(one(ids, scores), 0) for one in self._direct]
        copies = self._copies[prompt.index]
        if copies:
            rows = ids.expand(self._num_prompts, -1)
            if scores is not None:
                scores = tuple(row.expand(self._num_prompts, -1) for row in scores)
            answers += [_answer(one(rows, scores), prompt.index) for one in copies]
        return any(answers)


def _answer(result: Any, row: int) -> bool:
    """What a criterion says of a row: it may return one value for all."""
    values = torch.as_tensor(result).flatten()
    return bool(values[row] if len(values) > row else values.all())
