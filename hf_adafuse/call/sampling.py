"""Whether a call asks for sampling, with which settings, and how a member's tokens are drawn.

Most chat models have `do_sample=True` in their own generation config. So the call counts here, and the model's own
generation config does not.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from ..config import AdaFuseConfig
from ..transformers_compat import PIPELINES_PASS_A_CONFIG, make_processors, set_prepared_eos_ids

logger = logging.get_logger(__name__)

# The settings that a distribution is warped by before a token is drawn from it.
SETTINGS = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
# As in transformers, where nothing else is said.
_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
# At this temperature and below a member's tokens are not drawn: its most likely ones are taken. Where that holds for
# all members, the heaviest one's words are.
GREEDY_TEMPERATURE = 0.01


@dataclass(frozen=True)
class SamplingRequest:
    """
    Whether a call asks for sampling, and with which settings.

    Args:
        do_sample (`bool`): whether it asks for it.
        settings (`dict`): of `SETTINGS`, those that it names.
    """

    do_sample: bool
    settings: Mapping[str, Any]

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely tokens are taken, even where words are sampled."""
        temperature = self.settings.get("temperature")
        return temperature is not None and temperature <= GREEDY_TEMPERATURE

    def under(self, config: AdaFuseConfig) -> bool:
        """Whether words are sampled with these settings of an ensemble, which count before the call."""
        return self.do_sample if config.do_sample is None else config.do_sample


@dataclass(frozen=True)
class Warper:
    """
    How a member's tokens are drawn: its logits processors for sampling, or greedily.

    Args:
        processors (`list[LogitsProcessor]`): warp its scores before.
        is_greedy (`bool`): whether they are not drawn: the most likely ones are taken.
    """

    processors: Sequence[Any]
    is_greedy: bool

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """`scores` of shape `(1, vocab_size)`, warped; none of the processors looks at the ids."""
        for processor in self.processors:
            scores = processor(None, scores)
        return scores


def requested_sampling(call: Mapping[str, Any], generation_config: Any, own: Any) -> SamplingRequest:
    """
    Whether a call asks for sampling, and with which settings.

    Args:
        call (`dict`): its arguments.
        generation_config (`GenerationConfig`, *optional*): the one passed to it. One that says of sampling what the
            model's own says is taken for a copy of that, and asks for nothing.
        own (`GenerationConfig`): the model's own.
    """
    names = ("do_sample", *SETTINGS)
    passed = {name: getattr(generation_config, name, None) for name in names}
    if passed == {name: getattr(own, name, None) for name in names}:
        passed = {}
    given = {**passed, **{name: call[name] for name in names if call.get(name) is not None}}
    settings = {name: given[name] for name in SETTINGS if given.get(name) is not None}
    return SamplingRequest(bool(given.get("do_sample")), settings)


def warn_of_a_pipelines_default(call: Mapping[str, Any], generation_config: Any, own: Any, is_bound: bool) -> None:
    """
    Warn once that a call asks for sampling, where a pipeline of transformers may have written `do_sample=True` into it:
    pipelines do where the model's generation config says nothing. They pass no tokenizer.

    Args:
        call, generation_config, own: as of [`requested_sampling`].
        is_bound (`bool`): whether anything is bound to the model.
    """
    may_be_argument = not is_bound and getattr(own, "do_sample", None) is None and call.get("tokenizer") is None
    may_be_config = PIPELINES_PASS_A_CONFIG and call.get("do_sample") is None
    if (may_be_argument or may_be_config) and requested_sampling(call, generation_config, own).do_sample:
        logger.warning_once(
            "Words are sampled, because the call says `do_sample=True`. A pipeline of transformers says so by itself "
            "where nothing else is said: pass `do_sample=False` for the greedy text, or bind the ensemble to the model "
            "by `enable_adafuse`."
        )


class RandomNumbers(Iterator[float]):
    """
    Random numbers from 0 to 1 that are determined by a name.

    Args:
        name (`str`): the seed of the generator.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._generator = random.Random(name)

    def __next__(self) -> float:
        return self._generator.random()

    def branch(self, *numbers: int) -> RandomNumbers:
        """Further random numbers, determined by the name and these numbers alone. What has been drawn already makes no
        difference."""
        return RandomNumbers(f"{self._name} {numbers}")


def random_streams(prompts: list[list[int]]) -> list[RandomNumbers]:
    """
    Per prompt, random numbers from 0 to 1. They follow from torch's seed, the prompt, and how often the same prompt
    came before in the batch. So a prompt gives the same text alone and in a batch.

    Args:
        prompts (`list[list[int]]`): the main model's ids of each.
    """
    seed = int(torch.randint(2**62, (), device="cpu"))
    streams = []
    seen: Counter[tuple[int, ...]] = Counter()
    for ids in map(tuple, prompts):
        streams.append(RandomNumbers(f"{seed} {ids} {seen[ids]}"))
        seen[ids] += 1
    return streams


def warper_of(helper: Any, own: Any, asked: Mapping[str, Any], device: torch.device) -> Warper:
    """
    How a member's tokens are drawn: by the settings of the call, and by the member's own where the call names none.

    Args:
        helper (`PreTrainedModel`): any, with the methods of `generate()`.
        own (`GenerationConfig`, *optional*): the member's.
        asked (`dict`): the settings of the call.
        device (`torch.device`): of the scores.

    Raises:
        ValueError: a setting is out of its range.
    """
    settings: dict[str, Any] = dict(_DEFAULTS)
    for name in SETTINGS:
        value = asked.get(name, getattr(own, name, None))
        if value is not None:
            settings[name] = value
    if 0 <= settings["temperature"] <= GREEDY_TEMPERATURE:
        return Warper([], True)
    config = GenerationConfig(do_sample=True, num_beams=1, **settings)
    set_prepared_eos_ids(config, [], device)
    return Warper(make_processors(helper, config, [0], device), False)
