"""`LocalMember`: a member whose model runs in this process."""

from __future__ import annotations

from typing import Any

import torch

from ..trees.nodes import Node
from .logits_reader import LogitsReader
from .member import Member
from .processors import PromptProcessors


class LocalMember(Member):
    """A [`Member`] whose model runs in this process."""

    @property
    def device_key(self) -> str:
        # Autocast holds in one thread only.
        return "this thread" if torch.is_autocast_enabled(self.device.type) else str(self.device)

    def _count_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def _make_reader(self, processors: list[PromptProcessors], num_top: int) -> Any:
        def ids_to(node: Node) -> list[int]:
            return self.backend.trees[node.prompt_index].ids_to(node)

        return LogitsReader(processors, num_top, ids_to, self.eos_ids)
