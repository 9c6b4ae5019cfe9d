"""How much each member counts for a prompt: as the settings say, by what it made of the prompt, by what was committed.
Numbers only: knows no member, text or tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..config import AdaFuseConfig


def shares(weights: Sequence[float]) -> list[float]:
    """Weights as shares of 1."""
    total = math.fsum(weights)
    return [weight / total for weight in weights]


class MemberWeights:
    """
    The weights of the members for one prompt.

    Args:
        config (`AdaFuseConfig`): its `model_weights`, `prompt_sharpness` and `online_rate`.
        prompt_nlls (`list[float]`): per member, its NLL of the prompt, or of the answers in it, in nats per byte; used
            for `model_weights` that are named, like `"prompt"`: the weights are the softmax of minus these, times the
            sharpness (PackLLM, arXiv 2404.11531; of the answers: this project). NaN where there is no such text for a
            member: then all count alike.
        num_members (`int`)
    """

    def __init__(self, config: AdaFuseConfig, prompt_nlls: Sequence[float] | None, num_members: int) -> None:
        self._rate = config.online_rate
        self._given: list[float] | None = None
        if isinstance(config.model_weights, str):
            known = prompt_nlls if prompt_nlls and not any(map(math.isnan, prompt_nlls)) else [0.0] * num_members
            self._logs = [-config.prompt_sharpness * nll for nll in known]
        else:
            self._given = list(config.model_weights or [1.0] * num_members)
            self._logs = [math.log(weight) for weight in self._given]

    @property
    def weights(self) -> list[float]:
        """Positive."""
        if self._given is not None and not self._rate:
            return self._given
        largest = max(self._logs)
        return [max(math.exp(value - largest), 1e-300) for value in self._logs]

    def update(self, nlls: Sequence[float | None], num_bytes: int) -> None:
        """
        Count each member by how it took what has been committed: its weight is multiplied by exp(-rate x NLL per byte).

        Args:
            nlls (`list[float]`): per member, the sum of the NLL of what was committed, in nats; `None`: not known.
            num_bytes (`int`): of it.
        """
        if self._rate and num_bytes:
            known = [nll for nll in nlls if nll is not None and nll < math.inf]
            mean = sum(known) / len(known) if known else 0.0  # who has not scored it stays where the others are
            self._logs = [
                log - self._rate * (nll if nll is not None and nll < math.inf else mean) / num_bytes
                for log, nll in zip(self._logs, nlls, strict=True)
            ]


class PromptWeights:
    """
    The weights of the members for each prompt of a call.

    Args:
        config (`AdaFuseConfig`), num_members (`int`): as of [`MemberWeights`].
        prompt_nlls (`list[list[float]]`): per member and prompt, as of [`MemberWeights`]; grows as prompts are read;
            empty where no weight follows from it.
    """

    def __init__(self, config: AdaFuseConfig, prompt_nlls: Sequence[Sequence[float]], num_members: int) -> None:
        self._config = config
        self._prompt_nlls = prompt_nlls
        self._num_members = num_members
        self._of: dict[int, MemberWeights] = {}

    def of(self, prompt_index: int) -> MemberWeights:
        """Those for a prompt that has been read."""
        if prompt_index not in self._of:
            nlls = [of_member[prompt_index] for of_member in self._prompt_nlls]
            self._of[prompt_index] = MemberWeights(self._config, nlls, self._num_members)
        return self._of[prompt_index]
