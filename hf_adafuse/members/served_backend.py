"""Token trees of a model behind a server: running nodes is a request.

To propose, a member asks for the most likely tokens and for a greedy walk of several tokens, which become nodes. To
score, it asks for the scored tokens alone. `Node.known_log_probs` holds the log-probabilities known so far, by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..servers.queries import Query, ServerError
from ..trees.backend import Backend, Counted, ForwardError
from ..trees.kv_cache import KeysValues
from ..trees.nodes import Node


class ServedBackend(Backend):
    """
    The trees of a batch of prompts under a model behind a server; see [`Backend`].

    Attributes:
        num_top (`int`): how many of the most likely tokens are asked for; set by the member.
        wanted_tokens (`dict[Node, set[int]]`): by node, the tokens after it whose log-probabilities the next request
            asks for; filled by the member.
        make_logprobs (`Callable`): makes the `logprobs` of a node of what is known; set by the member.
    """

    keeps_keys = can_prefetch = False

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model, device)
        self.num_top = 2
        self.wanted_tokens: dict[Node, set[int]] = {}
        self.make_logprobs: Callable[[Sequence[int], Mapping[int, float]], Any] = lambda top, log_probs: None

    def prefill(
        self,
        prompts: list[list[int]],
        cache: KeysValues | None = None,
        counted: Counted = (),
        can_share: bool = True,
    ) -> list[Node]:
        """Plant the trees. The server reads the prompts with the first request."""
        self._plant(prompts)
        if any(counted):
            asked = [ids if positions else [] for ids, positions in zip(prompts, counted, strict=True)]
            try:
                self.prompt_log_probs = self.model.prompt_log_probs(asked)
            except ServerError as error:
                raise ForwardError(str(error)) from error
            self.num_forwards += sum(map(bool, asked))
        return []

    def run(self, nodes: Iterable[Node]) -> list[Node]:
        """Ask the server for these nodes. Returns the nodes that its answers have filled."""
        work, apply_answer = self.plan(list(nodes))
        return apply_answer(work())

    def plan(self, nodes: list[Node]) -> tuple[Callable[[], Any], Callable[[Any], list[Node]]]:
        """A request for these nodes in two steps: asking, and giving the answers to the nodes; see [`Backend`]."""
        asked = [(node, self._query(node)) for node in nodes]
        return lambda: self.ask([query for _, query in asked]), partial(self._apply_answer, asked)

    def ask(self, queries: Sequence[Query]) -> Any:
        """
        Send one request, or several where it is too large. This touches no tree, so another thread may run it.

        Raises:
            ForwardError: the server gives no usable answer.
        """
        try:
            return self.model.ask(queries, self.num_top)
        except ServerError as error:
            raise ForwardError(str(error)) from error

    def _apply_answer(self, asked: Sequence[tuple[Node, Query]], answers: Any) -> list[Node]:
        """Give nodes their log-probabilities. Returns the nodes that were asked for, and those of greedy walks."""
        self.num_forwards += 1
        read = []
        for (node, query), steps in zip(asked, answers, strict=True):
            self.num_tokens += len(query.ids)
            for number, step in enumerate(steps):
                if number:
                    node = node.add_child(steps[number - 1].chosen)
                node.known_log_probs = {**node.known_log_probs, **step.log_probs}
                if step.top:
                    node.logprobs = self.make_logprobs(step.top, node.known_log_probs)
                node.is_computed = True
                read.append(node)
        return read

    def _query(self, node: Node) -> Query:
        tree = self.trees[node.prompt_index]
        ids = tree.ids_to(node)
        tokens = self.wanted_tokens.pop(node, None) or set()
        steps = 0
        if node.logprobs is None and (node is tree.root or not tokens):
            steps = max(1, min(self._num_steps(node.position - tree.root.position), self.model.room(len(ids))))
        return Query(tuple(ids), tuple(sorted(tokens)), steps)

    def _num_steps(self, depth: int) -> int:
        """
        The number of steps of a greedy walk that begins `depth` tokens below the prefix. Deep below it the walk goes on
        with a long word and takes twice as many steps, so that the word takes fewer requests. It takes no more, since
        other prompts wait until the longest walk of a pass ends, and walks of different lengths are separate requests.
        """
        steps: int = self.model.num_steps
        return steps if depth < 2 * steps else 2 * steps
