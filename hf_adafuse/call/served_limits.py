"""Refuses, before the first request, settings that a member behind a server cannot honour. A server returns
log-probabilities of some tokens only, and no logits processor of ours acts there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..config import AdaFuseConfig
from ..decoding.strategies.strategy import SpanStrategy
from ..members.model_handle import ModelHandle


def check_served_settings(
    handles: Sequence[ModelHandle], strategy: Any, config: AdaFuseConfig, samples: bool, has_grammar: bool
) -> None:
    """
    Raises:
        ValueError: settings that need more of a member behind a server than it can give.
    """
    served = next((one for one in handles if not one.is_local), None)
    if served is None:
        return
    where = f"with {served.name} behind a server"
    most = served.most_top
    if not isinstance(strategy, SpanStrategy) or strategy.needs_logits:
        raise ValueError(
            f"`method` must be one over words or answers {where}, but is {config.method!r}. Choose another, or load "
            "the model here."
        )
    if config.exploration == "beam":
        raise ValueError(f"`exploration` must be 'diverse' {where}, but is {config.exploration!r}. Leave it out.")
    if most is not None and config.num_branches > most:
        raise ValueError(f"`num_branches` must be at most {most} {where}, but is {config.num_branches}. Take fewer.")
    if samples:
        raise ValueError(f"`do_sample` must be False {where}, but is True. Leave it out.")
    if has_grammar:
        raise ValueError(f"`structured` must be left out {where}, but is given. Load the model here.")


def check_served_call(handle: ModelHandle, processors: Sequence[Any], keeps_logits: bool) -> None:
    """
    Raises:
        ValueError: logits processors, or scores in the output, of a member behind a server.
    """
    if handle.is_local:
        return
    if any(processors):
        raise ValueError(
            f"Logits processors must act on members that are loaded here, but {handle.name} is behind a server. "
            "Leave out `repetition_penalty`, `logits_processor` and the like, or load the model."
        )
    if keeps_logits:
        raise ValueError(
            f"`output_scores` and `output_logits` must be False where {handle.name} is behind a server, but one is "
            "True. Leave them out: `rounds` has the scores of words."
        )
