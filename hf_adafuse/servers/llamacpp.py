"""llama.cpp's server: its own `/completion` with prompts of token ids.

It gives the most likely tokens only, as many as one asks for: where a token that is asked for is not among them, the
whole vocabulary is asked for. Its numbers depend on how a text is cut into passes (by up to 0.1 nats in 8 bits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .api import About, ServerApi
from .queries import BadAnswer, Query, ServerError, Step, make_step

# Tokens asked for at first: most of what other members propose is among them, and an answer stays small.
_MANY = 64


class LlamaCppApi(ServerApi):
    """See [`ServerApi`]."""

    most_queries = 16
    _vocab_size = 0

    def about(self) -> About:
        props = self.connection.get("/props", _mapping)
        models = self.connection.get("/v1/models", _mapping)
        try:
            entry = models["data"][0]
            name, self._vocab_size = str(entry["id"]), int((entry.get("meta") or {})["n_vocab"])
            length = int(props["default_generation_settings"]["n_ctx"])
        except (LookupError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__} in what it says of the model"
            raise ServerError(f"the server at {self.connection.url} is not llama.cpp's: {reason}") from error
        if self.model is not None and self.model != name:
            raise ServerError(f"the server at {self.connection.url} serves {name!r}, not {self.model!r}")
        return About(name, name, length)

    def ask(self, queries: Sequence[Query], num_top: int) -> list[list[Step]]:
        most = min(self._vocab_size, max(num_top, _MANY if any(query.tokens for query in queries) else 0))
        found = self._rows(queries, most)
        for index, (query, rows) in enumerate(zip(queries, found, strict=True)):
            if any(token not in rows[0][0] for token in query.tokens):
                found[index][0] = self._rows([replace(query, num_steps=0)], self._vocab_size)[0][0]
        return [
            [
                make_step(row, () if number else query.tokens, num_top if query.num_steps else 0, chosen)
                for number, (row, chosen) in enumerate(rows)
            ]
            for query, rows in zip(queries, found, strict=True)
        ]

    def tokenize(self, text: str) -> list[int] | None:
        body = {"content": text, "add_special": False, "parse_special": False}
        return self.connection.post("/tokenize", body, lambda answer, _: [int(token) for token in answer["tokens"]])

    def _rows(self, queries: Sequence[Query], most: int) -> list[list[tuple[dict[int, float], int]]]:
        """Per query and step, the log-probabilities of so many tokens, and the one it went on with."""
        found: list[list[tuple[dict[int, float], int]]] = [[] for _ in queries]
        for indices, group, _ in self.requests(queries):
            body = {
                "prompt": [list(query.ids) for query in group],
                "n_predict": max(1, group[0].num_steps),
                "n_probs": most,
                "temperature": -1,  # greedy, with the probabilities of the model itself
                "cache_prompt": True,
            }

            def read(answer: Any, _: str, group: list[Query] = group) -> list[Any]:
                return self._read(answer, group, most)

            for index, rows in zip(indices, self.connection.post("/completion", body, read), strict=True):
                found[index] = rows
        return found

    def _read(self, answer: Any, group: list[Query], most: int) -> list[list[tuple[dict[int, float], int]]]:
        answers = answer if isinstance(answer, list) else [answer]
        answers = sorted(answers, key=lambda one: int(one["index"]))
        sent = [len(query.ids) for query in group]
        if [int(one["tokens_evaluated"]) for one in answers] != sent:
            raise BadAnswer("it answers another request")
        rows = [
            [(_values(step["top_logprobs"]), int(step["id"])) for step in one["completion_probabilities"]]
            for one in answers
        ]
        cached = sum(int((one.get("timings") or {}).get("cache_n") or 0) for one in answers)
        for of_query, query in zip(rows, group, strict=True):
            if not 1 <= len(of_query) <= max(1, query.num_steps) or any(len(row) < most for row, _ in of_query):
                raise BadAnswer("it lacks tokens that were asked for")
        self.traffic.num_requests += 1
        self.traffic.num_sent += sum(sent)
        self.traffic.num_cached += cached
        return rows


def _mapping(answer: Any) -> dict[str, Any]:
    if not isinstance(answer, dict):
        raise BadAnswer("it says nothing of the model")
    return answer


def _values(entries: Any) -> dict[int, float]:
    return {int(entry["id"]): float(entry["logprob"]) for entry in entries}
