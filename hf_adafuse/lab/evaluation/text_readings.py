"""Reads given texts with one member, in this process or behind a server: their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...members.model_handle import ModelHandle
from ...servers.queries import Query
from ...servers.served_model import ServedModel
from ...trees.model_call import ModelCall

# The most logits of one pass. In float32 they take 1 GiB.
_MOST_LOGITS = 2**28


@dataclass
class Reading:
    """
    A text as a member reads it.

    Attributes:
        ids (`list[int]`): the continuation's tokens.
        log_probs (`list[float]`): the log-probability of each token, in nats.
        is_greedy (`bool`): whether each token is the most likely one in its place.
    """

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    is_greedy: bool = True


def read(
    handle: ModelHandle,
    call: ModelCall,
    pairs: Sequence[tuple[list[int], list[int]]],
    with_greedy: bool = True,
) -> list[Reading]:
    """
    Read continuations with a member.

    Args:
        handle (`ModelHandle`): the member.
        call (`ModelCall`): calls its model.
        pairs (`list[tuple[list[int], list[int]]]`): the ids of each context and of its continuation. A context that is
            too long loses its beginning.
        with_greedy (`bool`, *optional*, defaults to `True`): whether `is_greedy` is needed. A server is asked for that
            in requests of its own.

    Returns:
        `list[Reading]`: the reading of each continuation.

    Raises:
        ValueError: a continuation is longer than the model's context.
        ServerError: the member's server gives no usable answer.
    """
    rows = [_cut(handle, context, continuation) for context, continuation in pairs]
    if not handle.is_local:
        return _ask(handle.model, rows, with_greedy)
    order = sorted((index for index, row in enumerate(rows) if row[1]), key=lambda index: -len(rows[index][0]))
    readings = [Reading() for _ in rows]
    size = int(handle.model.config.get_text_config().vocab_size)
    while order:
        width = len(rows[order[0]][0])
        kept = max(width - len(rows[i][0]) + rows[i][1] for i in order)
        # Where the rotary frequencies depend on a text's length, each text has a pass of its own.
        most = 1 if handle.frequency_switch else max(1, _MOST_LOGITS // (kept * size))
        batch = order[:most]
        order = order[most:]
        found = _run(handle, call, [rows[index] for index in batch])
        for index, reading in zip(batch, found, strict=True):
            readings[index] = reading
    return readings


def most_continued(handle: ModelHandle) -> int | None:
    """The most tokens of a continuation behind one token of context; `None`: any number."""
    limit = handle.trained_length
    # A server reads the last token, too, although nothing follows it.
    return limit if limit is None or handle.is_local else limit - 1


@torch.no_grad()
def _run(handle: ModelHandle, call: ModelCall, rows: Sequence[tuple[list[int], int]]) -> list[Reading]:
    """Read texts in one forward pass. They are padded on the right, where causal models do not see it. A row holds the
    ids of a text, and how many of them are the continuation."""
    inputs = [ids[:-1] for ids, _ in rows]
    width = max(map(len, inputs))
    batch = torch.tensor([ids + [0] * (width - len(ids)) for ids in inputs], device=handle.device)
    first = min(len(ids) - 1 - count for ids, count in rows)
    logits, _ = call(batch, use_memory=False, columns=range(first, width))
    readings = []
    for (ids, count), row in zip(rows, logits, strict=True):
        end = len(ids) - 1
        start = end - count
        scores = row[start - first : end - first].float().log_softmax(-1)
        chosen = torch.tensor(ids[start + 1 :], device=scores.device)
        values: list[float] = scores.gather(-1, chosen[:, None])[:, 0].tolist()
        readings.append(Reading(ids[-count:], values, bool((scores.argmax(-1) == chosen).all())))
    return readings


def _ask(model: ServedModel, rows: Sequence[tuple[list[int], int]], with_greedy: bool) -> list[Reading]:
    """Have a server read texts; as of [`_run`]."""
    values = model.prompt_log_probs([ids if count else [] for ids, count in rows])
    readings = [
        Reading(ids[len(ids) - count :], of_row[len(of_row) - count :])
        for (ids, count), of_row in zip(rows, values, strict=True)
    ]
    left = [
        (reading, ids, count) for reading, (ids, count) in zip(readings, rows, strict=True) if with_greedy and count
    ]
    while left:  # a server may end a greedy walk early: go on from there
        walks = model.ask([Query(tuple(ids[: len(ids) - count]), (), count) for _, ids, count in left], 1)
        begun = left
        left = []
        for (reading, ids, count), steps in zip(begun, walks, strict=True):
            own = [step.chosen for step in steps]
            reading.is_greedy = own == ids[len(ids) - count :][: len(own)]
            if reading.is_greedy and len(own) < count:
                left.append((reading, ids, count - len(own)))
    return readings


def _cut(handle: ModelHandle, context: list[int], continuation: list[int]) -> tuple[list[int], int]:
    """The ids of both, as many as the member can read, and how many of them are the continuation."""
    limit = most_continued(handle)
    if limit is not None and len(continuation) > limit:
        raise ValueError(
            f"A continuation must be at most {limit} tokens of {handle.name} (its context), but is "
            f"{len(continuation)}. Shorten it, or leave that member out."
        )
    whole = [*context, *continuation]
    return whole if limit is None else whole[-limit - 1 :], len(continuation)
