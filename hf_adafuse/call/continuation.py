"""The cache that a call returns, and what a later call takes from it to go on as one longer call would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..decoding.progress import Prompt, State
from ..host_internals import takes_keys
from ..members.member import Member
from ..members.participants import Participant
from ..trees.adapters import weak_reference
from ..trees.kv_cache import AdaFuseCache, KeysValues, join_rows, make_cache
from ..trees.model_call import ModelCall


def final_cache(sequences: torch.Tensor, members: list[Member], prompts: list[Prompt]) -> AdaFuseCache | None:
    """The main model's keys and values in the columns of `sequences[:, :-1]`, and the assistants' beside them."""
    if not takes_keys(ModelCall(members[0].model).memory):
        return None  # `generate()` would not take it
    width = sequences.shape[1] - 1
    starts, rows = [], []
    for prompt in prompts:
        ids, layers = prompt.states[0]
        num_ids = len(ids) + (1 if prompt.rounds and prompt.rounds[-1].ends else 0)
        start = len(prompt.ids) - num_ids
        starts.append(start)
        rows.append([(keys[:, :, : width - start], values[:, :, : width - start]) for keys, values in layers or []])
    cache = AdaFuseCache()
    make_cache(join_rows(rows, starts, width), cache)
    cache.sequences = sequences.cpu().clone()
    if all(committed.is_whole for prompt in prompts for committed in prompt.rounds):
        cache.assistants = [
            (weak_reference(member.model), member.vocabulary.fingerprint, [prompt.states[index] for prompt in prompts])
            for index, member in enumerate(members[1:], start=1)
        ]
    return cache


def goes_on(past: Any, input_ids: torch.Tensor) -> bool:
    """Whether a call goes on where the one that returned `past` has stopped."""
    return isinstance(past, AdaFuseCache) and past.belongs_to(input_ids)


def assistant_states(
    past: Any, input_ids: torch.Tensor, participants: Sequence[Participant]
) -> dict[int, tuple[list[list[int]], KeysValues | None]]:
    """By member index, the ids and the cache of each assistant that took part in the call that returned `past`."""
    if not goes_on(past, input_ids):
        return {}
    found = {}
    for index, participant in enumerate(participants[1:], start=1):
        states = past.states_of(index - 1, participant.model, participant.vocabulary.fingerprint)
        if states is not None:
            found[index] = _resume(states)
    return found


def _resume(states: list[State]) -> tuple[list[list[int]], KeysValues | None]:
    """An assistant's ids, and left-padded keys and values, if any, that end as far from the end in each row."""
    rows = [ids for ids, _ in states]
    known = [(ids, layers) for ids, layers in states if layers is not None]
    if not known:
        return rows, None
    left = max(1, *[len(ids) - layers[0][0].shape[2] for ids, layers in known])
    width = max(map(len, rows))
    cached = [
        [(keys[:, :, : len(ids) - left], values[:, :, : len(ids) - left]) for keys, values in layers]
        for ids, layers in known
    ]
    return rows, join_rows(cached, [width - len(ids) for ids in rows], width - left)
