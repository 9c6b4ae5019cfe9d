"""Trees of a model behind a server: running nodes is a request. Knows no HTTP, text, word or other member.

Each node is a text of its own, asked for the most likely tokens after it and for its children in the tree. Nodes with
nothing below them are where a member goes on: they are asked for several greedy tokens at once, which become nodes too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..servers.queries import ServerError
from .backend import Backend, ForwardError
from .kv_cache import KeysValues
from .nodes import Node, TokenTree

# ids of a text, tokens asked for after it, greedy steps
Asked = tuple[tuple[int, ...], tuple[int, ...], int]


class ServedBackend(Backend):
    """
    The trees of a batch of prompts under a model behind a server; see [`Backend`].

    Attributes:
        num_top (`int`): how many of the most likely tokens are asked for; set by the member.
        eos_ids (`list[int]`): asked for after every text; set by the member.
        make_reading (`Callable`): makes a node's reading of what is known; set by the member.
    """

    keeps_keys = can_prefetch = False
    is_remote = True

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model, device)
        self.num_top = 2
        self.eos_ids: Sequence[int] = ()
        self.make_reading: Callable[[Sequence[int], dict[int, float]], Any] = lambda top, log_probs: None

    def prefill(
        self,
        prompts: list[list[int]],
        cache: KeysValues | None = None,
        with_log_probs: bool = False,
        can_share: bool = True,
    ) -> list[Node]:
        """Make the trees. The server reads the prompts with the first request."""
        self.trees = [TokenTree(prompt_index, list(ids)) for prompt_index, ids in enumerate(prompts)]
        self.active = list(range(len(prompts)))
        if with_log_probs:
            try:
                self.prompt_log_probs = [
                    self.model.api.prompt_log_probs(ids) if len(ids) > 1 else [] for ids in prompts
                ]
            except ServerError as error:
                raise ForwardError(str(error)) from error
            self.num_forwards += len(prompts)
        return []

    def run(self, wanted: Iterable[Node]) -> list[Node]:
        """Ask for these nodes; returns those that have been read by it."""
        asked = self.prepare(wanted)
        return self.settle(asked, self.ask([query for _, query in asked]))

    def prepare(self, wanted: Iterable[Node]) -> list[tuple[Node, Asked]]:
        """What is asked of each node. Looks at the trees, and changes nothing."""
        return [(node, self._query(node)) for node in wanted]

    def ask(self, queries: Sequence[Asked]) -> Any:
        """
        One request, or a few where there is too much for one. Touches no tree: another thread may run it.

        Raises:
            ForwardError: the server gives no usable answer.
        """
        try:
            return self.model.ask(queries, self.num_top)
        except ServerError as error:
            raise ForwardError(str(error)) from error

    def settle(self, asked: Sequence[tuple[Node, Asked]], answers: Any) -> list[Node]:
        """Give nodes their readings; returns the nodes that were asked for, and those of greedy walks."""
        self.num_forwards += 1
        read = []
        for (node, (ids, _, _)), steps in zip(asked, answers, strict=True):
            self.num_tokens += len(ids)
            for number, step in enumerate(steps):
                if number:
                    node = node.add_child(steps[number - 1].chosen)
                known = {} if node.reading is None else node.reading.log_probs
                node.reading = self.make_reading(step.top, {**known, **step.log_probs})
                node.is_run = True
                read.append(node)
        return read

    def _query(self, node: Node) -> Asked:
        ids = self.trees[node.prompt_index].ids_to(node)
        is_end = not node.children and node.reading is None
        room = self.model.room(len(ids))
        steps = min(self.model.num_steps, room) if is_end else 1
        tokens = {*self.eos_ids, *node.children} if node.children else {*self.eos_ids}
        return tuple(ids), tuple(sorted(tokens)), max(1, steps)
