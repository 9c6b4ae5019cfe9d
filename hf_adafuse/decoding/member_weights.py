"""How much each member counts for a prompt: by the settings, by what the prompt says about the members, and by each
member's NLL of the committed text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..config import AdaFuseConfig
from ..members.prompt_content import PromptEvidence

# By the measurements of docs/quality.md. Weights are min(divergence, m) ** (2 m), both in nats: members whose
# divergence is above m all make enough of the prompt. m is a nat for so many bytes of content, between these bounds.
_BYTES_PER_NAT = 40
_LEAST_NATS, _MOST_NATS = 4.0, 8.0
# In nats: a member for which it is less makes nothing of the prompt.
_LEAST_DIVERGENCE = 1e-3


def shares(weights: Sequence[float]) -> list[float]:
    """Weights as shares of 1."""
    total = math.fsum(weights)
    return [weight / total for weight in weights]


class MemberWeights:
    """
    The weights of the members for one prompt.

    Args:
        config (`AdaFuseConfig`): its `model_weights`, `prompt_sharpness` and `online_rate`.
        prompt_evidence (`list[PromptEvidence]`): per member, what the prompt says about it. Used where `model_weights`
            is a name like `"prompt"`. Where all members have an NLL, the weights are the softmax of minus these NLLs
            times `prompt_sharpness` (PackLLM, arXiv 2404.11531; by the answers: this project). Else, where all have a
            divergence, and the prompt is a chat for all or for none, the weights are min(divergence, m) ** (2 m), where
            m is the content's bytes / 40, but at least 4 and at most 8 (this project). Else all members count alike.
        num_members (`int`): the number of members.

    Attributes:
        initial (`list[float]`): how much each member counts before the text begins.
    """

    def __init__(
        self, config: AdaFuseConfig, prompt_evidence: Sequence[PromptEvidence] | None, num_members: int
    ) -> None:
        self._rate = config.online_rate
        self._given: list[float] | None = None
        if isinstance(config.model_weights, str):
            self._logs = _log_weights(prompt_evidence or [PromptEvidence()] * num_members, config.prompt_sharpness)
        else:
            self._given = list(config.model_weights or [1.0] * num_members)
            self._logs = [math.log(weight) for weight in self._given]
        self.initial = self.weights

    @property
    def weights(self) -> list[float]:
        """How much each member counts now. They are positive, and their sum need not be 1."""
        if self._given is not None and not self._rate:
            return self._given
        largest = max(self._logs)
        return [max(math.exp(value - largest), 1e-300) for value in self._logs]

    def update(self, nlls: Sequence[float | None], num_bytes: int) -> None:
        """
        Multiply the weight of each member by exp(-`online_rate` times its NLL per byte of the committed text).

        Args:
            nlls (`list[float]`): per member, the summed NLL of the committed text in nats. `None`: it is not known.
            num_bytes (`int`): the length of that text in bytes.
        """
        if self._rate and num_bytes:
            known = [nll for nll in nlls if nll is not None and nll < math.inf]
            mean = sum(known) / len(known) if known else 0.0  # who has not scored it stays where the others are
            self._logs = [
                log - self._rate * (nll if nll is not None and nll < math.inf else mean) / num_bytes
                for log, nll in zip(self._logs, nlls, strict=True)
            ]


def _log_weights(prompt_evidence: Sequence[PromptEvidence], sharpness: float) -> list[float]:
    if not any(math.isnan(one.nll) for one in prompt_evidence):
        return [-sharpness * one.nll for one in prompt_evidence]
    is_of_one_kind = len({one.ends_as_chat for one in prompt_evidence}) == 1  # else divergences cannot be compared
    if is_of_one_kind and not any(math.isnan(one.divergence) for one in prompt_evidence):
        num_bytes = min(one.content_bytes for one in prompt_evidence)
        enough = min(max(num_bytes / _BYTES_PER_NAT, _LEAST_NATS), _MOST_NATS)
        bounded = [min(max(one.divergence, _LEAST_DIVERGENCE), enough) for one in prompt_evidence]
        return [2 * enough * math.log(nats) for nats in bounded]
    return [0.0] * len(prompt_evidence)


class PromptWeights:
    """
    The weights of the members for each prompt of a call.

    Args:
        config (`AdaFuseConfig`), num_members (`int`): as of [`MemberWeights`].
        prompt_evidence (`list[list[PromptEvidence]]`): per member and prompt, as of [`MemberWeights`]. The lists grow
            as prompts are read. There are none where no weight follows from them.
    """

    def __init__(
        self, config: AdaFuseConfig, prompt_evidence: Sequence[Sequence[PromptEvidence]], num_members: int
    ) -> None:
        self._config = config
        self._prompt_evidence = prompt_evidence
        self._num_members = num_members
        self._of: dict[int, MemberWeights] = {}

    def of(self, prompt_index: int) -> MemberWeights:
        """The weights for a prompt that has been read."""
        if prompt_index not in self._of:
            evidence = [of_member[prompt_index] for of_member in self._prompt_evidence]
            self._of[prompt_index] = MemberWeights(self._config, evidence, self._num_members)
        return self._of[prompt_index]
