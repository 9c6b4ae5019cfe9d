"""A member whose model is behind a server, and what it reads after a text: the most likely tokens and those that were
asked for. A token that was not asked for is unknown. It is never taken for impossible.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..trees.nodes import Node
from .member import Member
from .node_logprobs import log_sum
from .processors import PromptProcessors
from .served_backend import ServedBackend


class ServedMember(Member):
    """A [`Member`] whose model is behind a server. Its passes are requests, and other members go on meanwhile."""

    runs_elsewhere = True
    backend: ServedBackend

    @property
    def device_key(self) -> ServedBackend:
        return self.backend

    def _count_parameters(self) -> int:
        return int(self.model.num_parameters())

    def _make_reader(self, processors: list[PromptProcessors], num_top: int) -> Any:
        self.backend.num_top = num_top
        self.backend.make_logprobs = ServedLogprobs
        return ServedLogprobsReader(self.eos_ids, self.backend.wanted_tokens)


class ServedLogprobs:
    """
    Like [`NodeLogprobs`], with the log-probabilities that the server has returned.

    Attributes:
        top (`list[int]`), top_log_probs (`list[float]`): the best tokens, best first, and their log-probabilities.
    """

    __slots__ = ("top", "top_log_probs")

    def __init__(self, top: Sequence[int], log_probs: Mapping[int, float]) -> None:
        self.top = list(top)
        self.top_log_probs = [log_probs[token] for token in top]

    def forbids(self, token: int) -> bool:
        """`False`: no logits processor acts on a member behind a server."""
        return False


class ServedLogprobsReader:
    """
    Answers for a served member what [`LogitsReader`] answers for a local one.

    Args:
        eos_ids (`list[int]`): the member's end-of-sequence ids.
        wanted_tokens (`dict[Node, set[int]]`): the backend's: by node, the tokens that the next request asks for.
    """

    has_processors = False

    def __init__(self, eos_ids: Sequence[int], wanted_tokens: dict[Node, set[int]]) -> None:
        self._eos_ids = list(eos_ids)
        self._wanted_tokens = wanted_tokens

    def read(self, nodes: list[Node], is_committed: bool = False) -> None:
        """Nothing to do: the backend gives nodes their `logprobs`."""

    def remember(self, path: list[Node]) -> None:
        """Nothing to do: there are no processors whose state would be kept."""

    def drop(self, prompts: Iterable[int]) -> None:
        """Nothing to do: nothing is kept for a prompt."""

    def may_forbid(self, prompt_index: int) -> bool:
        """`False`: no logits processor acts on a member behind a server."""
        return False

    def add_prompts(self, processors: Sequence[Any]) -> None:
        """Nothing to do: no logits processor acts on a member behind a server."""

    def missing(self, path: list[Node], tokens: Sequence[int], start: int = 0) -> list[Node]:
        """
        Returns the nodes of this path after which a log-probability is not known, and registers those tokens for the
        next request: after each node the path's next token, after its last one the end of the text. The first `start`
        tokens are not scored and need nothing: a server reads them with a later node.
        """
        scored = [[token] for token in tokens] + [self._eos_ids] * (len(path) - len(tokens))
        missing = []
        for node, after in [*zip(path, scored, strict=False)][start:]:
            unknown = [token for token in after if token not in node.known_log_probs]
            if unknown:
                self._wanted_tokens.setdefault(node, set()).update(unknown)
                missing.append(node)
        return missing

    def best_of(self, node: Node, tokens: Sequence[int]) -> int:
        """The most likely of these tokens, whose log-probabilities are known; see [`LogitsReader`]."""
        return max(tokens, key=lambda token: float(node.known_log_probs[token]))

    def look_up(self, asked: Iterable[tuple[Node, int]]) -> None:
        """Nothing to do: the log-probabilities are on the host."""

    def span_log_probs(self, path: list[Node], ids: list[int], eos_ids: Sequence[int] | None) -> list[float]:
        """The log-probability (nats) of each id of a span, and of the end of the text after it; see
        [`LogitsReader`]."""
        values = [float(node.known_log_probs[token]) for node, token in zip(path, ids, strict=False)]
        if eos_ids is not None:
            values.append(log_sum([float(path[-1].known_log_probs[token]) for token in eos_ids]))
        return values
