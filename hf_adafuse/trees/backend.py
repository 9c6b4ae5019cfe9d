"""`Backend`, the interface of what runs the token trees of a batch of prompts under one model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import torch

from .kv_cache import KeysValues
from .nodes import Node, TokenTree
from .pass_policy import policy_for

Self = TypeVar("Self", bound="Backend")


class ForwardError(Exception):
    """A model raised an error, ran out of memory or returned NaN. The reason is its `__cause__` or its text."""


# Per prompt, the positions of the ids whose log-probabilities are asked for.
Counted = Sequence[Collection[int]]


class Backend:
    """
    Runs the token trees of a batch of prompts under one model. Each subclass adds the passes, and what it keeps of
    them.

    Args:
        model (`PreTrainedModel`): the model. Nothing of it is changed.
        device (`torch.device`): the device of its inputs.

    Attributes:
        trees (`list[TokenTree]`): one tree per prompt.
        first_index (`int`): the index of the first prompt that `prefill` reads.
        active (`list[int]`): the indices of the prompts that still need passes.
        num_forwards (`int`), num_tokens (`int`): how many forward passes have been run so far, over how many tokens.
        prompt_log_probs (`list[list[float]]`): per prompt of the last call of `prefill` or `admit`, the log-probability
            (nats) of each id given those before it, beginning where the model's own reading began. Those for which
            `counted` asks are known. Of the others some are NaN. The lists may be missing where it asks for none.
        policy (`type[Policy]`): the constants for its device.
        keeps_keys (`bool`): whether it keeps keys and values, and can start from those of a caller.
        can_prefetch (`bool`): whether a few more nodes cost a pass little.
        can_run_again (`bool`): whether a node can be computed a second time while nodes below it stay; see `forget`.
    """

    keeps_keys = can_prefetch = can_run_again = True

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.policy = policy_for(device)
        self.trees: Sequence[TokenTree] = []
        self.first_index = 0
        self.active: list[int] = []
        self.num_forwards = 0
        self.num_tokens = 0
        self.prompt_log_probs: list[list[float]] = []

    @property
    def is_padded(self) -> bool:
        """Whether a pass pads prompts that need fewer nodes than others."""
        return False

    def prefill(
        self,
        prompts: list[list[int]],
        cache: KeysValues | None = None,
        counted: Counted = (),
        can_share: bool = True,
    ) -> list[Node]:
        """
        Read the prompts.

        Args:
            prompts (`list[list[int]]`): ids per prompt, unpadded, at least one each.
            cache (`KeysValues`, *optional*): keys and values of the first columns of the left-padded prompts.
            counted (`list[list[int]]`, *optional*): per prompt, the positions of the ids whose log-probabilities are
                kept in `prompt_log_probs`. By default none.
            can_share (`bool`, *optional*, defaults to `True`): whether what all prompts begin with may be read apart.

        Returns:
            the roots, one per prompt.
        """
        raise NotImplementedError

    def admit(self, prompts: list[list[int]], counted: Counted = (), can_share: bool = True) -> list[Node]:
        """Read further prompts while others are being decoded, like `prefill`. Their indices follow the earlier
        ones."""
        newcomers = copy.copy(self)
        newcomers.first_index = len(self.trees)
        newcomers.prompt_log_probs = []
        roots = newcomers.prefill(prompts, None, counted, can_share)
        self.num_forwards = newcomers.num_forwards
        self.num_tokens = newcomers.num_tokens
        self.trees = [*self.trees, *newcomers.trees]
        self.prompt_log_probs = newcomers.prompt_log_probs
        self._take_in(newcomers)
        self.active = [*self.active, *newcomers.active]
        return roots

    def _take_in(self: Self, newcomers: Self) -> None:
        """What has been read of further prompts becomes this backend's, where that is more than their trees."""

    def run(self, nodes: Iterable[Node]) -> list[Node]:
        """Run these nodes and their ancestors. Returns the newly computed nodes."""
        raise NotImplementedError

    def plan(self, nodes: list[Node]) -> tuple[Callable[[], Any], Callable[[Any], list[Node]]]:
        """A pass for these nodes in two steps: the work, and what gives its result to the nodes and returns the newly
        computed ones. Of a member behind a server, the work touches no tree, so that another thread may do it."""
        return lambda: self.run(nodes), list

    def forget(self, node: Node) -> None:
        """A forgotten node below a prefix is to be computed again: free what is kept of it."""

    def commit(self, prompt_index: int, path: list[Node]) -> None:
        """Append `path`, empty or not, to a prompt's prefix. Nodes below its end stay, and all others are freed."""
        self.trees[prompt_index].commit(path)

    def keys_values(self, prompt_index: int) -> KeysValues | None:
        """A copy of the keys and values of a prompt's settled tokens; `None` where the backend has none to give."""
        return None

    def drop(self, finished: set[int]) -> None:
        """Free what is kept for these finished prompts."""
        for prompt_index in finished.intersection(self.active):
            self.trees[prompt_index].close()
        self.active = [prompt_index for prompt_index in self.active if prompt_index not in finished]

    def _plant(self, prompts: list[list[int]]) -> None:
        """A tree for each of these prompts, and nothing else."""
        self.active = [self.first_index + number for number in range(len(prompts))]
        self.trees = [TokenTree(index, list(ids)) for index, ids in zip(self.active, prompts, strict=True)]

    def _store(self, nodes: list[Node], logits: torch.Tensor) -> list[Node]:
        """Give newly computed nodes their logits, of shape `(num_nodes, vocab_size)`. Each node gets a copy of its row:
        a view would keep the logits of all nodes of the pass for as long as one of them lives."""
        logits = logits if logits.dtype in (torch.bfloat16, torch.float16) else logits.float()
        for node, node_logits in zip(nodes, logits, strict=True):
            node.logits = node_logits.clone()
            node.is_computed = True
        return nodes


def as_tensor(values: Any) -> torch.Tensor:
    """A tensor as it is, or other numbers as a tensor on the CPU, whatever torch's default device is."""
    return values if isinstance(values, torch.Tensor) else torch.as_tensor(values, device="cpu")


def to_device(values: Any, device: torch.device) -> torch.Tensor:
    """Numbers of the host as a tensor on a device. With a GPU the copy does not make the host wait for the work that
    the GPU has been given."""
    tensor = as_tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def log_probs_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of `ids`, of shape `(batch_size, num_ids)`, by the logits before each of them."""
    logits = logits.float()
    return logits.gather(-1, ids.to(logits.device)[..., None])[..., 0] - logits.logsumexp(-1)
