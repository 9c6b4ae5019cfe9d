"""Trees of models that take a 4-D mask: one forward pass holds them packed. The `packed` backend, and what it shares
with `rows`. Knows no text, word or other member.

A pass holds the missing nodes of every prompt: `position_ids` are depths, and the mask lets a node see its prompt's
prefix and its own ancestors. What was committed is never run again; what hangs below it stays. Prompts share one row of
the cache, so that no pass runs filler, until there is so much text that attention to the columns of other prompts costs
more (`pass_policy`); then each has a row of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from .backend import Backend, ForwardError, log_probs_of
from .columns import Columns
from .kv_cache import KeysValues
from .model_call import ModelCall
from .nodes import Node, TokenTree, missing_nodes
from .pass_policy import Policy
from .tree_cache import TreeCache
from .tree_mask import MaskMaker

# Logits of prompts held at a time: 256 MB in float32.
_MOST_PROMPT_LOGITS = 2**26


class ColumnBackend(Backend):
    """Trees whose keys and values are kept once, in the columns of one cache; see [`Backend`] for the arguments."""

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model, device)
        self._call = ModelCall(model, is_set_up=True)
        self.most_shared_columns = Policy.most_shared_columns

    @torch.no_grad()
    def prefill(
        self, prompts: list[list[int]], cache: KeysValues | None = None, with_log_probs: bool = False
    ) -> list[Node]:
        """Read the prompts in one forward pass, or in several where their log-probabilities are asked for; see
        [`Backend`]."""
        width = max(map(len, prompts))
        pads = [width - len(ids) for ids in prompts]
        ids = torch.tensor([[0] * pad + row for pad, row in zip(pads, prompts, strict=True)], device=self.device)
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads], device=self.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        num_cached = cache[0][0].shape[2] if cache else 0
        self.trees = [TokenTree(prompt_index, list(row)) for prompt_index, row in enumerate(prompts)]
        self.active = list(range(len(prompts)))
        self.columns = Columns(len(prompts))
        self.cache = TreeCache(len(prompts))
        self.cache.fill(cache or [])
        for prompt_index, pad in enumerate(pads):
            taken = self.columns.take(prompt_index, width)
            self.columns.add_prompt(prompt_index, prompt_index, taken[pad:])
        logits = self._read_prompts(ids, positions, mask if any(pads) else None, num_cached, with_log_probs)
        if with_log_probs:
            self.prompt_log_probs = [row[pad:] for row, pad in zip(self.prompt_log_probs, pads, strict=True)]
        self.num_tokens += sum(width - max(num_cached, pad) for pad in pads)
        for prompt_index, pad in enumerate(pads):
            self.columns.release(prompt_index, range(pad))
        if len(prompts) > 1 and self._shares_row(self.columns.num_used):
            self._rearrange()
        return self._store([tree.root for tree in self.trees], logits[:, -1])

    def _read_prompts(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, start: int, with_log_probs: bool
    ) -> torch.Tensor:
        """
        Read the columns of the prompts from `start` on; returns the logits after the last one. With log-probabilities,
        so many columns a pass that the logits of all of them take little memory.
        """
        batch_size, width = ids.shape
        step = width if not with_log_probs else max(16, _MOST_PROMPT_LOGITS // batch_size // _vocab_size(self.model))
        found: list[torch.Tensor] = []
        while True:
            end = min(width, start + step)
            self.cache.open([list(range(start, end))] * batch_size, end)
            part = None if mask is None else mask[:, :end]
            logits = self._forward(ids[:, start:end], positions[:, start:end], part, self.cache, not with_log_probs)
            if with_log_probs:
                found.append(log_probs_of(logits[:, : min(end, width - 1) - start], ids[:, start + 1 : end + 1]).cpu())
            if end == width:
                break
            start = end
        if with_log_probs:
            first = [math.nan] * (width - 1 - sum(part.shape[1] for part in found))  # of what the cache held
            self.prompt_log_probs = [[*first, *row] for row in torch.cat(found, dim=1).tolist()]
        return logits

    def commit(self, prompt_index: int, path: list[Node]) -> None:
        """Make `path`, empty or not, part of a prompt's prefix. What hangs below its end stays, all else goes."""
        tree = self.trees[prompt_index]
        settled = tree.commit(path)
        self.columns.settle(prompt_index, settled, tree.unsettled())

    def keys_values(self, prompt_index: int) -> KeysValues:
        """A copy of the keys and values of a prompt's committed tokens, as far as they have been run."""
        row = self.columns.row_of[prompt_index]
        return list(self.cache.gather([[(row, column) for column in self.columns.prefix[prompt_index]]]))

    def drop(self, finished: set[int]) -> None:
        """These prompts need no more passes and cost nothing from here on."""
        leaving = finished.intersection(self.active)
        if not leaving:
            return
        is_shared = self.columns.num_rows == 1
        for prompt_index in leaving:
            self.columns.drop(prompt_index)
        super().drop(finished)
        if not self.active:
            self.cache = TreeCache(1)  # the memory of the old one is free
        elif not is_shared or 2 * self.columns.num_used < self.columns.width:
            self._rearrange()

    def _shares_row(self, num_columns: int) -> bool:
        """Whether prompts that hold so many columns share a row of the cache."""
        return num_columns <= self.most_shared_columns

    def _rearrange(self) -> None:
        """Lay all columns out anew, without holes: in one row, or one for each prompt."""
        num_columns = sum(len(self.columns.held(prompt_index)) for prompt_index in self.active)
        rows = [self.active] if self._shares_row(num_columns) else [[prompt_index] for prompt_index in self.active]
        self.cache.rearrange(self.columns.rearrange(rows))

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: Any, cache: Any, last_only: bool = False
    ) -> torch.Tensor:
        length = cache.get_seq_length()
        self.num_forwards += 1
        logits, _ = self._call(ids, positions, mask, cache, last_only=last_only)
        is_kept = cache.is_written if isinstance(cache, TreeCache) else cache.get_seq_length() > length
        if not is_kept:
            raise ForwardError("it does not keep its keys and values in the cache that it is given")
        return logits


