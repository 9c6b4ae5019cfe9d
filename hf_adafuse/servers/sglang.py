"""SGLang's server, by its `/generate` with prompts of token ids.

Each text is a prompt of its own, and the request asks for the token after it. `token_ids_logprob` names further tokens.
The radix cache reads what texts share once. SGLang's wheels need a GPU: this client is tested against a stand-in of the
endpoint, not against the server itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .api import GREEDY, ServerApi, ServerInfo
from .queries import BadAnswer, GreedyStep, Query, ServerError, check_log_probs, json_object, make_step


class SglangApi(ServerApi):
    """[`ServerApi`] of SGLang."""

    def about(self) -> ServerInfo:
        info, settings = self._get("model_info"), self._get("server_info")
        path = str(info.get("model_path") or "")
        source = str(info.get("tokenizer_path") or path)
        name = str(settings.get("served_model_name") or path or source)
        if self.model is not None and self.model not in (name, path, source):
            raise ServerError(f"the server at {self.connection.url} serves {name!r}, not {self.model!r}")
        return ServerInfo(
            self.model or name, source, settings.get("max_req_input_len") or settings.get("context_length")
        )

    def _get(self, what: str) -> dict[str, Any]:
        """`model_info` or `server_info`, as newer servers call it, or with the `get_` of older ones."""
        try:
            return self.connection.get(f"/{what}", json_object)
        except ServerError as error:
            if error.status != 404:
                raise
        return self.connection.get(f"/get_{what}", json_object)

    def ask(self, queries: Sequence[Query], num_top: int) -> list[list[GreedyStep]]:
        def post(group: list[Query], tokens: list[int]) -> list[list[GreedyStep]]:
            found: list[list[GreedyStep]] = self._post(
                group, num_top, lambda answer, request_id: self._steps(answer, request_id, group, num_top)
            )
            return found

        return self.in_requests(queries, post)

    def prompt_log_probs(self, ids: Sequence[int]) -> list[float]:
        def read(answer: Any, request_id: str) -> list[float]:
            entries = _answers(answer, request_id, 1)[0]["meta_info"]["input_token_logprobs"][1:]
            if [int(token) for _, token, *_ in entries] != list(ids[1:]):
                raise BadAnswer("it reads another prompt")
            values = [float(value) for value, *_ in entries]
            check_log_probs(values)
            return values

        found: list[float] = self._post([Query(tuple(ids))], 1, read, reads_prompts=True)
        return found

    def _post(self, group: list[Query], num_top: int, read: Any, reads_prompts: bool = False) -> Any:
        """A request; `reads_prompts`: for the log-probabilities of the prompts' tokens too."""
        body: dict[str, Any] = {
            "input_ids": [list(query.ids) for query in group],
            "sampling_params": {"max_new_tokens": max(1, group[0].num_steps), **GREEDY},
            "return_logprob": True,
            "logprob_start_len": [0 if reads_prompts else len(query.ids) - 1 for query in group],
            "top_logprobs_num": [num_top] * len(group),
        }
        if any(query.tokens for query in group):  # a list for each, or it takes the first one for that of all
            body["token_ids_logprob"] = [list(query.tokens) for query in group]
        return self.connection.post("/generate", body, read, name_requests=_name_requests)

    def _steps(self, answer: Any, request_id: str, group: list[Query], num_top: int) -> list[list[GreedyStep]]:
        infos = [one["meta_info"] for one in _answers(answer, request_id, len(group))]
        steps = [_read(info, query, num_top) for info, query in zip(infos, group, strict=True)]
        cached = sum(int(info.get("cached_tokens") or 0) for info in infos)
        self.traffic.count(sum(len(query.ids) for query in group), cached)
        return steps


def _name_requests(body: dict[str, Any], request_id: str) -> dict[str, Any]:
    return {**body, "rid": [f"{request_id}-{number}" for number in range(len(body["input_ids"]))]}


def _answers(answer: Any, request_id: str, count: int) -> list[Any]:
    """What is said of each prompt; refused where it is the answer to another request."""
    if not isinstance(answer, list) or len(answer) != count:
        raise BadAnswer("it does not answer all prompts")
    if [one["meta_info"]["id"] for one in answer] != [f"{request_id}-{number}" for number in range(count)]:
        raise BadAnswer("it answers another request")
    return answer


def _read(info: dict[str, Any], query: Query, num_top: int) -> list[GreedyStep]:
    chosen = [int(token) for _, token, *_ in info["output_token_logprobs"]]
    best = info["output_top_logprobs"]
    asked = info.get("output_token_ids_logprobs") if query.tokens else [[]] * len(chosen)
    if not 1 <= len(chosen) <= max(1, query.num_steps) or not len(chosen) == len(best) == len(asked or ()):
        raise BadAnswer(f"it goes on for {len(chosen)} tokens of {query.num_steps}")
    rows = [
        {int(token): float(value) for value, token, *_ in [*of_best, *of_asked]}
        for of_best, of_asked in zip(best, asked or (), strict=True)
    ]
    return [
        make_step(row, query.tokens, num_top if query.num_steps else 0, token)
        for row, token in zip(rows, chosen, strict=True)
    ]
