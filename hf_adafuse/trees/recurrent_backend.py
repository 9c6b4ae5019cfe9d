"""Token trees of recurrent and hybrid models, and of those whose cache cannot be padded: the model's
recurrent state is kept at each node where a chain of tokens ends.

Sequences are never padded: chains of equal length go together in one forward pass. A node inside a chain has no
such state. To go on from there, the model reads again from the nearest node above that has one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .backend import Backend, Counted, log_probs_of, to_device
from .kv_cache import KeysValues
from .model_call import ModelCall
from .nodes import Node, TokenTree, missing_nodes
from .recurrent_state import fork_state, grows, join, split
from .shared_prefix import SharedPrefix, kept_now, kept_prefixes, worth_sharing

_Below = dict[int, list[Node]]  # by a node's id: the nodes to read after it


class RecurrentTree(TokenTree):
    """One prompt's tree; `recurrent_state` is what the model remembers of its first `num_read` ids, all committed."""

    def __init__(self, prompt_index: int, ids: list[int], state: Any) -> None:
        super().__init__(prompt_index, ids)
        self.recurrent_state = self.root.recurrent_state = state
        self.num_read = len(ids)


class Chain:
    """
    Tokens to read one after the other, up to a node after which chains branch, or nothing comes.

    Args:
        tree (`RecurrentTree`): what it belongs to.
        first (`Node`): its first node; tokens of the prefix that are to be read again come before it.
        below (`dict`): the nodes to read after each node.

    Attributes:
        recurrent_state: what the model remembers of the ids before `tokens`.
        num_read (`int`): the number of these ids.
        tokens (`list[int]`): the ids that are still to be read; those of the prefix come before those of `nodes`.
        nodes (`list[Node]`): the nodes that are still to be read.
        following (`list[Node]`): the first nodes of the chains after this one.
    """

    def __init__(self, tree: RecurrentTree, first: Node, below: _Below) -> None:
        again: list[int] = []
        if first.parent is None:
            self.recurrent_state = tree.recurrent_state
            self.num_read = tree.num_read
            again = tree.ids[tree.num_read : first.position]
        else:
            self.recurrent_state = first.parent.recurrent_state
            self.num_read = first.position
        self.nodes = [first]
        self.following = below.get(id(first), [])
        while len(self.following) == 1:
            self.nodes += self.following
            self.following = below.get(id(self.nodes[-1]), [])
        self.tokens = again + [node.token for node in self.nodes]

    def advance(self, count: int, state: Any) -> list[tuple[int, Node]]:
        """Take `count` tokens as read and `state` as what it gave; returns the nodes read, with their offsets."""
        num_again = len(self.tokens) - len(self.nodes)
        read = list(enumerate(self.nodes[: max(0, count - num_again)], start=num_again))
        self.tokens = self.tokens[count:]
        self.nodes = self.nodes[len(read) :]
        self.recurrent_state = state
        self.num_read = self.num_read + count
        if read:
            read[-1][1].recurrent_state = state
        return read


