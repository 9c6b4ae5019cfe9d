"""The questions to a server and its answers as values, and the errors of servers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


class ServerError(OSError):
    """
    A server gave no usable answer, however often it was asked. The text says why, without API keys.

    Args:
        message (`str`): why, without API keys.
        status (`int`, *optional*): with which it refused the request.
        is_away (`bool`, *optional*, defaults to `False`): whether it answers nothing at all, whatever it is asked.
    """

    def __init__(self, message: str, status: int | None = None, is_away: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.is_away = is_away


def server_error(error: BaseException | None) -> ServerError | None:
    """The `ServerError` that caused an error; `None` where none did."""
    while error is not None and not isinstance(error, ServerError):
        error = error.__cause__
    return error


def is_absence(error: BaseException | None) -> bool:
    """Whether an error comes from a server that has gone away. No other question would be answered either."""
    cause = server_error(error)
    return cause is not None and cause.is_away


class BadAnswer(Exception):
    """An answer that cannot be right. The request is sent again."""


class SpoiltAnswer(BadAnswer):
    """An answer that another request has spoilt. The request is sent again as often as to a busy server."""


@dataclass(frozen=True)
class Query:
    """
    A question: which tokens may follow a text.

    Args:
        ids (`tuple[int]`): the text, at least one token.
        tokens (`tuple[int]`, *optional*): the tokens whose log-probabilities are wanted.
        num_steps (`int`, *optional*, defaults to 1): over how many greedy steps the most likely tokens are wanted, as
            far as the text goes. 0: they are not wanted.
    """

    ids: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    num_steps: int = 1


@dataclass(frozen=True)
class GreedyStep:
    """
    The answer at one step: log-probabilities of tokens after a text, and the token that the server goes on with.

    Args:
        top (`tuple[int]`): the most likely tokens, best first; none where they were not asked for.
        log_probs (`dict[int, float]`): in nats, of the most likely tokens and of those that were asked for; of all
            others nothing is known.
        chosen (`int`): the token with which the text goes on, where another step follows: the most likely one.
    """

    top: tuple[int, ...]
    log_probs: Mapping[int, float]
    chosen: int


def difference(one: float, other: float) -> float:
    """The difference of two log-probabilities (nats); 0 where both tokens have a probability below 0.0001."""
    return abs(one - other) if max(one, other) > math.log(1e-4) else 0.0


def json_object(answer: Any) -> dict[str, Any]:
    """What a server says of its model. Raises `BadAnswer` where that is no JSON object."""
    if not isinstance(answer, dict):
        raise BadAnswer("it says nothing of the model")
    return answer


def check_log_probs(values: Iterable[float]) -> None:
    """Raises `BadAnswer` where a value is not the logarithm of a probability."""
    if any(math.isnan(value) or value > 1e-3 for value in values):
        raise BadAnswer("its numbers are no log-probabilities")


def make_step(log_probs: Mapping[int, float], tokens: Collection[int], num_top: int, chosen: int) -> GreedyStep:
    """
    One step of an answer, checked.

    Args:
        log_probs (`dict[int, float]`): all that the server says.
        tokens (`list[int]`): whose it was asked for.
        num_top (`int`): how many of the most likely tokens it was asked for.
        chosen (`int`): with which it went on: the most likely one.

    Raises:
        BadAnswer: it lacks what was asked for, or its numbers are no log-probabilities.
    """
    if len(log_probs) < num_top or any(token not in log_probs for token in tokens):
        raise BadAnswer("it lacks tokens that were asked for")
    check_log_probs(log_probs.values())
    if math.fsum(math.exp(value) for value in log_probs.values()) > 1.01:
        raise BadAnswer("its probabilities are more than 1 together")
    best = sorted(log_probs, key=lambda token: (-log_probs[token], token))
    if log_probs.get(chosen, -math.inf) < log_probs[best[0]] - 1e-3:
        raise BadAnswer("it went on with a token that is not the most likely one")
    return GreedyStep(tuple(best[:num_top]), dict(log_probs), chosen)
