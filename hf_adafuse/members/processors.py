"""Calls the logits processors of one prompt under one member: functions of the ids for many texts at once, stateful
ones once a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor

from .stateful_processors import CopyError, StatefulProcessor, is_stateful

# Those that let no text end before it has so many ids. A call of one looks through all of the vocabulary for the few
# tokens that it forbids: with 262,144 tokens it took a tenth of the time of decoding.
_SHORTEST: dict[type, Callable[[Any], int]] = {
    MinLengthLogitsProcessor: lambda processor: processor.min_length,
    MinNewTokensLengthLogitsProcessor: lambda processor: processor.prompt_length_to_skip + processor.min_new_tokens,
}


class ProcessorError(Exception):
    """A logits processor returned something else than scores of the right shape. The message names it."""


@dataclass(frozen=True)
class ProcessorStep:
    """
    One logits processor as it acts on one prompt.

    Args:
        processor: a function of the ids, or an object with a state.
        batch (`list[list[int]]`): the prompts it was made for, of one length, padding and all; this one alone where
            it makes no difference.
        row (`int`): which of them this prompt is.
    """

    processor: Any
    batch: list[list[int]]
    row: int = 0

    @property
    def padded_length(self) -> int:
        """The length of the prompt with its padding, as the processor sees it."""
        return len(self.batch[self.row])


class StepState(NamedTuple):
    """The state of a stateful processor after a text: its copy, the ids of its last call, and the next tokens of the
    other rows of its batch."""

    stateful: StatefulProcessor
    ids: torch.Tensor
    others: torch.Tensor


ProcessorStates = list["StepState | None"]


class PromptProcessors:
    """
    The processors of one prompt under one member.

    Args:
        steps (`list[ProcessorStep]`): in the order in which they act.
        num_prompt_tokens (`int`): the length of the prompt, without padding.

    Attributes:
        is_stateful (`bool`): whether the order and number of calls matters to one of them.
    """

    def __init__(self, steps: Iterable[ProcessorStep] = (), num_prompt_tokens: int = 0) -> None:
        self.steps = list(steps)
        self._num_prompt_tokens = num_prompt_tokens
        self.is_stateful = any(is_stateful(step.processor) for step in self.steps)

    def __bool__(self) -> bool:
        return bool(self.steps)

    def __call__(self, ids: list[list[int]], scores: torch.Tensor) -> torch.Tensor:
        """Process `scores` of shape `(num_rows, vocab_size)`; `ids` are as many texts of equal length. For processors
        that are functions of the ids."""
        scores = scores.clone()
        for step in self.steps:
            scores = _call_stateless(step, self._rows(step, ids, scores), scores)
        return scores

    def begin(self, ids: list[int], scores: torch.Tensor) -> tuple[torch.Tensor, ProcessorStates]:
        """The processed `scores`, of shape `(vocab_size,)`, after a prompt, and the state of each processor."""
        return self._follow(ids, scores, [None] * len(self.steps))

    def advance(
        self, ids: list[int], scores: torch.Tensor, states: ProcessorStates
    ) -> tuple[torch.Tensor, ProcessorStates]:
        """The processed scores after a text that is one token longer than that of `states`, and the new states."""
        return self._follow(ids, scores, states)

    def _follow(
        self, ids: list[int], scores: torch.Tensor, states: ProcessorStates
    ) -> tuple[torch.Tensor, ProcessorStates]:
        scores = scores[None].clone()
        reached: ProcessorStates = []
        for step, state in zip(self.steps, states, strict=True):
            if is_stateful(step.processor):
                scores, following = _call_stateful(step, state, ids[-1], scores)
                reached.append(following)
            else:
                scores = _call_stateless(step, self._rows(step, [ids], scores), scores)
                reached.append(None)
        return scores[0], reached

    def _rows(self, step: ProcessorStep, ids: list[list[int]], scores: torch.Tensor) -> torch.Tensor:
        """The texts as a processor sees them: after the prompt's padding."""
        padding = step.batch[step.row][: step.padded_length - self._num_prompt_tokens]
        return torch.tensor([padding + row for row in ids], device=scores.device)


def _call_stateless(step: ProcessorStep, rows: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Call a processor that is a function of the ids; with each text in as many rows as it may have been made for."""
    size = len(step.batch)
    shortest = _SHORTEST.get(type(step.processor))
    if shortest is not None and scores.is_cpu and _is_list_of_ids(step.processor.eos_token_id):
        is_long = rows.shape[-1] >= shortest(step.processor)
        return scores if is_long else _without(scores, step.processor.eos_token_id)
    if size == 1:
        return _checked(step.processor, step.processor(rows, scores), scores)
    found = []
    for ids, row in zip(rows, scores, strict=True):
        result = step.processor(ids.repeat(size, 1), row.repeat(size, 1))
        found.append(_checked(step.processor, result, row.expand(size, -1), step.row)[step.row])
    return torch.stack(found)


def _is_list_of_ids(tokens: Any) -> bool:
    """Whether it is as `generate()` makes it, where the host need not wait for it."""
    return isinstance(tokens, torch.Tensor) and tokens.is_cpu and tokens.dtype is torch.long and tokens.dim() == 1


def _without(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    is_known = (tokens >= 0) & (tokens < scores.shape[-1])
    return scores.index_fill(-1, tokens[is_known], -math.inf)


def _call_stateful(
    step: ProcessorStep, state: StepState | None, token: int, scores: torch.Tensor
) -> tuple[torch.Tensor, StepState]:
    """
    Call a processor with a state with as many rows as it was made for. The other rows cannot be those of the other
    prompts, which are at other lengths: they go on with the best token that the processor lets them have.
    """
    if state is None:
        stateful = StatefulProcessor(step.processor)
        ids = torch.tensor(step.batch, device=scores.device)
    else:
        others = state.others.clone()
        others[step.row] = token
        stateful = state.stateful
        ids = torch.cat([state.ids, others[:, None]], dim=1)
    try:
        stateful, result = stateful.after(ids, _with_others(scores, len(ids), step.row))
    except CopyError as error:
        raise ProcessorError(f"its logits processor {type(step.processor).__name__} {error}") from error.__cause__
    result = _checked(step.processor, result, scores.expand(len(ids), -1), step.row)
    return result[step.row : step.row + 1], StepState(stateful, ids, result.argmax(-1))


def _with_others(scores: torch.Tensor, num_rows: int, row: int) -> torch.Tensor:
    """The scores of a text in its row, and in the other rows without what rules tokens out for this text alone."""
    if num_rows == 1:
        return scores
    possible = scores[scores.isfinite()]
    rows = scores.clamp(min=float(possible.min()) if len(possible) else 0.0).repeat(num_rows, 1)
    rows[row] = scores[0]
    return rows


def _checked(processor: Any, result: Any, scores: torch.Tensor, row: int | None = None) -> torch.Tensor:
    """What a processor returned, in the dtype of the scores it was given."""
    name = type(processor).__name__
    if not isinstance(result, torch.Tensor):
        raise ProcessorError(f"its logits processor {name} returned {type(result).__name__}, not a tensor of scores")
    if result.shape != scores.shape:
        shapes = f"{tuple(result.shape)}, not {tuple(scores.shape)}"
        raise ProcessorError(f"its logits processor {name} returned scores of shape {shapes}")
    if (result if row is None else result[row]).amax().isnan():  # much quicker than to ask each
        raise ProcessorError(f"its logits processor {name} returned NaN")
    return result.to(dtype=scores.dtype, device=scores.device)
