"""`Clock`: times each candidate over a few tokens, one prompt at a time, for the paper's Figure 5.

Times that are known are not taken again, also after a kill.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...demo.paired import Mean, mean
from ...generation import disable_adafuse
from ...members.prompt_inputs import pad_left
from ..benchmarks.contenders import Ensemble, Prompts
from ..benchmarks.instruments import timed
from ..benchmarks.report import machine
from ..evaluation.candidates import Contestant
from ..evaluation.contexts import prompt_rows
from ..evaluation.responses import Responses
from .values import slug

NEW_TOKENS = 10
WARM_UPS = 2
Seconds = dict[str, float]  # the seconds of each candidate, by its `slug`


@dataclass(frozen=True)
class Timing:
    """
    The time that a candidate took.

    Attributes:
        seconds (`Mean`): the seconds per prompt.
        ratio (`Mean`): the seconds over those of all members alone in turn, prompt by prompt.
        tokens_per_second (`float`): the new tokens per second, over all prompts.
    """

    seconds: Mean
    ratio: Mean
    tokens_per_second: float


class Clock:
    """
    Members that are timed.

    Args:
        members (`list[tuple]`): each member's model and tokenizer, the main model's first. They are not changed.
        candidates (`list[Contestant]`): what is timed. Every member alone is among them, and ensembles of all members.
        known (`Responses`): the times that were taken before, by prompt, candidates and `conditions`.
        on_prompts (`Callable`): told how many prompts were timed, and whether their times were known.

    Attributes:
        conditions (`dict`): what times depend on beside that: the machine, how many of each member's tensors lie on
            which device, and torch's version.
    """

    def __init__(
        self,
        members: Sequence[tuple[Any, Any]],
        candidates: Sequence[Contestant],
        known: Responses,
        on_prompts: Callable[[int, bool], None] = lambda number, known: None,
    ) -> None:
        # The models are ordinary ones: `Ensemble` enables AdaFuse on copies of its own.
        self._ensemble = Ensemble([(disable_adafuse(copy.copy(model)), tokenizer) for model, tokenizer in members])
        self._ensemble.meter.is_on = False  # to time a pass it waits for the GPU, which lengthens the call
        self.conditions = {name: value for name, value in machine().items() if name != "load"} | {
            "weights": [Counter(str(one.device) for one in model.parameters()) for model, _ in members],
            "torch": torch.__version__,
        }
        self._candidates = list(candidates)
        self._known = known
        self._on_prompts = on_prompts
        self._is_warm = False

    def time(self, prompts: Sequence[str]) -> list[Seconds]:
        """For each prompt, the seconds of each candidate."""
        return [self._time(prompt) for prompt in prompts]

    def _time(self, prompt: str) -> Seconds:
        # With other candidates all times are taken anew: what changes on the machine must change all of them alike.
        key = (prompt, sorted(map(slug, self._candidates)), self.conditions)
        seconds: Seconds | None = self._known.get("seconds", key)
        self._on_prompts(1, seconds is not None)
        if seconds is None:
            for _ in range(0 if self._is_warm else WARM_UPS):
                self._each(prompt)
            self._is_warm = True
            seconds = self._each(prompt)
            self._known.add("seconds", key, seconds)
        return seconds

    def _each(self, prompt: str) -> Seconds:
        return {slug(candidate): self._run(candidate, prompt) for candidate in self._candidates}

    def _run(self, candidate: Contestant, prompt: str) -> float:
        ensemble = self._ensemble
        config = candidate.config
        prompts = self._rows(prompt)
        if config is None:
            (member,) = candidate.members
            return timed(ensemble.device, lambda: ensemble.run_alone(member, prompts[member], NEW_TOKENS))[0]
        others = [
            pad_left(rows, one.tokenizer).to(one.device)
            for rows, one in zip(prompts[1:], ensemble.handles[1:], strict=True)
        ]
        options = {"assistant_inputs": others, "min_new_tokens": NEW_TOKENS}
        return timed(ensemble.device, lambda: ensemble.generate(prompts, config, NEW_TOKENS, **options))[0]

    def _rows(self, prompt: str) -> Prompts:
        """Each member's own ids of a prompt. Where they are too long for it, their beginning is cut off, as in
        `AdaFuseLM`."""
        handles = self._ensemble.handles
        rows = prompt_rows(prompt, [one.tokenizer for one in handles])
        rooms = [None if one.trained_length is None else one.trained_length - NEW_TOKENS for one in handles]
        return [[ids if room is None else ids[-room:]] for ids, room in zip(rows, rooms, strict=True)]


def summarize(taken: Sequence[Mapping[str, float]], candidates: Sequence[Contestant]) -> dict[Contestant, Timing]:
    """The means over prompts of what [`Clock.time`] returns."""
    own = [sum(seconds[slug(one)] for one in candidates if one.is_alone) for seconds in taken]
    found = {}
    for candidate in candidates:
        each = [seconds[slug(candidate)] for seconds in taken]
        ratios = [mine / whole for mine, whole in zip(each, own, strict=True)]
        found[candidate] = Timing(mean(each), mean(ratios), NEW_TOKENS * len(each) / sum(each) if each else math.nan)
    return found