class RecurrentBackend(Backend):
    """
    The trees of a batch of prompts under a model with any memory.

    Args:
        model (`PreTrainedModel`), device (`torch.device`): as in [`Backend`].
        max_tokens (`int`, *optional*): the most tokens a pass after the prompt; 1 where several at a time go wrong.
        max_rows (`int`, *optional*): the most sequences a pass; 1 where several at a time go wrong.
    """

    keeps_keys = can_prefetch = can_run_again = False

    def __init__(
        self, model: Any, device: torch.device, max_tokens: int | None = None, max_rows: int | None = None
    ) -> None:
        super().__init__(model, device)
        self._call = ModelCall(model)
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self.trees: list[RecurrentTree] = []

    @torch.no_grad()
    def prefill(
        self,
        prompts: list[list[int]],
        cache: KeysValues | None = None,
        counted: Counted = (),
        can_share: bool = True,
    ) -> list[Node]:
        """Read the prompts, those of one length in one pass, and what all begin with in one before; returns the roots,
        one per prompt. There is no `cache`."""
        with_log_probs = any(counted)
        # Several tokens after others are needed; and no log-probabilities, of which one would be between two passes.
        can_share = can_share and not with_log_probs and self._max_tokens is None
        shared = self._shared_prefix(prompts) if can_share else None
        num_shared = 0 if shared is None else len(shared.ids)
        trees: dict[int, RecurrentTree] = {}
        log_probs: dict[int, list[float]] = {}
        while waiting := [index for index in range(len(prompts)) if index not in trees]:
            batch = [index for index in waiting if len(prompts[index]) == len(prompts[waiting[0]])][: self._max_rows]
            rows = [prompts[index][num_shared:] for index in batch]
            memory = None if shared is None else join([shared.memory] * len(batch))
            logits, parts = self._forward(rows, [num_shared] * len(batch), memory, is_last=not with_log_probs)
            if with_log_probs:
                values = log_probs_of(logits[:, :-1], torch.tensor(rows, device="cpu")[:, 1:]).tolist()
                log_probs.update(zip(batch, values, strict=True))
            for index, part in zip(batch, parts, strict=True):
                trees[index] = RecurrentTree(self.first_index + index, list(prompts[index]), part)
            self._store([trees[index].root for index in batch], logits[:, -1])
        self.trees = [trees[index] for index in sorted(trees)]
        self.active = [self.first_index + index for index in sorted(trees)]
        self.prompt_log_probs = [log_probs[index] for index in sorted(log_probs)]
        return [tree.root for tree in self.trees]

    def _shared_prefix(self, prompts: list[list[int]]) -> SharedPrefix | None:
        """What all prompts begin with, read; `None` where that is not worth it. A recurrent state cannot be cut: what
        was kept is of use where all of it is at the beginning of all prompts."""
        fitting = [one for one in kept_prefixes(self.model) if all(_begins_with(ids, one.ids) for ids in prompts)]
        known = max(fitting, key=lambda one: len(one.ids), default=None)
        number = worth_sharing(prompts, 0 if known is None else len(known.ids), self.policy)
        kept = kept_now()
        if number and known is not None and kept is not None:
            kept.use(known, len(known.ids) * len(prompts))
        if number == 0 or (known is not None and number == len(known.ids)):
            return known if number else None
        ids = prompts[0][:number]
        start = 0 if known is None else len(known.ids)
        before = None if known is None else fork_state(known.memory)
        _, (memory,) = self._forward([ids[start:]], [start], before, is_last=True)
        shared = SharedPrefix(ids, memory, can_be_cut=False)
        if kept is not None:
            kept.add(self.model, shared)
        return shared

    @torch.no_grad()
    def run(self, nodes: Iterable[Node]) -> list[Node]:
        """Run these nodes, and those above them; returns the newly computed nodes."""
        missing = missing_nodes(nodes)
        starts, below = _plan(missing)
        chains = [Chain(self.trees[node.prompt_index], node, below) for node in starts]
        while chains:
            group, count = self._next_pass(chains)
            self._read(group, count)
            ended = [chain for chain in group if not chain.tokens]
            chains = [chain for chain in chains if chain.tokens]
            chains += [Chain(self.trees[node.prompt_index], node, below) for chain in ended for node in chain.following]
        return missing

    def commit(self, prompt_index: int, path: list[Node]) -> None:
        """Make `path`, empty or not, part of a prompt's prefix. What hangs below its end stays, all else goes."""
        tree = self.trees[prompt_index]
        for node in tree.commit(path):
            if node.recurrent_state is not None:
                tree.recurrent_state = node.recurrent_state
                tree.num_read = node.position + 1

    def drop(self, finished: set[int]) -> None:
        """These prompts need no more passes, and hold no memory from here on."""
        for prompt_index in finished.intersection(self.active):
            tree = self.trees[prompt_index]
            kept = kept_now()
            is_long = tree.num_read >= self.policy.least_shared_tokens and self._max_tokens is None
            if kept is not None and is_long and (len(self.trees) == 1 or kept.keeps_many):  # it may be gone on with
                prefix = SharedPrefix(tree.ids[: tree.num_read], tree.recurrent_state, can_be_cut=False)
                kept.add(self.model, prefix, is_text=True)
            tree.recurrent_state = tree.root.recurrent_state = None
        super().drop(finished)

    def _next_pass(self, chains: list[Chain]) -> tuple[list[Chain], int]:
        """The chains that go together, those that are behind first, and the number of tokens that each reads."""
        count = min(len(chain.tokens) for chain in chains)
        if grows(chains[0].recurrent_state):
            lengths = sorted({chain.num_read for chain in chains})
            chains = [chain for chain in chains if chain.num_read == lengths[0]]
            count = min(len(chain.tokens) for chain in chains)
            if len(lengths) > 1:
                count = min(count, lengths[1] - lengths[0])
        return chains[: self._max_rows], min(count, self._max_tokens or count)

    def _read(self, chains: list[Chain], count: int) -> None:
        tokens = [chain.tokens[:count] for chain in chains]
        starts = [chain.num_read for chain in chains]
        logits, states = self._forward(tokens, starts, join([chain.recurrent_state for chain in chains]))
        new = [
            (node, entry, offset)
            for entry, (chain, state) in enumerate(zip(chains, states, strict=True))
            for offset, node in chain.advance(count, state)
            if not node.is_computed
        ]
        if new:
            entries, offsets = to_device([place for _, *place in new], logits.device).unbind(1)
            self._store([node for node, _, _ in new], logits[entries, offsets])

    def _forward(
        self, tokens: list[list[int]], starts: list[int], memory: Any, is_last: bool = False
    ) -> tuple[torch.Tensor, list[Any]]:
        """The logits of rows of tokens of one length, of the last one alone with `is_last`, and what the model
        remembers of each row after them."""
        ids = to_device(tokens, self.device)
        positions = to_device(starts, self.device)[:, None] + torch.arange(ids.shape[1], device=self.device)
        columns = [ids.shape[1] - 1] if is_last else None
        logits, memory = self._call(ids, positions, memory=memory, columns=columns)
        self.num_forwards += 1
        self.num_tokens += ids.numel()
        return logits, split(memory, len(tokens))


def _begins_with(ids: list[int], first: list[int]) -> bool:
    """Whether it does and goes on."""
    return len(ids) > len(first) and ids[: len(first)] == first


def _plan(missing: list[Node]) -> tuple[list[Node], _Below]:
    """Where reading starts, and what is read after each node: what is missing, and what leads to it from a node whose
    state is kept."""
    reads = {id(node): node for node in missing}
    for node in missing:
        above = node.parent
        while above is not None and above.recurrent_state is None and id(above) not in reads:
            reads[id(above)] = above
            above = above.parent
    below: _Below = {}
    starts = []
    for node in reads.values():
        if node.parent is not None and id(node.parent) in reads:
            below.setdefault(id(node.parent), []).append(node)
        else:
            starts.append(node)
    return starts, below
