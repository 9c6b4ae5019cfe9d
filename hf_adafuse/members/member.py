"""`Member`, the interface to one model in a call: read prompts, run tree nodes, score spans, commit.

[`LocalMember`] and [`ServedMember`] implement what depends on where the model runs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch

from ..trees.adapters import base_model
from ..trees.backend import Backend, ForwardError
from ..trees.nodes import Node, missing_nodes
from ..trees.pass_costs import costs_of
from ..trees.pass_policy import room_in_tree
from .chat_ending import ChatEnding, chat_endings, ending_of
from .ngram_drafts import NgramDrafts
from .node_logprobs import NodeLogprobs, entropy_of
from .passes import Pass, planned_pass, unread
from .processors import ProcessorError, PromptProcessors
from .prompt_content import PromptEvidence
from .prompt_nll import asks_for_examples, counted_positions, nll_at, prompt_nll
from .vocabulary import Vocabulary


class MemberError(Exception):
    """A forward pass of a member failed."""

    def __init__(self, member: Member, reason: str) -> None:
        super().__init__(reason)
        self.member = member


class Span(NamedTuple):
    """
    A candidate in one member's tokens.

    Args:
        ids (`list[int]`): its ids below the member's prefix.
        ends (`bool`): whether the text ends after it.
        start (`int`, *optional*, defaults to 0): how many of the first ids are read without being scored.
    """

    ids: list[int]
    ends: bool
    start: int = 0


class Member(ABC):
    """
    One model in a call: it reads prompts, runs tree nodes, scores spans and commits.

    Args:
        name (`str`): its name in errors and traces.
        model (`PreTrainedModel`): the model. Nothing of it is changed.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer.
        vocabulary (`Vocabulary`): what that makes of text.
        has_main_tokenizer (`bool`): whether that gives the same ids as the main model's tokenizer for every text, so
            that the member takes the main model's ids as they are. `True` for the main model itself.
        eos_ids (`list[int]`): its end-of-sequence ids. A member without any gives the end of the text no probability.
        max_length (`int`, *optional*): the most tokens that it reads.
        limit (`str`): what sets that limit, like `"the context"`.
        device (`torch.device`): the device of its inputs.
        backend (`Backend`): runs its token trees.

    Attributes:
        runs_elsewhere (`bool`): whether its passes are made outside this process, while other members go on.
        num_parameters (`int`): the number of the model's parameters. The cheapest member proposes first.
        costs (`PassCosts`): how long its passes have taken so far, in seconds by their number of tokens.
        num_proposals (`int`), num_wins (`int`): how many candidates it has proposed in this call, and how many won.
        prompt_evidence (`list[PromptEvidence]`): per prompt that has been read, what it says about whom to trust, where
            `start` was asked for it.
        prompt_and_question_nlls (`list[tuple[float, float]]`): per prompt that has been read, its NLL (nats per byte)
            of the whole prompt and of the prompt's last part, where `start` was asked for it.
    """

    runs_elsewhere: ClassVar[bool] = False

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        vocabulary: Vocabulary,
        has_main_tokenizer: bool,
        eos_ids: Iterable[int],
        max_length: int | None,
        limit: str,
        device: torch.device,
        backend: Backend,
    ) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.has_main_tokenizer = has_main_tokenizer
        self.eos_ids = sorted(set(eos_ids))
        self.max_length = max_length
        self.limit = limit
        self.device = device
        self.backend = backend
        self.num_parameters = self._count_parameters()
        self.costs = costs_of(base_model(model), device)
        self.num_proposals = self.num_wins = 0
        self.prompt_evidence: list[PromptEvidence] = []
        self.prompt_and_question_nlls: list[tuple[float, float]] = []

    def start(
        self,
        prompts: list[list[int]],
        processors: list[PromptProcessors],
        num_top: int,
        cache: Any = None,
        weighting: str | None = None,
        can_share: bool = True,
        with_facts: bool = False,
    ) -> None:
        """
        Take the prompts of a call. `read_prompts` reads them.

        Args:
            prompts, processors, cache, can_share: as of [`MemberInputs`].
            num_top (`int`): how many of the best tokens are read off each node.
            weighting (`str`, *optional*): the value of `model_weights` for which `prompt_evidence` is kept. `None`: it
                is not kept.
            with_facts (`bool`, *optional*, defaults to `False`): whether `prompt_and_question_nlls` are kept.
        """
        self._reader = self._make_reader(processors, num_top)
        self._prompts = list(prompts)
        self._cache = cache
        self._weighting = weighting
        self._can_share = can_share
        self._with_facts = with_facts
        self._drafts = NgramDrafts(self.backend, self.eos_ids, self.room_after)

    def add_prompts(self, prompts: list[list[int]], processors: list[PromptProcessors]) -> None:
        """Take further prompts while others go on; as of `start`."""
        self._prompts += prompts
        self._reader.add_prompts(processors)

    def read_prompts(self, number: int) -> None:
        """
        Read the next `number` prompts, while earlier ones go on.

        Raises:
            MemberError: a forward pass failed.
        """
        backend = self.backend
        first = len(backend.trees)
        weighting = self._weighting
        prompts = self._prompts[first : first + number]
        are_chats = self._are_chats(prompts)
        counted: list[list[int]] = [[] for _ in prompts]
        if weighting is not None:
            pairs = zip(prompts, are_chats, strict=True)
            counted = [counted_positions(self.vocabulary, ids, weighting, is_chat) for ids, is_chat in pairs]
        in_all = [counted_positions(self.vocabulary, ids, "prompt") for ids in prompts] if self._with_facts else counted
        options = in_all, self._can_share
        self._drafts.add_texts(prompts)
        self._read(
            lambda: backend.admit(prompts, *options) if first else backend.prefill(prompts, self._cache, *options)
        )
        log_probs = backend.prompt_log_probs or [[]] * len(prompts)  # there are none where none counts
        if weighting is not None:
            nlls = list(map(partial(nll_at, self.vocabulary), prompts, log_probs, counted))
            self._note_evidence(first, nlls, are_chats, weighting)
        if self._with_facts:
            nll = partial(prompt_nll, self.vocabulary)
            self.prompt_and_question_nlls += [
                (nll(*pair, "prompt"), nll(*pair, "question")) for pair in zip(prompts, log_probs, strict=True)
            ]

    def _are_chats(self, prompts: list[list[int]]) -> list[bool]:
        """Per prompt, whether it ends as a chat, where that matters."""
        is_of_use = self._weighting is not None and asks_for_examples(self._weighting)
        endings = self.chat_endings if is_of_use else []
        return [ending_of(ids, endings) is not None for ids in prompts]

    def _note_evidence(self, first: int, nlls: list[float], are_chats: list[bool], weighting: str) -> None:
        """Note what prompts say about this member: those from number `first` on, with these NLLs."""
        unknown = [row for row, nll in enumerate(nlls) if math.isnan(nll)]
        of_content = [(math.nan, 0)] * len(nlls)
        if weighting == "examples_or_content":
            found = self._content_divergences([first + row for row in unknown])
            for row, divergence_and_bytes in zip(unknown, found, strict=True):
                of_content[row] = divergence_and_bytes
        evidence = zip(nlls, of_content, are_chats, strict=True)
        self.prompt_evidence += [PromptEvidence(nll, *of_prompt, is_chat) for nll, of_prompt, is_chat in evidence]

    def _content_divergences(self, prompt_indices: Sequence[int]) -> list[tuple[float, int]]:
        """How far the content of each of these prompts, which have been read, moves the member's next token, in nats,
        and how many bytes that content has; see [`PromptEvidence`]. NaN and 0 where that is not known."""
        return [(math.nan, 0)] * len(prompt_indices)

    @cached_property
    def chat_endings(self) -> list[ChatEnding]:
        """How chats end under its template."""
        return chat_endings(self.tokenizer, self.vocabulary)

    @property
    def num_active(self) -> int:
        """The number of prompts that are being decoded."""
        return len(self.backend.active)

    @property
    def has_processors(self) -> bool:
        """Whether logits processors act on this member. They may forbid a text."""
        return bool(self._reader.has_processors)

    def may_forbid(self, prompt_index: int) -> bool:
        """Whether it may forbid what others propose for a prompt: by logits processors, or since it has no token for
        the end of the text."""
        return not self.eos_ids or bool(self._reader.may_forbid(prompt_index))

    @property
    @abstractmethod
    def device_key(self) -> Any:
        """What this member computes on. Members with different keys can work at the same time."""

    @abstractmethod
    def _count_parameters(self) -> int:
        """The number of the model's parameters, by which members take turns: the cheapest first."""

    @abstractmethod
    def _make_reader(self, processors: list[PromptProcessors], num_top: int) -> Any:
        """What reads log-probabilities off the nodes that its backend has computed, `num_top` of the best tokens of
        each."""

    def prefill_cost(self, prompt_index: int) -> int:
        """A measure of what reading a prompt costs: parameters times tokens."""
        return self.num_parameters * len(self._prompts[prompt_index])

    def root(self, prompt_index: int) -> Node:
        """The last node of a prompt's prefix."""
        return self.backend.trees[prompt_index].root

    def entropy(self, prompt_index: int) -> float | None:
        """The entropy (nats) of the token after a prompt's prefix; `None` where it is not known in full."""
        logprobs = self.root(prompt_index).logprobs
        return entropy_of(logprobs) if isinstance(logprobs, NodeLogprobs) else None

    def path(self, prompt_index: int, ids: Iterable[int]) -> list[Node]:
        """The root of a prompt's tree and the nodes of these ids below it, made where there are none."""
        root = self.root(prompt_index)
        return [root, *root.add_path(ids)]

    def room_after(self, node: Node) -> float:
        """The number of tokens that fit into the member's context after a node."""
        return float("inf") if self.max_length is None else self.max_length - 1 - node.position

    def needed_to_score(self, prompt_index: int, spans: Iterable[Span]) -> list[Node]:
        """
        Returns the unread nodes that the scores of these spans need. It creates the nodes that are not there, and turns
        forgotten ones back into nodes that no pass has computed. A span's last token needs no node of its own, unless
        the text ends after it.
        """
        needed: dict[Node, None] = {}
        for span in spans:
            path = self.path(prompt_index, span.ids)[: None if span.ends else -1]
            needed.update(dict.fromkeys(self._reader.missing(path, span.ids, span.start)))
        for node in needed:
            self._read_again_if_forgotten(node)
        return list(needed)

    def mark_ends(self, prompt_index: int, spans: Iterable[Span]) -> list[Node]:
        """Marks the last node of each span as the end of a candidate, and returns these nodes."""
        ends = [self.path(prompt_index, span.ids)[-1] for span in spans if span.ids]
        for node in ends:
            node.ends_candidate = True
        return ends

    def log_probs(self, prompt_index: int, spans: Iterable[Span]) -> list[list[float]]:
        """Per span that has been read, the log-probability (nats) of each scored id, and of the end of the text where
        the span ends it."""
        paths = [(self.path(prompt_index, ids)[start:], ids[start:], ends) for ids, ends, start in spans]
        self._reader.look_up(pair for path, ids, _ in paths for pair in zip(path, ids, strict=False))
        read = self._reader.span_log_probs
        return [read(path, ids, self.eos_ids if ends else None) for path, ids, ends in paths]

    def forget_logits(self, prompt_index: int) -> None:
        """Forget the computed nodes below a prompt's prefix: free their logits. The numbers that were copied to the
        host stay."""
        _forget(self.root(prompt_index).computed_descendants())

    def forget_passed(self, node: Node) -> None:
        """Forget a read node, its siblings and the nodes below these siblings: free their logits. Nothing is done at
        the root."""
        if node.parent is not None and node is not self.root(node.prompt_index):
            _forget([node])
            for other in node.parent.children.values():
                if other is not node and other.is_computed:
                    _forget([other, *other.computed_descendants()])

    @property
    def can_forget(self) -> bool:
        """Whether nodes may be forgotten while further texts may come: a node from which such a text goes on is then
        computed again. With logits processors they may not, as it is looked up in the scores what those have
        forbidden."""
        return self.backend.can_run_again and not self.has_processors

    def _read_again_if_forgotten(self, node: Node) -> None:
        """Make a forgotten node one that is not computed."""
        if isinstance(node.logprobs, NodeLogprobs) and node.logprobs.is_forgotten:
            node.is_computed = False
            node.logits = node.logprobs = None
            self.backend.forget(node)

    def best_end(self, prompt_index: int, ids: list[int]) -> int:
        """The most likely end-of-sequence id after these ids, which have been scored with the end of the text unless
        there is only one."""
        if len(self.eos_ids) == 1:
            return self.eos_ids[0]
        return int(self._reader.best_of(self.path(prompt_index, ids)[-1], self.eos_ids))

    def logits(self, prompt_index: int, span: Span) -> list[float]:
        """The processed logit of each id of a span that has been read, and of the most likely end of sequence where the
        span ends the text."""
        nodes = self.path(prompt_index, span.ids)
        ends = [self.best_end(prompt_index, span.ids)] if span.ends and self.eos_ids else []
        return [float(node.logprobs.row[token]) for node, token in zip(nodes, [*span.ids, *ends], strict=False)]

    def begin_pass(
        self, needs: Mapping[int, tuple[list[Node], list[Node]]], likely: Callable[[int], list[Node]]
    ) -> Pass:
        """
        Plan one forward pass, or one request to a server. It is not run yet.

        Args:
            needs (`dict[int, tuple]`): by the index of each prompt that waits, the unread nodes that it needs, and
                nodes that are useful.
            likely (`Callable`): `likely(prompt_index)` gives the nodes that a prompt may need when this member is asked
                next.

        Returns:
            [`Pass`]. It leaves out some of the needed nodes where they are more than a pass should hold. Of a prompt
            whose prefix has more unread tokens than that, it reads the first of these, and nothing else.
        """
        behind = {index: part for index in needs if (part := self._first_unread_part(index, len(needs))) is not None}

        def likely_after(prompt_index: int, needed: list[Node]) -> list[Node]:
            return [] if prompt_index in behind else [*self._drafts.after(needed), *likely(prompt_index)]

        def finish(result: Callable[[], Any]) -> list[Node]:
            nodes = self._read(lambda: passed.finish(result))
            for prompt_index in behind:
                self._settle(prompt_index)
            return nodes

        parts = {prompt_index: ([part], list[Node]()) for prompt_index, part in behind.items()}
        passed = planned_pass(self.backend, self.costs, {**needs, **parts}, likely_after)
        return Pass(passed.work, finish)

    def room_in_tree(self, prompt_index: int) -> int:
        """How many more nodes that nobody needs yet the tree of a single prompt may hold; negative where it holds too
        many."""
        tree = self.backend.trees[prompt_index]
        return room_in_tree(len(tree.unsettled()), tree.root.position, self.backend.policy)

    def state(self, prompt_index: int) -> tuple[list[int], Any]:
        """All ids of a prompt, and a copy of their keys and values where the backend keeps them."""
        return self.backend.trees[prompt_index].ids, self.backend.keys_values(prompt_index)

    def drop(self, finished: set[int]) -> None:
        """Free what is kept for these finished prompts."""
        self.backend.drop(finished)
        self._reader.drop(finished)

    def commit(self, prompt_index: int, ids: list[int], is_last: bool = False) -> None:
        """Append ids to a prompt's prefix; `is_last`: nothing comes after them. Logits below a forbidden token are
        processed only now."""
        path = self.path(prompt_index, ids)
        was_forbidden = self.has_processors and any(
            above.logprobs and above.logprobs.forbids(node.token) for above, node in pairwise(path)
        )
        if was_forbidden:
            self._read(lambda: [node for node in path[1:] if node.logits is not None], is_committed=True)
        if not is_last:
            self._read_again_if_forgotten(path[-1])
        self._reader.remember(path)
        self._drafts.add_end(prompt_index, ids)
        self.backend.commit(prompt_index, path[1:])
        if was_forbidden:
            below = self.root(prompt_index).computed_descendants()
            self._read(lambda: [node for node in below if node.logits is not None])

    def read_to_end(self, prompts: Mapping[int, bool]) -> None:
        """
        Read the prefix of these prompts, as a returned cache must hold it. Where the backend keeps no keys, nothing is
        read.

        Args:
            prompts (`dict[int, bool]`): by the index of a prompt, whether an end-of-sequence token comes after its
                prefix. Else the last token of the prefix is not read.

        Raises:
            MemberError: the forward pass failed.
        """
        if not self.backend.keeps_keys:
            return
        roots = {prompt_index: self.root(prompt_index) for prompt_index in prompts}
        last = {prompt_index: root if prompts[prompt_index] else root.parent for prompt_index, root in roots.items()}
        while behind := {index: node for index, node in last.items() if node is not None and not node.is_computed}:
            nodes = [self._first_unread_part(index, len(behind)) or node for index, node in behind.items()]
            self._read(partial(self.backend.run, nodes))
            for prompt_index in behind:
                self._settle(prompt_index)

    def _most_unread(self, num_prompts: int) -> int | None:
        """How many unread tokens of the prefix of each of so many prompts one pass reads; `None`: all of them, as a
        server does."""
        return None

    def _first_unread_part(self, prompt_index: int, num_prompts: int) -> Node | None:
        """Where a prompt's prefix has more unread tokens than one pass of so many prompts reads, the last token that it
        reads; `None` where it has not."""
        most, missing = self._most_unread(num_prompts), missing_nodes([self.root(prompt_index)])
        return None if most is None or len(missing) <= most else missing[most - 1]

    def _settle(self, prompt_index: int) -> None:
        """What has been read of a prompt's prefix is settled, and its logits are freed."""
        self._reader.remember(self.root(prompt_index).lineage())
        self.backend.commit(prompt_index, [])

    def _read(self, forward: Callable[[], list[Node]], is_committed: bool = False) -> list[Node]:
        try:
            nodes = forward()
            new = unread(nodes)
            self._reader.read(nodes, is_committed)
            self._drafts.add_next_tokens(new)
            return nodes
        except (ForwardError, ProcessorError) as error:
            raise MemberError(self, str(error)) from (error.__cause__ or error)


def _forget(nodes: Iterable[Node]) -> None:
    for node in nodes:
        node.logits = None
        if isinstance(node.logprobs, NodeLogprobs):
            node.logprobs.forget()
