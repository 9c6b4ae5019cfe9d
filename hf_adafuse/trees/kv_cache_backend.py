"""Token trees whose keys and values are kept once, in the columns of one KV cache. `tree-attention` and `branch-rows`
share this.

Committed tokens are never run again, and nodes below them stay. Prompts share one row of the cache, so that no pass
reads padding, until attention to the columns of other prompts costs more (`pass_policy`). From then on each prompt has
a row of its own. A prefix that all prompts share is read once, and in one shared row it is stored once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from contextlib import nullcontext
from typing import Any

import torch

from .backend import Backend, Counted, ForwardError, log_probs_of, to_device
from .kv_cache import KeysValues, common_length, join_rows
from .kv_slots import KVSlots
from .model_call import ModelCall, frequency_switch
from .nodes import Node
from .pass_policy import Policy
from .shared_prefix import SharedPrefix, kept_now, kept_prefixes, worth_sharing
from .static_shapes import uncompiled
from .tree_cache import TreeCache

Layers = Iterable[tuple[torch.Tensor, torch.Tensor]]
# Logits of prompts held at a time: 256 MB in float32.
_MOST_PROMPT_LOGITS = 2**26
# Columns of the cache that a pass over prompts fills at least, however many prompts there are.
_LEAST_PROMPT_COLUMNS = 16


class KVCacheBackend(Backend):
    """Token trees with one KV cache; see [`Backend`] for the arguments."""

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model, device)
        self._call = ModelCall(model, is_set_up=True)
        self.most_shared_columns = self.policy.most_shared_columns

    @torch.no_grad()
    def prefill(
        self,
        prompts: list[list[int]],
        cache: KeysValues | None = None,
        counted: Counted = (),
        can_share: bool = True,
    ) -> list[Node]:
        """Read what the prompts share, and then the prompts: each in one forward pass, or in several where one would
        take much memory. See [`Backend`]."""
        width = max(map(len, prompts))
        pads = [width - len(ids) for ids in prompts]
        self._can_share = can_share and cache is None  # what a caller's cache holds is not all read here
        counted = counted or [()] * len(prompts)
        of_any = {position for of_prompt in counted for position in of_prompt}
        shared = self._shared_prefix(prompts, of_any) if self._can_share else None
        num_shared = 0 if shared is None else len(shared.ids)
        num_known = cache[0][0].shape[2] if cache else 0  # of the columns of the left-padded prompts, from the first on
        known: Layers = cache or []
        if shared is not None:
            num_known = num_shared - _num_reread(num_shared, of_any)
            known = _left_padded(shared, pads, num_known) if num_known else []
        self._lay_out(prompts, pads, known, num_shared)
        columns = {pad + at for pad, of_prompt in zip(pads, counted, strict=True) for at in of_prompt}
        logits = self._read_padded(prompts, pads, num_known, columns)
        log_probs_of_shared = [] if shared is None else list(shared.log_probs)
        self.prompt_log_probs = _unpadded(self.prompt_log_probs, pads, log_probs_of_shared, num_known)
        self.num_tokens += sum(width - pad - max(num_shared, num_known - pad) for pad in pads)
        if self._can_share:
            self._keep(prompts[0], pads[0], {*counted[0]})
        if len(prompts) > 1 and self._shares_row(self.slots.num_distinct):
            self._rearrange()
        return self._store([tree.root for tree in self.trees], logits[:, -1])

    def _lay_out(self, prompts: list[list[int]], pads: list[int], known: Layers, num_shared: int) -> None:
        """
        Plant the trees of left-padded prompts, and begin a cache in which each prompt has a row of its own.

        Args:
            prompts (`list[list[int]]`): ids per prompt, unpadded.
            pads (`list[int]`): per prompt, the columns of padding before it. No prompt keeps them.
            known (`Iterable`): per layer, keys and values of the first columns of the left-padded prompts.
            num_shared (`int`): how many first ids are the same in all prompts.
        """
        width = pads[0] + len(prompts[0])
        self._plant(prompts)
        self.slots = KVSlots(len(prompts), num_shared)
        self.cache = TreeCache(len(prompts))
        self.cache.fill(known, width)
        for row, (prompt_index, pad) in enumerate(zip(self.active, pads, strict=True)):
            columns = self.slots.allocate_columns(row, width)
            self.slots.add_prompt(prompt_index, row, columns[pad:])
            self.slots.free_columns(row, columns[:pad])

    def _read_padded(self, prompts: list[list[int]], pads: list[int], start: int, counted: Set[int]) -> torch.Tensor:
        """Left-pad the prompts and read their columns from `start` on; returns what `_read_prompts` does."""
        rows = list(zip(pads, prompts, strict=True))
        ids = to_device([[0] * pad + row for pad, row in rows], self.device)
        mask = to_device([[0] * pad + [1] * len(row) for pad, row in rows], self.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        return self._read_prompts(ids, positions, mask if any(pads) else None, start, counted)

    def _take_in(self, newcomers: KVCacheBackend) -> None:
        if not self.active:
            self.slots = newcomers.slots
            self.cache = newcomers.cache
            return
        ids = [self.trees[index].ids for index in (self.active[0], newcomers.active[0])]
        self.slots.append_rows(newcomers.slots, common_length(ids))
        self.cache.append_rows(newcomers.cache)
        self._rearrange([*self.active, *newcomers.active])

    def _shared_prefix(self, prompts: list[list[int]], counted: Set[int]) -> SharedPrefix | None:
        """What all prompts begin with, read; `None` where that is not worth it."""
        usable = [(one.num_usable(prompts, counted), one) for one in kept_prefixes(self.model)]
        num_known, known = max(usable, key=lambda pair: pair[0], default=(0, SharedPrefix([], [])))
        num_known = min(num_known, min(map(len, prompts)) - 1)
        number = worth_sharing(prompts, num_known, self.policy)
        num_known = min(num_known, number)
        if number == 0:
            return None
        if num_known and (kept := kept_now()) is not None:
            kept.use(known, num_known * len(prompts))
        ids = prompts[0][:number]
        log_probs = list(known.log_probs[: max(0, num_known - 1)])
        log_probs += [math.nan] * (number - 1 - len(log_probs))
        layers = _first_columns(known.memory, num_known)
        if num_known < number:
            start = max(0, num_known - _num_reread(num_known, counted))
            self.cache = TreeCache(1)
            self.cache.fill(_first_columns(layers, start) if start else [])
            inputs = torch.tensor([ids], device=self.device)
            self._read_prompts(inputs, torch.arange(number, device=self.device)[None], None, start, counted)
            self.num_tokens += number - num_known
            layers = _first_columns([(layer.keys, layer.values) for layer in self.cache.layers], number)
            first_new = max(0, num_known - 1)
            log_probs[first_new:] = self.prompt_log_probs[0][first_new:]
        return SharedPrefix(ids, layers, log_probs)

    def _keep(self, ids: list[int], pad: int, counted: Set[int]) -> None:
        """Keep what has been read of the first prompt for later calls, where it is much that was not kept before."""
        kept = kept_now()
        if kept is None:
            return
        known = kept.of(self.model, None if kept.keeps_many else False)
        num_new = len(ids) - max((one.num_usable([ids], counted) for one in known), default=0)
        if num_new >= self.policy.least_shared_tokens:
            layers = [
                (layer.keys[:1, :, pad : pad + len(ids)].clone(), layer.values[:1, :, pad : pad + len(ids)].clone())
                for layer in self.cache.layers
            ]
            kept.add(self.model, SharedPrefix(list(ids), layers, self.prompt_log_probs[0]))

    def _keep_text(self, prompt_index: int) -> None:
        """Keep all of a text that has ended: a conversation may go on with it."""
        kept = kept_now()
        is_alone = len(self.trees) == 1
        if kept is None or not (is_alone or kept.keeps_many):
            return
        ids = self.trees[prompt_index].ids[: len(self.slots.prefix[prompt_index])]
        log_probs = self.prompt_log_probs[0] if is_alone else []
        is_known = kept.keeps_many and any(
            one.covers(SharedPrefix(ids, None, log_probs)) for one in kept.of(self.model)
        )
        if len(ids) >= self.policy.least_shared_tokens and not is_known:
            kept.add(self.model, SharedPrefix(ids, self.keys_values(prompt_index), log_probs), is_text=True)

    def _read_prompts(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, start: int, counted: Set[int]
    ) -> torch.Tensor:
        """
        Read the columns of the prompts from `start` on, and keep the log-probabilities of the ids in the columns
        `counted`; returns the logits after the last column. A pass reads at most `most_prompt_tokens` tokens, and as
        many as give the logits that `_MOST_PROMPT_LOGITS` allows; but at least `_LEAST_PROMPT_COLUMNS` of each prompt,
        and with LongRoPE at first all to which short frequencies apply.
        """
        batch_size, width = ids.shape
        before = sorted(column - 1 for column in counted if start < column < width)
        if before and not self._call.can_leave_out_logits:
            before = list(range(start, width - 1))
        step = max(_LEAST_PROMPT_COLUMNS, self.policy.most_prompt_tokens // batch_size)
        most_counted = most_rows_of_logits(self.model, self.policy, batch_size)
        switch = frequency_switch(self.model.config.get_text_config()) or 0
        first_end = switch + 1 if width > switch else 0  # the first pass, too, reads by the frequencies for long texts
        self.prompt_log_probs = [[math.nan] * (width - 1) for _ in range(batch_size)]
        while True:
            left = [column for column in before if column >= start]
            end = min(start + step, left[most_counted] if len(left) > most_counted else width)
            end = min(width, max(end, first_end))
            read = [column for column in left if column < end]
            self.cache.open([list(range(start, end))] * batch_size, end)
            part = None if mask is None else mask[:, :end]
            with uncompiled if self._call.is_compiled else nullcontext():
                logits = self._forward(
                    ids[:, start:end],
                    positions[:, start:end],
                    part,
                    self.cache,
                    [*(column - start for column in read if column < end - 1), end - 1 - start],
                )
            if read:
                after = [column + 1 for column in read]  # the last column of the pass may be one of them
                values = log_probs_of(logits[:, : len(read)], ids[:, after]).tolist()
                for known, new in zip(self.prompt_log_probs, values, strict=True):
                    for column, value in zip(read, new, strict=True):
                        known[column] = value
            if end == width:
                break
            start = end
        return logits

    def forget(self, node: Node) -> None:
        """Free the column of a node below a prefix."""
        self.slots.free_node(node)

    def commit(self, prompt_index: int, path: list[Node]) -> None:
        """Append `path`, empty or not, to a prompt's prefix. Nodes below its end stay, and all others are freed."""
        tree = self.trees[prompt_index]
        settled = tree.commit(path)
        self.slots.promote(prompt_index, settled, tree.unsettled())

    def keys_values(self, prompt_index: int) -> KeysValues:
        """A copy of the keys and values of a prompt's settled tokens."""
        row = self.slots.row_of[prompt_index]
        return list(self.cache.gather([[(row, column) for column in self.slots.prefix[prompt_index]]]))

    def drop(self, finished: set[int]) -> None:
        """Free the columns of these finished prompts."""
        leaving = finished.intersection(self.active)
        if not leaving:
            return
        for prompt_index in leaving:
            if self._can_share:
                self._keep_text(prompt_index)
            self.slots.drop(prompt_index)
        super().drop(finished)
        if not self.active:
            self._leave_cache()
        elif self._is_sparse():
            self._rearrange()
        else:
            self.cache.num_sharing = self.slots.num_sharing

    def _leave_cache(self) -> None:
        """Nothing of it is needed any more."""
        self.cache = TreeCache(1)

    def _is_sparse(self) -> bool:
        """Whether the columns should be laid out anew when prompts have left."""
        return self.slots.num_rows > 1 or 2 * self.slots.num_used < self.slots.width

    def _shares_row(self, num_columns: int) -> bool:
        """Whether prompts that hold so many columns share a row of the cache."""
        return num_columns <= self.most_shared_columns

    def _rearrange(self, prompts: list[int] | None = None) -> None:
        """Lay all columns out anew, without holes: in one row, or one for each prompt."""
        prompts = self.active if prompts is None else prompts
        is_one = self._shares_row(self.slots.num_distinct)
        rows = [prompts] if is_one else [[prompt_index] for prompt_index in prompts]
        sources = self.slots.rearrange(rows)
        self.cache.num_sharing = self.slots.num_sharing
        self.cache.rearrange(sources)

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: Any, cache: Any, columns: list[int] | None = None
    ) -> torch.Tensor:
        """The logits after these columns of the ids, the last one among them; by default after all."""
        length = cache.get_seq_length()
        self.num_forwards += 1
        logits, _ = self._call(ids, positions, mask, cache, columns=columns)
        is_kept = cache.is_written if isinstance(cache, TreeCache) else cache.get_seq_length() > length
        if not is_kept:
            raise ForwardError("it does not keep its keys and values in the cache that it is given")
        return logits


