"""vLLM's server, by the OpenAI-compatible `/v1/completions` with prompts of token ids.

`prompt_logprobs` switches the prefix cache off. So each text is a prompt of its own, and the request asks for the token
after it: for the most likely ones, or for named ones (`logprob_token_ids`). Whole blocks that texts share are read
once.

vLLM 0.32 returns no most likely tokens for requests that it samples together with a request for named tokens. So this
process never sends both kinds at once, and asks again where another client's request has spoilt an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .api import GREEDY, ServerApi, ServerInfo
from .queries import BadAnswer, GreedyStep, Query, ServerError, SpoiltAnswer, check_log_probs, make_step
from .transport import request_gate

# The log-probability of what has been forgotten.
_FORGOTTEN = -9999.0
_GREEDY = GREEDY | {"top_k": 0}


def _of_one_kind(kinds: Sequence[Any]) -> bool:
    return len(set(kinds)) == 1


class VllmApi(ServerApi):
    """[`ServerApi`] of vLLM."""

    def about(self) -> ServerInfo:
        models = self.connection.get("/v1/models", _models)
        names = [entry["id"] for entry in models]
        name = names[0] if self.model is None else self.model
        if name not in names:
            raise ServerError(f"the server at {self.connection.url} serves {names}, not {name!r}")
        entry = models[names.index(name)]
        base = next((one for one in models if one["id"] == entry.get("parent")), entry)  # of an adapter
        return ServerInfo(name, str(entry.get("root") or name), entry.get("max_model_len") or base.get("max_model_len"))

    def ask(self, queries: Sequence[Query], num_top: int) -> list[list[GreedyStep]]:
        # Asked for named tokens, it says nothing of the most likely ones but the first: two requests.
        alone = [replace(query, tokens=()) for query in queries if query.num_steps]
        named = [part for query in queries for part in self._parts(query)]
        walks = iter(self.in_requests(alone, lambda group, tokens: self._post(group, tokens, num_top)))
        steps = iter(self.in_requests(named, lambda group, tokens: self._post(group, tokens, 0)))
        found = []
        for query in queries:
            walk = next(walks) if query.num_steps else []
            known = [next(steps)[0] for _ in self._parts(query)]
            if known:
                first = walk[0] if walk else known[0]
                log_probs = {token: value for step in [*known, first] for token, value in step.log_probs.items()}
                walk = [replace(first, log_probs=log_probs), *walk[1:]]
            found.append(walk)
        return found

    def _parts(self, query: Query) -> list[Query]:
        """What asks for its tokens, as many at a time as a request may ask for."""
        starts = range(0, len(query.tokens), self.most_tokens)
        return [replace(query, tokens=query.tokens[at : at + self.most_tokens], num_steps=0) for at in starts]

    def _post(self, group: list[Query], tokens: list[int], num_top: int) -> list[list[GreedyStep]]:
        """A request for the most likely tokens alone, or for named ones alone."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": [list(query.ids) for query in group],
            "max_tokens": group[0].num_steps or 1,
            "logprobs": max(num_top, 1),
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
            **_GREEDY,
        }
        if tokens:
            body["logprob_token_ids"] = tokens
        return self.connection.post(
            "/v1/completions",
            body,
            lambda answer, request_id: self._steps(answer, request_id, group, num_top),
            turn=lambda end: request_gate(self.connection.url, _of_one_kind).passing(bool(tokens), end),
        )

    def prompt_log_probs(self, ids: Sequence[int]) -> list[float]:
        body: dict[str, Any] = {"model": self.model, "prompt": [list(ids)], "max_tokens": 1, "prompt_logprobs": 0}
        body |= {"return_token_ids": True, **_GREEDY}

        def read(answer: Any, request_id: str) -> list[float]:
            (choice,) = _choices(answer, request_id, 1)
            if choice["prompt_token_ids"] != list(ids):
                raise BadAnswer("it reads another prompt")
            entries = choice["prompt_logprobs"][1:]
            values = [float(entry[str(token)]["logprob"]) for token, entry in zip(ids[1:], entries, strict=True)]
            check_log_probs(values)
            return values

        return self.connection.post("/v1/completions", body, read)

    def _steps(self, answer: Any, request_id: str, group: list[Query], num_top: int) -> list[list[GreedyStep]]:
        choices = _choices(answer, request_id, len(group))
        steps = [_read(choice, query, num_top) for choice, query in zip(choices, group, strict=True)]
        usage = answer.get("usage") or {}
        cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        self.traffic.count(sum(len(query.ids) for query in group), cached)
        return steps


def _models(answer: Any) -> list[dict[str, Any]]:
    entries = list(answer["data"])
    if not entries or not all(isinstance(entry["id"], str) for entry in entries):
        raise BadAnswer("it names no models")
    return entries


def _choices(answer: Any, request_id: str, count: int) -> list[Any]:
    """What is said of each prompt, in their order; refused where it is the answer to another request."""
    if request_id not in str(answer["id"]):
        raise BadAnswer("it answers another request, or a proxy has replaced the header X-Request-Id")
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    if [choice["index"] for choice in choices] != list(range(count)):
        raise BadAnswer(f"it answers {len(choices)} of {count} prompts")
    return choices


def _read(choice: Any, query: Query, num_top: int) -> list[GreedyStep]:
    logprobs = choice["logprobs"]
    entries = [{_token(name): float(value) for name, value in entry.items()} for entry in logprobs["top_logprobs"]]
    chosen = [_token(name) for name in logprobs["tokens"]]
    if choice["prompt_token_ids"] != list(query.ids) or choice["token_ids"] != chosen:
        raise BadAnswer("it is about other tokens")
    if not 1 <= len(entries) <= max(1, query.num_steps) or len(entries) != len(chosen):
        raise BadAnswer(f"it goes on for {len(entries)} tokens of {query.num_steps}")
    if num_top and any(value <= _FORGOTTEN for entry in entries for value in entry.values()):
        raise SpoiltAnswer("another client's request has made it forget the most likely tokens")
    return [make_step(entry, query.tokens, num_top, token) for entry, token in zip(entries, chosen, strict=True)]


def _token(name: str) -> int:
    """Of `token_id:17`."""
    return int(name.removeprefix("token_id:"))
