"""llama.cpp's server, by its `/completion` with prompts of token ids.

The server returns the most likely tokens, as many as are asked for, and the token that it goes on with. For any other
token the request forces the server to go on with it, which changes no probability. It returns nothing for a token that
ends within a character. Its log-probabilities depend on how a text is cut into passes and on what else the server reads
at the time: in 4 bits by some tenths of a nat, by less with `llama-server --parallel 4`, where each slot has a context
of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from .api import ServerApi, ServerInfo
from .queries import BadAnswer, GreedyStep, Query, ServerError, json_object, make_step
from .transport import request_gate

# Tokens asked for at first: most of what other members propose is among them, and an answer stays small.
_MANY = 64
# Tokens of one text that are asked for one by one, which takes a request each; of more, the whole vocabulary is.
_FEW = 16
# Far above any logit: the token is the next one.
_FORCED = 1e4
# The logarithm of the smallest number that the server has; where a probability is smaller, it says -3.4e38.
_LEAST = -103.28
_FIELDS = ["index", "model", "tokens", "tokens_evaluated", "completion_probabilities", "timings/cache_n",
           "generation_settings/seed"]  # fmt: skip


@dataclass(frozen=True)
class _Context:
    """
    What a server holds of all texts that it reads at a time: its slots may share it, and all that are at work lose
    their texts where it is too little.

    Args:
        length (`int`): in tokens.
        num_slots (`int`): so many texts are read at a time; more wait there.
    """

    length: int = 0
    num_slots: int = 1

    def __call__(self, requests: Sequence[Sequence[int]]) -> bool:
        """Whether requests, each by the sizes of its texts, fit in together."""
        sizes = sorted(size for request in requests for size in request)
        return sum(sizes[-self.num_slots :]) <= self.length


class LlamaCppApi(ServerApi):
    """[`ServerApi`] of llama.cpp."""

    most_queries = 16
    _vocab_size, _letter, _context = 0, 0, _Context()

    def about(self) -> ServerInfo:
        props = self.connection.get("/props", json_object)
        models = self.connection.get("/v1/models", json_object)
        try:
            entry = models["data"][0]
            name, self._vocab_size = str(entry["id"]), int((entry.get("meta") or {})["n_vocab"])
            length, num_slots = int(props["default_generation_settings"]["n_ctx"]), int(props["total_slots"])
            self._context = _Context(length, num_slots)
        except (LookupError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__} in what it says of the model"
            raise ServerError(f"the server at {self.connection.url} is not llama.cpp's: {reason}") from error
        names = [name, *(entry.get("aliases") or ())]
        if self.model is not None and self.model not in names:
            raise ServerError(f"the server at {self.connection.url} serves {name!r}, not {self.model!r}")
        self._letter = self.tokenize("a")[-1]
        return ServerInfo(name, name, length)

    def ask(self, queries: Sequence[Query], num_top: int) -> list[list[GreedyStep]]:
        most = min(self._vocab_size, max(num_top, _MANY if any(query.tokens for query in queries) else 1))
        found: list[list[GreedyStep]] = [[] for _ in queries]
        walks = [index for index, query in enumerate(queries) if query.num_steps > 1]
        for index, steps in zip(walks, self._ask([queries[index] for index in walks], most), strict=True):
            found[index] = steps
        # A walk is empty where it begins within a character.
        rest = [index for index, steps in enumerate(found) if not steps]
        for index, steps in zip(rest, self._ask([_first(queries[i]) for i in rest], most, self._letter), strict=True):
            found[index] = steps
        self._add_named(queries, found)
        return [
            [replace(step, top=step.top[:num_top] if query.num_steps else ()) for step in steps]
            for query, steps in zip(queries, found, strict=True)
        ]

    def tokenize(self, text: str) -> list[int]:
        body = {"content": text, "add_special": False, "parse_special": False}
        return self.connection.post("/tokenize", body, lambda answer, _: [int(token) for token in answer["tokens"]])

    def _add_named(self, queries: Sequence[Query], found: list[list[GreedyStep]]) -> None:
        """Tokens that are asked for and are not among the most likely ones."""
        missing = [
            [token for token in query.tokens if token not in steps[0].log_probs]
            for query, steps in zip(queries, found, strict=True)
        ]
        whole = {index for index, tokens in enumerate(missing) if len(tokens) > _FEW}
        for token in sorted({token for tokens in missing for token in tokens}):
            indices = [index for index, tokens in enumerate(missing) if token in tokens and index not in whole]
            answers = self._ask([_first(queries[index]) for index in indices], 1, token)
            for index, steps in zip(indices, answers, strict=True):
                if steps:
                    found[index][0] = _with(found[index][0], steps[0], [token])
                else:
                    whole.add(index)
        for index in sorted(whole):
            ((step,),) = self._ask([_first(queries[index])], self._vocab_size, self._letter)
            found[index][0] = _with(found[index][0], step, missing[index])

    def _ask(self, queries: Sequence[Query], most: int, forced: int | None = None) -> list[list[GreedyStep]]:
        """Steps with so many of the most likely tokens, up to the first that ends within a character; with a token that
        it is made to go on with, one step, which knows that token too."""
        found: list[list[GreedyStep]] = [[] for _ in queries]
        for indices, group in self._groups(queries):
            body: dict[str, Any] = {
                "prompt": [list(query.ids) for query in group],
                "n_predict": max(1, group[0].num_steps),
                "n_probs": most,
                "temperature": 0,
                "samplers": ["temperature"],  # whatever else the server was started with
                "cache_prompt": True,
                "return_tokens": True,
                "response_fields": _FIELDS,
            }
            if forced is not None:
                body["logit_bias"] = [[forced, _FORCED]]

            def read(answer: Any, request_id: str, group: list[Query] = group) -> list[list[GreedyStep]]:
                return self._read(answer, request_id, group, most, forced)

            def turn(end: float, sizes: Sequence[int] = tuple(map(_size, group))) -> AbstractContextManager[None]:
                return request_gate(self.connection.url, self._context).passing(sizes, end)

            answers = self.connection.post("/completion", body, read, _named, turn)
            for index, steps in zip(indices, answers, strict=True):
                found[index] = steps
        return found

    def _groups(self, queries: Sequence[Query]) -> Iterator[tuple[list[int], list[Query]]]:
        """As of `requests`; the texts of each fit into the context together."""
        for indices, group, _ in self.requests([replace(query, tokens=()) for query in queries]):
            start = 0
            for end in range(1, len(group) + 1):
                if end == len(group) or not self._context([tuple(map(_size, group[start : end + 1]))]):
                    yield indices[start:end], group[start:end]
                    start = end

    def _read(
        self, answer: Any, request_id: str, group: list[Query], most: int, forced: int | None
    ) -> list[list[GreedyStep]]:
        answers = answer if isinstance(answer, list) else [answer]
        answers = sorted(answers, key=lambda one: int(one["index"]))
        sent = [len(query.ids) for query in group]
        if [int(one["index"]) for one in answers] != list(range(len(group))):
            raise BadAnswer(f"it answers {len(answers)} of {len(group)} prompts")
        if [int(one["tokens_evaluated"]) for one in answers] != sent or any(
            one["generation_settings/seed"] != _seed(request_id) for one in answers
        ):
            raise BadAnswer("it answers another request")
        if any(one["model"] != self.model for one in answers if self.model is not None):
            raise BadAnswer("it answers for another model")
        found = [_steps(one, query, most, forced) for one, query in zip(answers, group, strict=True)]
        if forced == self._letter and not all(found):
            raise BadAnswer("it lacks tokens that were asked for")
        self.traffic.count(sum(sent), sum(int(one["timings/cache_n"]) for one in answers))
        return found


def _size(query: Query) -> int:
    """Of a text and what comes after it, in tokens."""
    return len(query.ids) + max(1, query.num_steps)


def _first(query: Query) -> Query:
    return replace(query, tokens=(), num_steps=0)


def _with(step: GreedyStep, other: GreedyStep, tokens: Sequence[int]) -> GreedyStep:
    """A step that knows these tokens too, as another of the same text does."""
    return replace(step, log_probs={**{token: other.log_probs[token] for token in tokens}, **step.log_probs})


def _steps(one: Any, query: Query, most: int, forced: int | None) -> list[GreedyStep]:
    tokens = [int(token) for token in one["tokens"]]
    if not 1 <= len(tokens) <= max(1, query.num_steps) or (forced is not None and tokens != [forced]):
        raise BadAnswer("it goes on otherwise than asked")
    steps = []
    for token, entry in zip(tokens, one.get("completion_probabilities") or (), strict=False):
        if int(entry["id"]) != token:
            break  # it leaves out a token that ends within a character
        values = {int(top["id"]): max(float(top["logprob"]), _LEAST) for top in entry["top_logprobs"]}
        if len(values) < most:
            raise BadAnswer("it lacks tokens that were asked for")
        values[token] = max(float(entry["logprob"]), _LEAST)
        chosen = token if forced is None else max(values, key=lambda known: values[known])
        steps.append(make_step(values, (), most, chosen))
    return steps


def _named(body: dict[str, Any], request_id: str) -> dict[str, Any]:
    """The name of a request as its seed, which an answer repeats; nothing is drawn."""
    return body | {"seed": _seed(request_id)}


def _seed(request_id: str) -> int:
    return int(request_id[:7], 16)
