"""Token trees of models that take neither a 4-D mask nor a cache: every pass reads whole sequences again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .backend import Backend, Counted, log_probs_of, to_device
from .kv_cache import KeysValues
from .model_call import ModelCall
from .nodes import Node, leaves_of, missing_nodes


class UncachedBackend(Backend):
    """The trees of a batch of prompts under a model that remembers nothing; see [`Backend`] for the arguments."""

    keeps_keys = can_prefetch = False

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model, device)
        self._call = ModelCall(model)
        self._keeps_log_probs = False

    @torch.no_grad()
    def prefill(
        self,
        prompts: list[list[int]],
        cache: KeysValues | None = None,
        counted: Counted = (),
        can_share: bool = True,
    ) -> list[Node]:
        """Read the prompts in one forward pass; returns the roots, one per prompt. There is no `cache`."""
        self._plant(prompts)
        roots = [tree.root for tree in self.trees]
        self._keeps_log_probs = any(counted)
        try:
            return self._read(roots, roots)
        finally:
            self._keeps_log_probs = False

    @torch.no_grad()
    def run(self, nodes: Iterable[Node]) -> list[Node]:
        """Run these nodes, and those above them, in one forward pass; returns the newly computed nodes."""
        missing = missing_nodes(nodes)
        return self._read(missing, leaves_of(missing)) if missing else []

    def _read(self, nodes: list[Node], leaves: list[Node]) -> list[Node]:
        """Run the nodes: each leaf's whole sequence is a row of the batch, padded on the right, where nothing looks."""
        sequences = [self.trees[leaf.prompt_index - self.first_index].ids_to(leaf) for leaf in leaves]
        width = max(map(len, sequences))
        ids = to_device([ids + [0] * (width - len(ids)) for ids in sequences], self.device)
        positions = torch.arange(width, device=self.device).expand_as(ids)
        logits, _ = self._call(ids, positions, use_memory=False)
        self.num_forwards += 1
        self.num_tokens += sum(map(len, sequences))
        if self._keeps_log_probs:
            rows = log_probs_of(logits[:, :-1], ids[:, 1:]).tolist()
            self.prompt_log_probs = [row[: len(ids) - 1] for row, ids in zip(rows, sequences, strict=True)]
        entry_of = {id(node): entry for entry, leaf in enumerate(leaves) for node in leaf.lineage()}
        places = [(entry_of[id(node)], node.position) for node in nodes]
        entries, offsets = to_device(places, logits.device).unbind(1)
        return self._store(nodes, logits[entries, offsets])
