"""Answers in the form of OpenAI's API: the body of a whole answer, and the chunks of a streamed one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..rounds.plain_json import with_nulls
from .answers import GrowingText, adafuse_field, chat_log_probs, text_log_probs
from .calls import Call
from .ensembles import ServedEnsemble
from .requests import ChatRequest, CompletionRequest

Request = ChatRequest | CompletionRequest


@dataclass(eq=False)
class ReplyChoice:
    """
    One text of a reply, which is one choice of it or several equal ones.

    Args:
        indices (`list[int]`): of the choices.
        prompt (`str`): what a completion repeats before its text.
        call (`Call`), text (`GrowingText`)
    """

    indices: list[int]
    prompt: str
    call: Call
    text: GrowingText


@dataclass
class Reply:
    """
    A reply in the making: its request and the calls of its choices.

    Args:
        id (`str`), created (`int`): of the answer.
        request (`ChatRequest` or `CompletionRequest`), served (`ServedEnsemble`): what was asked of what.
        choices (`list[ReplyChoice]`)
        alone (`list[ReplyChoice]`): of each member by itself, where they were asked for.
        began (`float`): when the request came.
    """

    id: str
    created: int
    request: Request
    served: ServedEnsemble
    choices: list[ReplyChoice]
    alone: list[ReplyChoice]
    began: float

    @property
    def calls(self) -> list[Call]:
        return [one.call for one in (*self.choices, *self.alone)]


def head(answer: Reply, suffix: str) -> dict[str, Any]:
    kind = f"chat.completion{suffix}" if isinstance(answer.request, ChatRequest) else "text_completion"
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.served.name}


def chunk(answer: Reply, choice: dict[str, Any]) -> dict[str, Any]:
    usage = {"usage": None} if answer.request.includes_usage else {}
    return {**head(answer, ".chunk"), "choices": [choice], **usage}


def whole_choice(answer: Reply, choice: ReplyChoice, index: int) -> dict[str, Any]:
    content, reason = choice.text.content, _reason(choice)
    found: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
    adafuse = _adafuse(answer, choice)
    if isinstance(answer.request, ChatRequest):
        if answer.request.num_top is not None:
            found["logprobs"] = chat_log_probs(choice.call.log_probs, content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "adafuse": adafuse}
        if choice.text.calls:
            message |= {"content": content or None, "tool_calls": [call.body for call in choice.text.calls]}
        return {**found, "message": message}
    if answer.request.num_top is not None:
        found["logprobs"] = text_log_probs(choice.call.log_probs, content, len(choice.prompt))
    return {**found, "text": choice.prompt + content, "adafuse": adafuse}


def part(
    answer: Reply, choice: ReplyChoice, index: int, start: int, text: str, words: list[Any], log_probs: list[Any]
) -> dict[str, Any]:
    """The choice of a chunk with new text, `start` characters into the answer."""
    found: dict[str, Any] = {"index": index, "finish_reason": None, "logprobs": None}
    more = {"adafuse": {"words": words}} if answer.request.options.stream_words else {}
    if isinstance(answer.request, ChatRequest):
        if answer.request.num_top is not None:
            found["logprobs"] = chat_log_probs(log_probs)
        return {**found, "delta": {"content": text, **more}}
    if answer.request.num_top is not None:
        found["logprobs"] = text_log_probs(log_probs, None, len(choice.prompt) + start)
    return {**found, "text": (choice.prompt if start == 0 else "") + text, **more}


def last_part(answer: Reply, choice: ReplyChoice, index: int) -> dict[str, Any]:
    adafuse = _adafuse(answer, choice)
    found = {"index": index, "finish_reason": _reason(choice), "logprobs": None, "adafuse": adafuse}
    if isinstance(answer.request, ChatRequest):
        return {**found, "delta": {"adafuse": adafuse}}
    return {**found, "text": "" if choice.text.content else choice.prompt}


def _adafuse(answer: Reply, choice: ReplyChoice) -> dict[str, Any]:
    alone = {one.call.served.name: one.text.content for one in answer.alone} if answer.request.options.alone else None
    rounds, served = choice.call.rounds, answer.served
    return adafuse_field(choice.text, served.members, rounds, answer.request.options.rounds, alone)


def _reason(choice: ReplyChoice) -> str:
    reason = getattr(choice.call.rounds, "finish_reason", None) or "stop"
    return "tool_calls" if choice.text.calls and reason == "stop" else reason


def usage(answer: Reply) -> dict[str, int]:
    calls = [one.call for one in answer.choices]
    read = sum(call.num_prompt_tokens for call in calls)
    written = sum(one.call.num_tokens * len(one.indices) for one in answer.choices)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def plain(value: dict[str, Any]) -> dict[str, Any]:
    """The value with infinities and NaN as `null`, for JSON."""
    made: dict[str, Any] = with_nulls(value)
    return made
