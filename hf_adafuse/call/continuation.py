"""The cache that a call returns, and what a later call takes from it: each member goes on with its own ids, keys and
values, as in one longer call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..decoding.progress import Prompt
from ..members.member import Member
from ..members.model_handle import ModelHandle
from ..transformers_compat import takes_keys
from ..trees.adapters import model_fingerprint, weak_reference
from ..trees.kv_cache import AdaFuseCache, CachedIds, CachedText, join_rows, make_cache
from ..trees.model_call import ModelCall


def final_cache(sequences: torch.Tensor, members: list[Member], prompts: list[Prompt]) -> AdaFuseCache | None:
    """The cache that a call returns: the main model's keys and values in the columns of `sequences[:, :-1]`, and beside
    them each assistant's ids, keys and values."""
    main = members[0].model
    if not takes_keys(ModelCall(main).cache_argument):
        return None  # `generate()` would not take it
    width = sequences.shape[1] - 1
    cache = AdaFuseCache()
    rows = []
    for prompt in prompts:
        ids, layers = prompt.states[0]
        num_ids = len(ids) + (1 if prompt.rounds and prompt.rounds[-1].ends else 0)
        start = len(prompt.ids) - num_ids
        rows.append([(keys[:, :, : width - start], values[:, :, : width - start]) for keys, values in layers or []])
        num_read = rows[-1][0][0].shape[2] if rows[-1] else 0
        is_whole = all(committed.is_whole for committed in prompt.rounds)
        cache.texts.append(CachedText(prompt.ids[start:], start, num_read, len(ids), is_whole))
    make_cache(join_rows(rows, [text.start for text in cache.texts], width), cache)
    cache.sequences = sequences.cpu().clone()
    cache.set_owner(main)
    cache.assistants = [
        (weak_reference(member.model), _kind(member), [prompt.states[index] for prompt in prompts])
        for index, member in enumerate(members[1:], start=1)
    ]
    return cache


def assistant_states(past: Any, index: int, assistant: ModelHandle, num_rows: int) -> list[CachedIds] | None:
    """Per row, the ids, keys and values of assistant `index` (from 0) in the cache `past`; `None` where this assistant
    did not take part in the call that returned it."""
    if not isinstance(past, AdaFuseCache) or len(past.texts) != num_rows:
        return None
    return past.states_of(index, assistant.model, _kind(assistant))


def resume_ids(
    past: AdaFuseCache, continues_earlier_call: Sequence[bool], states: list[CachedIds], rows: list[list[int]]
) -> bool:
    """In rows that continue the text of the cache, replace the assistant's ids in `rows` by its own ids of that text.
    Returns whether all rows do."""
    resumed = [is_same and text.is_whole for is_same, text in zip(continues_earlier_call, past.texts, strict=True)]
    for row, is_resumed in enumerate(resumed):
        if is_resumed:
            rows[row] = list(states[row][0])
    return all(resumed)


def _kind(member: Member | ModelHandle) -> tuple[Any, ...]:
    """What else an assistant's ids and keys follow from, beside its model."""
    return member.vocabulary.fingerprint, model_fingerprint(member.model)
