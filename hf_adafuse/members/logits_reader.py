"""Makes [`NodeLogprobs`] of the logits of a forward pass, for one local member: calls its logits processors, then reads
off the best tokens and the log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch

from ..trees.nodes import Node
from .node_logprobs import NodeLogprobs, look_up, numbers_of, span_log_probs
from .processors import ProcessorStates, PromptProcessors

# The logits of a pass are read in parts of this many bytes in float32. Those of many nodes over a large vocabulary take
# hundreds of MB, and what is computed of them as much again.
_MOST_BYTES = 2**26


class LogitsReader:
    """
    Makes the [`NodeLogprobs`] of one member's nodes from their logits.

    Args:
        processors (`list[PromptProcessors]`): per prompt.
        num_top (`int`): how many of the best tokens a [`NodeLogprobs`] holds.
        ids_to (`Callable`): all ids of a node's prompt up to it.
        eos_ids (`list[int]`, *optional*): of the member; their scores are of use at the end of every candidate.
    """

    def __init__(
        self,
        processors: list[PromptProcessors],
        num_top: int,
        ids_to: Callable[[Node], list[int]],
        eos_ids: Sequence[int] = (),
    ) -> None:
        self._processors = processors
        self._num_top = num_top
        self._ids_to = ids_to
        self._eos_ids = list(eos_ids)
        self.has_processors = any(processors)
        self._committed: dict[int, set[Node]] = {}  # per prompt, the nodes that were committed while they were unread
        # Per prompt, the processors' states after the last read token before the first unread one of its prefix.
        self._states_before_unread: dict[int, ProcessorStates | None] = {}

    def read(self, nodes: list[Node], is_committed: bool = False) -> None:
        """Give nodes that have logits their `logprobs`. With `is_committed`, also those below forbidden tokens."""
        most = len(nodes)
        if nodes and not self.has_processors:  # else nodes above and below each other are processed together
            assert nodes[0].logits is not None
            most = max(1, _MOST_BYTES // (4 * nodes[0].logits.shape[-1]))
        for start in range(0, len(nodes), most or 1):
            self._read_part(nodes[start : start + most], is_committed)

    def _read_part(self, nodes: list[Node], is_committed: bool) -> None:
        logits = torch.stack([node.logits for node in nodes if node.logits is not None]).float()
        largest = logits.amax(-1)  # NaN where any is
        scores, states, forbidden, processed = self._process(logits, nodes, is_committed)
        asked = [list({*node.children, *self._eos_ids}) for node in nodes]  # what will be asked of each
        numbers = numbers_of(scores, largest, self._num_top, asked)
        for index, (node, found) in enumerate(zip(nodes, numbers, strict=True)):
            # A node lives longer than the pass: it keeps its own row, and a second one only where processors made it.
            row = scores[index].clone() if index in processed else node.logits
            assert row is not None
            node.logprobs = NodeLogprobs(
                row,
                found.log_total,
                found.top,
                found.top_log_probs,
                states=states.get(node),
                is_forbidden=node in forbidden,
                known=found.known,
            )

    def may_forbid(self, prompt_index: int) -> bool:
        """Whether a prompt has processors: they may forbid a token."""
        return bool(self._processors[prompt_index])

    def add_prompts(self, processors: Sequence[PromptProcessors]) -> None:
        """Take the processors of further prompts."""
        self._processors = [*self._processors, *processors]
        self.has_processors = self.has_processors or any(processors)

    def drop(self, prompts: Iterable[int]) -> None:
        """Free what is kept for these finished prompts."""
        for prompt_index in prompts:
            self._committed.pop(prompt_index, None)
            self._states_before_unread.pop(prompt_index, None)

    def missing(self, path: list[Node], tokens: Sequence[int], start: int = 0) -> list[Node]:
        """The unread nodes of this path, and the forgotten ones that lack the score of the path's next token. `tokens`
        are the tokens after each node, and those before `start` need no score. Any other node has the log-probability
        of every token that is asked for."""
        known = [node.logprobs is not None for node in path]
        for index, (node, token) in enumerate(zip(path, tokens, strict=False)):
            if known[index] and index >= start and node.logprobs.is_forgotten:
                known[index] = token in node.logprobs.known
        return [node for node, is_known in zip(path, known, strict=True) if not is_known]

    def span_log_probs(self, path: list[Node], ids: list[int], eos_ids: Sequence[int] | None) -> list[float]:
        """The log-probability (nats) of each id of a span, given the nodes before the ids, and of the end of the text
        after it."""
        return span_log_probs([node.logprobs for node in path], ids, eos_ids)

    def look_up(self, asked: Iterable[tuple[Node, int]]) -> None:
        """Copy the scores of these (node, token) pairs to the host, all together, before they are asked for one
        by one."""
        look_up((node.logprobs, token) for node, token in asked)

    def best_of(self, node: Node, tokens: Sequence[int]) -> int:
        """The most likely of these tokens after a node that has been read. Of equally likely ones, the first."""
        best: int = node.logprobs.best_of(tokens)
        return best

    def remember(self, path: list[Node]) -> None:
        """A path becomes part of the prefix: keep the state of its processors, and note its nodes without
        `logprobs`."""
        prompt_index = path[0].prompt_index
        for above, node in pairwise(path):
            if node.logprobs is None and above.logprobs is not None:
                self._states_before_unread[prompt_index] = above.logprobs.states
        committed = {*self._committed.get(prompt_index, ()), *path}
        self._committed[prompt_index] = {node for node in committed if node.logprobs is None}

    def _process(
        self, logits: torch.Tensor, nodes: list[Node], is_committed: bool
    ) -> tuple[torch.Tensor, dict[Node, ProcessorStates], set[Node], set[int]]:
        """The processed logits, where processors with a state are, which nodes are below forbidden tokens, and the
        rows that processors have made."""
        states, forbidden, processed = dict[Node, ProcessorStates](), set[Node](), set[int]()
        if not self.has_processors:
            return logits, states, forbidden, processed
        order = {id(node): index for index, node in enumerate(nodes)}
        groups: dict[tuple[int, int], list[int]] = {}  # texts of equal length go through the processors together
        for index, node in enumerate(nodes):
            groups.setdefault((node.prompt_index, node.position), []).append(index)
        for (prompt_index, _), indices in sorted(groups.items()):  # by position: what forbids a token comes before it
            # A processor is not asked what may follow a text that it has forbidden: a grammar has no answer.
            if not is_committed:
                committed = self._committed.get(prompt_index, set())
                below = [nodes[i] for i in indices if _is_forbidden(nodes[i], order, logits, committed, forbidden)]
                forbidden.update(below)
                indices = [index for index in indices if nodes[index] not in forbidden]
            processors = self._processors[prompt_index]
            if processors:
                processed.update(indices)
            if processors.is_stateful:
                for index in indices:
                    logits[index], states[nodes[index]] = self._follow(nodes[index], logits[index], states)
            elif indices and processors:
                ids = [self._ids_to(nodes[index]) for index in indices]
                logits[indices] = processors(ids, logits[indices])
        return logits, states, forbidden, processed

    def _follow(
        self, node: Node, logits: torch.Tensor, states: dict[Node, ProcessorStates]
    ) -> tuple[torch.Tensor, ProcessorStates]:
        """The processed logits of one node, where the processors have a state: that of the node above goes on."""
        processors = self._processors[node.prompt_index]
        ids = self._ids_to(node)
        if node.parent is None:
            before = self._states_before_unread.get(node.prompt_index)
        else:
            before = states.get(node.parent) or node.parent.logprobs.states
        return processors.begin(ids, logits) if before is None else processors.advance(ids, logits, before)


def _is_forbidden(
    node: Node, order: dict[int, int], logits: torch.Tensor, committed: set[Node], forbidden: set[Node]
) -> bool:
    """Whether a token on the way to the node, but for committed ones, has been forbidden, in this pass or an earlier
    one. What is known of the node above it is not looked for again."""
    above = node.parent
    if above is None or node in committed:
        return False  # all before a committed token is committed
    is_new = id(above) in order
    if above in forbidden if is_new else above.logprobs.is_forbidden:
        return True
    return bool(logits[order[id(above)]][node.token] == -math.inf if is_new else above.logprobs.forbids(node.token))
