"""Calls that pass only the new ids, with a cache and the attention mask of the whole text.

Such a call is made into one with all ids. Its output is made into what the caller expects: the new ids, and what
follows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from ..transformers_compat import CACHE_NAME, given_cache, num_cached
from ..trees.kv_cache import AdaFuseCache


@dataclass(frozen=True)
class NewIds:
    """
    The new ids of a call, and all ids of its text.

    Args:
        given (`torch.LongTensor` of shape `(batch_size, num_new)`): the new ids.
        whole (`torch.LongTensor` of shape `(batch_size, sequence_length)`): all ids, these at the end.
    """

    given: torch.Tensor
    whole: torch.Tensor

    def arguments(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the call with all ids."""
        streamer = call.get("streamer")
        changed = {} if streamer is None else {"streamer": _WithoutBeginning(streamer, self.given)}
        return {**call, **changed, "input_ids": self.whole}

    def output(self, made: Any) -> Any:
        """The output that the caller expects, made of the output of the call with all ids."""
        sequences = made if isinstance(made, torch.Tensor) else made.sequences
        given = self.given.repeat_interleave(len(sequences) // len(self.given), 0)
        sequences = torch.cat([given, sequences[:, self.whole.shape[1] :]], dim=1)
        if isinstance(made, torch.Tensor):
            return sequences
        made.sequences = sequences
        return made


def read_new_ids(inputs: torch.Tensor | None, call: Mapping[str, Any]) -> NewIds | None:
    """
    The new ids of a call; `None` where it gives all ids.

    Args:
        inputs (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*), call (`dict`): of
            `generate()`.

    Raises:
        ValueError: a mask that is not of the shape of the ids, and no cache that says what comes before them.
    """
    ids = call.get("input_ids") if inputs is None else inputs
    mask = call.get("attention_mask")
    if not (isinstance(ids, torch.Tensor) and isinstance(mask, torch.Tensor) and ids.dim() == mask.dim() == 2):
        return None  # `generate()` says what is wrong with it
    if mask.shape == ids.shape:
        return None
    past = given_cache(dict(call))
    num_before = mask.shape[1] - ids.shape[1]
    if len(mask) != len(ids) or num_before < 0 or past is None:
        raise ValueError(
            f"The attention mask of `input_ids` must be of the shape of its ids {tuple(ids.shape)}, but is of shape "
            f"{tuple(mask.shape)}. Pass the tokenizer's output as it is."
        )
    before = past.sequences if isinstance(past, AdaFuseCache) else None
    if before is None or len(before) != len(ids):
        raise ValueError(
            f"`input_ids` must hold all ids of the text with AdaFuse, whose other members read it too, but hold "
            f"{ids.shape[1]} of the {mask.shape[1]} that `attention_mask` is of, and `{CACHE_NAME}` does not say which "
            f"come before them: it is {_describe_cache(past, before)}. Pass all ids, also those in the cache; they are "
            "not read again."
        )
    lengths = {before.shape[1], num_cached(past) or before.shape[1] - 1}
    if num_before not in lengths or num_before > before.shape[1]:
        expected = " or ".join(str(length + ids.shape[1]) for length in sorted(lengths))
        raise ValueError(
            f"`attention_mask` must be of {expected} columns for {ids.shape[1]} new ids after the text of "
            f"`{CACHE_NAME}`, but is of {mask.shape[1]}. Pass all ids, also those in the cache; they are not read "
            "again."
        )
    return NewIds(ids, torch.cat([before[:, :num_before].to(ids), ids], dim=1))


def _describe_cache(past: Any, before: torch.Tensor | None) -> str:
    """What kind of cache was passed, for an error; `before` are its ids, where it knows them."""
    if before is not None:
        return f"of {len(before)} rows"
    return "an AdaFuseCache whose rows were changed" if isinstance(past, AdaFuseCache) else f"a {type(past).__name__}"


class _WithoutBeginning(BaseStreamer):
    """A streamer that is told the new ids of the prompt where it would be told all of them."""

    def __init__(self, streamer: Any, given: torch.Tensor) -> None:
        self._streamer = streamer
        self._given = given
        self._is_first = True

    def put(self, value: torch.Tensor) -> None:
        self._streamer.put(self._given.cpu() if self._is_first else value)
        self._is_first = False

    def end(self) -> None:
        self._streamer.end()
