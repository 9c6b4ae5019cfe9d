"""One model with its tokenizer and its trees: propose, score, commit. Knows no other member, nor `generate()`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch

from .config import AdaFuseConfig
from .look_ahead import PassTimes
from .processors import RowProcessors
from .proposals import Proposal, Proposals, Proposer, Walk
from .reader import Reader
from .token_nodes import ForwardError, Node, Trees
from .vocabulary import Vocabulary
from .words import WordRule

# A pass of a few tokens costs like one of two.
_FREE_TOKENS = 8
# On CPU a pass of more tokens than this, over all rows of a batch, costs by the token; narrower than this, by the pass.
_BATCH_TOKENS, _MIN_WIDTH = 32, 4
# Where rows are not filled up, others ride with one of a batch that needs fewer than this: the best by passes counted.
_RIDING_WIDTH = 3
# With a prompt alone, nodes ride and rounds are proposed ahead until its tree holds this many, or one for so many
# tokens of the prefix: more would show in the size of the cache. As measured.
_MOST_HELD, _TOKENS_PER_HELD = 14, 12


class MemberError(Exception):
    """A forward pass of a member failed."""

    def __init__(self, member: Member, reason: str) -> None:
        super().__init__(reason)
        self.member = member


class Member:
    """
    A model that takes part.

    Args:
        name (`str`): how errors and traces call it.
        model (`PreTrainedModel`): never changed.
        vocabulary (`Vocabulary`): its tokenizer.
        eos_ids (`list[int]`): its end-of-sequence ids; with none, it gives the end of the text no probability.
        max_length (`int`, *optional*): the most tokens it reads; `limit` says of what that is the length.
        device (`torch.device`): where its inputs go.
        tree (`Trees`): its token trees, of the backend that suits the model.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        vocabulary: Vocabulary,
        eos_ids: list[int],
        max_length: int | None,
        device: torch.device,
        tree: Trees,
    ) -> None:
        self.name, self.model, self.vocabulary, self.device = name, model, vocabulary, device
        self.eos_ids, self.max_length, self.limit = sorted(set(eos_ids)), max_length, "the context"
        self.num_parameters: int = sum(parameter.numel() for parameter in model.parameters())
        self.times = PassTimes(is_flat=device.type != "cpu")
        self.num_proposals = self.num_wins = 0
        self.tree = tree

    def start(
        self, config: AdaFuseConfig, prompts: list[list[int]], processors: list[RowProcessors], cache: Any = None
    ) -> None:
        """Read the prompts, one list of ids per row; `cache` holds the first columns of them, left-padded."""
        rule = WordRule(config.max_word_tokens, config.word_boundary)
        self._proposer = Proposer(self.vocabulary, set(self.eos_ids), self.max_length, config, rule)
        self._reader = Reader(processors, max(2, config.num_branches), self.tree.ids_to)
        self._riding: list[list[Node]] = [[] for _ in prompts]  # per row, what may ride with its next passes
        self._num_prompt_tokens = [len(ids) for ids in prompts]
        self._guard(lambda: self.tree.prefill(prompts, cache))

    def cost(self, row: int) -> int:
        """About what reading a text costs: parameters times the tokens it takes of a row's prompt."""
        return self.num_parameters * self._num_prompt_tokens[row]

    def root(self, row: int) -> Node:
        return self.tree.rows[row].root

    def has_room(self, row: int) -> bool:
        """Whether the context holds one more token of this row."""
        return self._proposer.has_room(self.root(row))

    def fits(self, row: int, ids: list[int]) -> bool:
        """Whether the context holds these ids after the prefix."""
        return self.max_length is None or self.root(row).position + len(ids) < self.max_length

    def _needed(self, row: int, spans: list[tuple[list[int], bool]]) -> list[Node]:
        """What the spans' scores need and has not been read. The last token of a span, unless the text ends there, only
        begins the next round."""
        paths = [[self.root(row), *self.nodes(row, ids)][: None if ends else -1] for ids, ends in spans]
        return _unread(*paths)

    def _ends(self, row: int, spans: list[tuple[list[int], bool]]) -> list[Node]:
        """The nodes at which the spans end, marked as such."""
        ends = [self.nodes(row, ids)[-1] for ids, _ in spans if ids]
        for node in ends:
            node.is_end = True
        return ends

    def _cut(self, row: int, ids: list[int]) -> list[int]:
        """As many of these ids as the context holds after the prefix."""
        room = len(ids) if self.max_length is None else self.max_length - 1 - self.root(row).position
        return ids[: max(0, room)]

    def take_turn(self, row: int, spans: list[tuple[list[int], bool]], drafts: list[list[int]]) -> Walk[Proposals]:
        """
        Read what the score of the spans on the table needs, in one pass; then propose: what it agrees with is read
        already. Drafts, which may come on the table in a later round, ride where there is room.
        """
        root = self.root(row)
        needed = self._needed(row, spans) or _unread([root])
        self._riding[row] = self._ends(row, spans) + [n for ids in drafts for n in root.path(self._cut(row, ids))]
        if needed:
            yield _unread(needed, self._proposer.first_nodes(root))
        proposals = yield from self._proposer.propose(root)
        self._riding[row] = []
        self.num_proposals += len(proposals.spans)
        return proposals

    def propose_after(self, row: int, ids: list[int]) -> Walk[Proposals]:
        """What it would propose if these ids were committed."""
        return self._proposer.propose(self.root(row).path(ids)[-1])

    def foreseen(self, row: int) -> str:
        """The text with which it would go on, as far as it has read: a draft for the others."""
        return self.vocabulary.text([node.token for node in self._proposer.foreseen(self.root(row))])

    def propose_word(self, row: int) -> Walk[Proposal]:
        """The greedy word of a row, whatever the others say."""
        return self._proposer.propose_word(self.root(row))

    def score(self, row: int, spans: list[tuple[list[int], bool]]) -> Walk[list[list[float]]]:
        """
        Per span: the log-probability (nats) of each of its ids, and of the end of the text where it ends, in at most
        one forward pass.
        """
        self._riding[row] = self._ends(row, spans)
        if needed := self._needed(row, spans):
            yield needed
        self._riding[row] = []
        paths = [[self.root(row), *self.nodes(row, ids)] for ids, _ in spans]
        return [self._log_probs(path, ids, ends) for path, (ids, ends) in zip(paths, spans, strict=True)]

    def read(self, needs: Mapping[int, list[Node]]) -> None:
        """
        Run these nodes, by row, in one forward pass and read their logits. Where rows are filled up to the widest, on
        CPU, only the first ones of a row that needs many. Where more cost little, others ride that are likely to be
        needed: the last tokens of candidates, drafts, what is likely to be read first when it is asked next. With a
        prompt alone none ride beyond what its tree may hold.
        """
        active, is_padded = self.tree.active, self.tree.is_padded
        most = max(_MIN_WIDTH, _BATCH_TOKENS // len(active)) if is_padded and self.device.type == "cpu" else None
        wanted = {row: _unread(nodes)[:most] for row, nodes in needs.items()}
        width = max(map(len, wanted.values()))
        if self.tree.rides_free and (width > 1 or len(active) > 1 or self.times.is_flat):
            is_alone, free = len(active) == 1, _FREE_TOKENS // len(active)
            width = max(width, free) if is_padded or is_alone else max(_RIDING_WIDTH, free)
            for row in active:
                nodes = wanted.get(row, [])
                likely = self._proposer.riders(self.root(row))[: max(0, width - len(nodes))]
                limit = self.slack(row) if is_alone else width
                wanted[row] = _unread(nodes, self._riding[row], likely)[: max(limit, len(nodes))]
        ridden = [node for nodes in wanted.values() for node in nodes]
        with self.times.measured(len(ridden)):
            self._guard(lambda: self.tree.run(ridden))

    def slack(self, row: int) -> int:
        """How many more nodes the tree of a prompt alone may hold that are not needed yet; negative past that."""
        num_held = len(self.tree.rows[row].unsettled())
        return max(_MOST_HELD, self.root(row).position // _TOKENS_PER_HELD) - num_held

    def best_eos(self, node: Node) -> int:
        """The most likely end-of-sequence id after a node; the lowest of equals."""
        scores: list[float] = node.reading.scores[self.eos_ids].tolist()
        return self.eos_ids[scores.index(max(scores))]

    def nodes(self, row: int, ids: list[int]) -> list[Node]:
        return self.root(row).path(ids)

    def commit(self, row: int, ids: list[int]) -> None:
        """Make these ids part of the row's prefix. What was read below a forbidden token is processed only now."""
        path = [self.root(row), *self.nodes(row, ids)]
        readings = [(above.reading, node.token) for above, node in pairwise(path)]
        was_forbidden = any(reading is not None and reading.scores[token] == -math.inf for reading, token in readings)
        self.tree.commit(row, path[1:])
        if was_forbidden:
            root = self.root(row)
            self._reader.read([node for node in [root, *root.run_descendants()] if node.logits is not None])

    def _log_probs(self, nodes: list[Node], ids: list[int], ends: bool) -> list[float]:
        scores = [node.reading.scores[token] for node, token in zip(nodes, ids, strict=False)]
        if ends:
            scores.append(nodes[-1].reading.scores[self.eos_ids].logsumexp(0))
        values = torch.stack(scores).tolist() if scores else []
        return [value - node.reading.log_total for value, node in zip(values, nodes, strict=False)]

    def _guard(self, forward: Callable[[], list[Node]]) -> None:
        try:
            self._reader.read(forward())
        except ForwardError as error:
            raise MemberError(self, str(error)) from (error.__cause__ or error)


def _unread(*paths: list[Node]) -> list[Node]:
    """The nodes of the paths that have not been read, each once."""
    return list({id(node): node for path in paths for node in path if node.reading is None}.values())
