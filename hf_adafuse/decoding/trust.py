"""How much each member counts for a prompt: as the settings say, by what it made of the prompt, by what was committed.
Numbers only: knows no text or tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..config import AdaFuseConfig
from ..members.member import PromptNll


class Trust:
    """
    The weights of the members for one prompt.

    Args:
        config (`AdaFuseConfig`): its `model_weights`, `prompt_sharpness`, `prompt_evidence` and `online_rate`.
        prompt_nlls (`list[PromptNll]`): per member, what it made of the prompt; used for `model_weights="prompt"`: the
            weights are the softmax of minus its NLL per byte, times the sharpness (PackLLM, arXiv 2404.11531), times
            n^2 / (n^2 + e^2) for a prompt of n bytes. NaN where a member's prompt has no text: then all count alike.
        num_members (`int`)
    """

    def __init__(self, config: AdaFuseConfig, prompt_nlls: Sequence[PromptNll] | None, num_members: int) -> None:
        self._rate = config.online_rate
        self._given: list[float] | None = None
        if isinstance(config.model_weights, str):
            known = prompt_nlls if prompt_nlls and not any(math.isnan(nll.per_byte) for nll in prompt_nlls) else []
            sharpness = config.prompt_sharpness * _share(min((nll.num_bytes for nll in known), default=0), config)
            self._logs = [-sharpness * nll.per_byte for nll in known] or [0.0] * num_members
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


def _share(num_bytes: int, config: AdaFuseConfig) -> float:
    """How much of the sharpness a prompt of so many bytes deserves."""
    return num_bytes**2 / (num_bytes**2 + config.prompt_evidence**2) if num_bytes else 0.0
