"""`ServerApi`, what a member asks of its server whatever its kind. Each kind of server is a subclass."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .daemon_threads import map_at_once
from .queries import GreedyStep, Query, ServerError, difference
from .transport import Connection

T = TypeVar("T")

# The most requests that are under way at a time to answer one set of queries.
_REQUESTS_AT_A_TIME = 4
# How the most likely token is taken, whatever a server was started with or a model's generation config says.
GREEDY = {"temperature": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
          "frequency_penalty": 0.0}  # fmt: skip


@dataclass(frozen=True)
class ServerInfo:
    """
    What a server says about the model that it serves.

    Args:
        model (`str`): the name by which requests call the model.
        source (`str`): from where the server loaded it.
        max_length (`int`, *optional*): tokens of a text and what comes after it.
    """

    model: str
    source: str
    max_length: int | None


@dataclass(frozen=True)
class Fingerprint:
    """
    Questions to a server and its answers, by which it is recognized later.

    Args:
        queries (`list[Query]`): the questions; each asks for one token.
        log_probs (`list[float]`): per question, the log-probability (nats) of that token.
        most_difference (`float`): nats by which it may differ when it is asked again.
    """

    queries: Sequence[Query]
    log_probs: Sequence[float]
    most_difference: float


@dataclass
class Traffic:
    """
    Counts of the requests to a server.

    Attributes:
        num_requests (`int`): answered ones.
        num_sent (`int`): tokens of the texts in them.
        num_cached (`int`): those of them that the server says it had read before; 0 where it says nothing.
    """

    num_requests: int = 0
    num_sent: int = 0
    num_cached: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def count(self, num_sent: int, num_cached: int) -> None:
        """Count a request that was answered. Any thread may call this."""
        with self._lock:
            self.num_requests += 1
            self.num_sent += num_sent
            self.num_cached += num_cached


class ServerApi(ABC):
    """
    What a member asks of its server. Each kind of server is a subclass.

    Args:
        connection (`Connection`): the connection to the server.
        model (`str`, *optional*): its name there; by default the one that is served.
    """

    most_top = 20
    most_tokens = 128  # the most tokens whose log-probabilities one request asks for
    most_queries = 256  # the most queries in one request
    most_answers = 1024  # the most queries times tokens: each query gets every token that its request asks for

    def __init__(self, connection: Connection, model: str | None = None) -> None:
        self.connection = connection
        self.model = model
        self.traffic = Traffic()
        self.known: Fingerprint | None = None
        self._num_seen = 0  # the value of `num_absences` at the last successful comparison

    def __getstate__(self) -> dict[str, Any]:
        # What counts requests is left out, so that what has been used is pickled as what has not; and whoever takes it
        # up from there compares first.
        return {**self.__dict__, "traffic": None, "_num_seen": -1}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, traffic=Traffic())

    @property
    def was_away(self) -> bool:
        """Whether the server may have been restarted, with another model, since it was last compared."""
        return self._num_seen != self.connection.num_absences

    def trust(self, known: Fingerprint, num_absences: int) -> None:
        """Take the server as known. `num_absences`: how often it had been away before it was compared."""
        self.known = known
        self._num_seen = num_absences

    def check_same(self) -> None:
        """
        Where the server has been away, ask again what its fingerprint was made of.

        Raises:
            ServerError: it says something else, or nothing.
        """
        known, num_absences = self.known, self.connection.num_absences  # not those that come while it is asked
        if known is None or not self.was_away:
            return
        queries = known.queries
        steps = [of_query[0] for of_query in self.ask(queries, 2)]
        now = [step.log_probs[query.tokens[0]] for step, query in zip(steps, queries, strict=True)]
        if max(map(difference, now, known.log_probs)) > known.most_difference:
            raise ServerError(
                f"the server at {self.connection.url} has been away and is another model since: its log-probabilities "
                "are others than before"
            )
        self.trust(known, num_absences)

    @abstractmethod
    def about(self) -> ServerInfo:
        """
        What the server says about its model.

        Raises:
            ServerError: there is no answer, or no such model.
        """

    @abstractmethod
    def ask(self, queries: Sequence[Query], num_top: int) -> list[list[GreedyStep]]:
        """
        The steps of each query: as many as it has, at least one, or fewer where the text ends; the tokens that it asks
        for are known of the first.

        Raises:
            ServerError: there is no usable answer.
        """

    def tokenize(self, text: str) -> list[int] | None:
        """A text in the server's tokens, without special ones; `None` where it cannot be asked."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        try:
            return self.connection.post("/tokenize", body, lambda answer, _: [int(token) for token in answer["tokens"]])
        except ServerError as error:
            if error.status in (403, 404, 405, 410, 501):
                return None  # a gateway before it may pass completions only
            raise

    def prompt_log_probs(self, ids: Sequence[int]) -> list[float]:
        """The log-probability (nats) of each id of a text but the first."""
        queries = [Query(tuple(ids[:end]), (ids[end],), 0) for end in range(1, len(ids))]
        return [steps[0].log_probs[query.tokens[0]] for query, steps in zip(queries, self.ask(queries, 1), strict=True)]

    def in_requests(self, queries: Sequence[Query], post: Callable[[list[Query], list[int]], Sequence[T]]) -> list[T]:
        """
        Split queries into requests, and send several at a time.

        Args:
            queries (`list[Query]`): what the server is asked.
            post (`Callable`): `post(group, tokens)`: what a request for these queries, and for these tokens after each,
                gives for each.
        """
        groups = list(self.requests(queries))
        found: dict[int, T] = {}
        answered = map_at_once(lambda one: post(*one[1:]), groups, _REQUESTS_AT_A_TIME)
        for (indices, _, _), answers in zip(groups, answered, strict=True):
            found.update(zip(indices, answers, strict=True))
        return [found[index] for index in range(len(queries))]

    def requests(self, queries: Sequence[Query]) -> Iterator[tuple[list[int], list[Query], list[int]]]:
        """
        Queries in groups that fit into a request each: alike in steps, and with few tokens to ask for.

        Returns:
            per group the indices, the queries, and all tokens that they ask for.
        """
        for num_steps in sorted({query.num_steps for query in queries}):
            indices: list[int] = []
            tokens: set[int] = set()
            for index, query in enumerate(queries):
                if query.num_steps != num_steps:
                    continue
                joined = tokens.union(query.tokens)
                size = (len(indices) + 1) * len(joined)
                is_full = (
                    len(joined) > self.most_tokens or size > self.most_answers or len(indices) == self.most_queries
                )
                if indices and is_full:
                    yield indices, [queries[i] for i in indices], sorted(tokens)
                    indices, joined = [], set(query.tokens)
                indices.append(index)
                tokens = joined
            yield indices, [queries[i] for i in indices], sorted(tokens)