def _num_reread(num_known: int, counted: Set[int]) -> int:
    """How many of the known tokens are read again: the last one, where the log-probability of the id after it counts.
    The logits after known tokens are not kept."""
    return int(num_known > 0 and num_known in counted)


def _unpadded(rows: list[list[float]], pads: list[int], shared: list[float], num_known: int) -> list[list[float]]:
    """
    The log-probabilities (nats) of each prompt's ids after its first one.

    Args:
        rows (`list[list[float]]`): per left-padded prompt, those that were read, after `num_known` NaN.
        pads (`list[int]`): per prompt, the columns of padding before it.
        shared (`list[float]`): those of the prefix that all prompts share.
        num_known (`int`): the number of first columns whose keys and values were known before.
    """
    heads = [shared[: max(0, num_known - pad)] for pad in pads]
    return [head + row[pad + len(head) :] for head, row, pad in zip(heads, rows, pads, strict=True)]


def most_rows_of_logits(model: Any, policy: type[Policy], batch_size: int = 1) -> int:
    """Of how many tokens of each text of a batch one pass may make logits."""
    most = min(policy.most_prompt_tokens, _MOST_PROMPT_LOGITS // _vocab_size(model))
    return max(_LEAST_PROMPT_COLUMNS, most // batch_size)


def _vocab_size(model: Any) -> int:
    return int(getattr(model.config.get_text_config(), "vocab_size", None) or 1)


def _first_columns(layers: KeysValues, number: int) -> KeysValues:
    return [(keys[:, :, :number], values[:, :, :number]) for keys, values in layers]


def _left_padded(shared: SharedPrefix, pads: list[int], start: int) -> Layers:
    """
    The shared keys and values in the first `start` columns of the left-padded prompts, layer by layer. In a row with
    padding the last shared tokens are read again, where padding would be.
    """
    rows = [_first_columns(shared.memory, max(0, start - pad)) for pad in pads]
    return join_rows(rows, [min(pad, start) for pad in pads], start)