def _vocab_size(model: Any) -> int:
    return int(getattr(model.config.get_text_config(), "vocab_size", None) or 1)


class PackedBackend(ColumnBackend):
    """Trees of models that take a 4-D mask: one forward pass holds them packed."""

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model, device)
        self._masks = MaskMaker(model, device)

    @property
    def is_padded(self) -> bool:
        return self.columns.num_rows > 1

    @torch.no_grad()
    def run(self, wanted: Iterable[Node]) -> list[Node]:
        """Run these nodes, and those above them, in one forward pass; returns the nodes newly run."""
        missing = missing_nodes(wanted)
        if not missing:
            return []
        if not self.is_padded and len(self.active) > 1 and not self._shares_row(self.columns.num_used):
            self._rearrange()
        batch: list[list[Node]] = [[] for _ in range(self.columns.num_rows)]
        for node in missing:
            batch[self.columns.row_of[node.prompt_index]].append(node)
        fillers = self._fill_up(batch)
        queries = [node for nodes in batch for node in nodes]
        inputs = [[[node.token, node.position, node.prompt_index] for node in nodes] for nodes in batch]
        ids, positions, prompts = torch.tensor(inputs).unbind(-1)
        mask = self._mask(prompts, positions, queries)
        logits = self._forward(ids.to(self.device), positions.to(self.device), mask, self.cache).flatten(0, 1)
        self.num_tokens += len(missing)
        if fillers:
            own = [number for number, node in enumerate(queries) if node not in fillers]
            queries, logits = [queries[number] for number in own], logits[own]
        return self._store(queries, logits)

    def _fill_up(self, batch: list[list[Node]]) -> set[Node]:
        """Give the nodes of each row columns; fill shorter rows up with nodes whose columns stay free: these."""
        num_queries = max(map(len, batch))
        fillers, columns, spare = set[Node](), [], []
        for row, nodes in enumerate(batch):
            taken, num_missing = self.columns.place(nodes), num_queries - len(nodes)
            if num_missing:
                filler = Node(0, None, self.active[row], 0)  # where there are several rows, each is one prompt's
                fillers.add(filler)
                nodes += [filler] * num_missing
                unused = self.columns.take(row, 1)
                spare.append((row, unused))
                taken = taken + unused * num_missing
            columns.append(taken)
        self.cache.open(columns, self.columns.width)
        for row, unused in spare:
            self.columns.release(row, unused)
        return fillers

    def _mask(self, prompts: torch.Tensor, positions: torch.Tensor, queries: list[Node]) -> Any:
        for prompt_index in sorted({node.prompt_index for node in queries}, reverse=True):  # makes room for all at once
            self._masks.place(prompt_index, self.columns.prefix[prompt_index], self.cache.width)
        seen = [
            (number, column, node.position - above.position)
            for number, node in enumerate(queries)
            for column, above in self.columns.above(node)
        ]
        return self._masks.make(prompts, positions, seen, self.cache.width)

    def _rearrange(self) -> None:
        super()._rearrange()
        self._masks.forget()
