"""Plans calls of `generate()` without decoding them. A call that differs from an earlier one in its prompt alone is
planned from that one's plan: transformers needs more time to prepare a call than a small model for a word.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from ..config import AdaFuseConfig
from ..members.processors import PromptProcessors
from ..members.prompts import check_prompts, warn_of_damaged_prompts
from .inputs import MainInputs
from .plan import CallPlan
from .sampling import random_streams
from .stopping import StopCheck

# The arguments that hold a call's prompt, or hear of its answer. All others are the call's settings.
_OF_PROMPT = ("input_ids", "attention_mask", "assistant_inputs", "on_answer")
# Two settings of these types are equal where their `repr` is.
_PLAIN = (str, int, float, type(None), AdaFuseConfig)
# Stopping criteria that the settings determine, but for the first one, which also counts the tokens of the prompt.
_CRITERIA = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)


class UnknownPlanError(Exception):
    """There is no earlier call from whose plan this one could be planned."""


class KnownPlans:
    """The plans of earlier calls of one ensemble, by their settings. Each call had one prompt, and the members have not
    changed since."""

    MOST = 64

    def __init__(self) -> None:
        self._plans: dict[str, CallPlan] = {}

    def find(self, settings: str) -> CallPlan | None:
        return self._plans.get(settings)

    def keep(self, settings: str, plan: CallPlan) -> None:
        if len(self._plans) >= self.MOST:
            self._plans.clear()
        self._plans[settings] = plan


@dataclass
class _Planning:
    known: KnownPlans | None
    only_known: bool
    plans: list[CallPlan] = field(default_factory=list)
    settings: str | None = None  # of the call that is planned


_current: ContextVar[_Planning | None] = ContextVar("planning", default=None)


@contextmanager
def planning(known: KnownPlans | None = None, only_known: bool = False) -> Iterator[list[CallPlan]]:
    """
    Within this context a call of `generate()` with an ensemble is checked and planned, and not decoded. Its plan is
    appended to the list that the context returns, and the call returns the ids that it was given.

    Args:
        known (`KnownPlans`, *optional*): the plans of earlier calls. A call with the settings of one of them is planned
            from its plan.
        only_known (`bool`, *optional*, defaults to `False`): whether other calls raise an [`UnknownPlanError`].
    """
    current = _Planning(known, only_known)
    token = _current.set(current)
    try:
        yield current.plans
    finally:
        _current.reset(token)


def plan_from_earlier_call(call: Mapping[str, Any]) -> bool:
    """
    Within [`planning`]: plan a call from the plan of an earlier one.

    Args:
        call (`dict`): the arguments of `generate()`.

    Returns:
        whether that could be done; else the call is to be planned in full.

    Raises:
        ValueError: a prompt that a member cannot read.
        UnknownPlanError: as of [`planning`].
    """
    current = _current.get()
    if current is None or current.known is None:
        return False
    rows = _rows(call)
    current.settings = None if rows is None else _settings(call)
    before = None if current.settings is None else current.known.find(current.settings)
    if rows is None or before is None or len(rows) != len(before.members):
        if current.only_known:
            raise UnknownPlanError
        return False
    current.plans.append(_for_prompt(before, call["input_ids"], rows, call.get("on_answer")))
    return True


def record_if_only_planning(plan: CallPlan) -> bool:
    """Within [`planning`]: append a plan to the list of the context. Returns `False` outside of it, where the plan is
    to be carried out."""
    current = _current.get()
    if current is None:
        return False
    current.plans.append(plan)
    if current.known is not None and current.settings is not None and _is_repeatable(plan):
        current.known.keep(current.settings, plan)
    return True


def _rows(call: Mapping[str, Any]) -> list[list[int]] | None:
    """Each member's ids of the one prompt of a call; `None` where not all are given, or are several."""
    others = call.get("assistant_inputs")
    inputs = None if others is None else [call, *others]
    rows = []
    for one in inputs or []:
        ids, mask = one.get("input_ids"), one.get("attention_mask")
        if not isinstance(ids, torch.Tensor) or ids.shape[:-1] != (1,) or mask is None or not bool(mask.all()):
            return None
        rows.append(ids[0].tolist())
    return rows or None


def _settings(call: Mapping[str, Any]) -> str | None:
    """What a call says beside its prompt; `None` where it says more than a text tells."""
    given = {name: value for name, value in call.items() if name not in _OF_PROMPT}
    for value in given.values():
        parts = value if isinstance(value, (list, tuple)) else [value]
        if not all(isinstance(part, _PLAIN) for part in parts):
            return None
    return repr(sorted(given.items()))


def _is_repeatable(plan: CallPlan) -> bool:
    """Whether nothing else of a plan follows from the prompt than what [`_for_prompt`] makes anew."""
    members = all(
        one.handle.is_local and one.cache is None and one.images is None and not any(one.processors)
        for one in plan.members
    )
    is_one = len(plan.inputs.prompts) == 1 and plan.inputs.past is None
    return members and is_one and all(type(one) in _CRITERIA for one in plan.call.stopping_criteria)


def _for_prompt(
    plan: CallPlan, input_ids: torch.Tensor, rows: Sequence[list[int]], on_answer: Callable[..., Any] | None
) -> CallPlan:
    """The plan of the same call with another prompt, given in each member's ids."""
    for member, ids in zip(plan.members, rows, strict=True):
        check_prompts(member.handle, [ids])
    warn_of_damaged_prompts([one.handle for one in plan.members], [[ids] for ids in rows], [])
    main = rows[0]
    num_more = len(main) - len(plan.inputs.prompts[0])
    config = copy.copy(plan.call.generation_config)
    criteria = list(map(copy.copy, plan.call.stopping_criteria))
    for limit in (config, *(one for one in criteria if isinstance(one, MaxLengthCriteria))):
        limit.max_length += num_more
    made = replace(
        plan,
        members=[
            replace(member, prompts=[own], processors=[PromptProcessors([], len(own))])
            for member, own in zip(plan.members, rows, strict=True)
        ],
        inputs=MainInputs([main], [main], None, None, 0, [False]),
        call=replace(
            plan.call, input_ids=input_ids, generation_config=config, stopping_criteria=criteria, model_kwargs={}
        ),
        stop_check=StopCheck(criteria, 1, input_ids.device, plan.call.gives_scores),
        on_answer=on_answer,
    )
    return made if plan.warpers is None else replace(made, streams=random_streams([main]))
