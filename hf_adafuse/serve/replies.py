"""Answers in the form of OpenAI's API: the body of a whole answer, and the chunks of a streamed one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..members.tools import new_call_id
from ..rounds.plain_json import with_nulls
from .answers import GrowingText, adafuse_field, chat_log_probs, text_log_probs, tokens_within
from .calls import Call, CallEvents, TokenLogProb
from .ensembles import ServedEnsemble
from .requests import ChatRequest, CompletionRequest

Request = ChatRequest | CompletionRequest


@dataclass(eq=False)
class ReplyChoice:
    """
    One text of a reply. Where nothing is sampled, several choices of the reply are equal and share it.

    Args:
        indices (`list[int]`): the numbers of the choices that have this text, or beside which it stands where it is
            that of a member by itself.
        prompt (`str`): the prompt, where a completion repeats it before its text; else empty.
        call (`Call`): the call that generates the text.
        text (`GrowingText`): the text so far.
    """

    indices: list[int]
    prompt: str
    call: Call
    text: GrowingText
    _num_log_probs: int = 0  # how many of the call's log-probabilities have been sent

    def take(self, event: list[Any] | None) -> str:
        """Take an event of the call, as of [`CallEvents`]. Returns the text that may be sent."""
        if event is None:
            return self.text.end(self.call.rounds)
        if not event:
            self.text.restart()
        return self.text.add(event)

    def new_log_probs(self) -> list[tuple[TokenLogProb, int]]:
        """The tokens that begin within the text sent since this was last called, as of [`tokens_within`]."""
        new = tokens_within(self.call.log_probs, self.text.sent)[self._num_log_probs :]
        self._num_log_probs += len(new)
        return new


@dataclass
class Reply:
    """
    A reply in the making: its request and the calls of its choices.

    Args:
        id (`str`): the reply's identifier.
        created (`int`): when its calls were made, in seconds since 1970.
        request (`ChatRequest` or `CompletionRequest`): the request.
        served (`ServedEnsemble`): the ensemble that the request names.
        choices (`list[ReplyChoice]`): the texts of the ensemble.
        alone (`list[ReplyChoice]`): for each prompt, the text of each member by itself, where the request asks for
            these.
        events (`CallEvents`): the queue of what happens to all these calls.
        began (`float`): when the request came, by `time.monotonic()`.
    """

    id: str
    created: int
    request: Request
    served: ServedEnsemble
    choices: list[ReplyChoice]
    alone: list[ReplyChoice]
    events: CallEvents
    began: float

    @property
    def calls(self) -> list[Call]:
        return [one.call for one in (*self.choices, *self.alone)]


def head(answer: Reply, suffix: str) -> dict[str, Any]:
    """The fields that a body (`suffix` is `""`) or a chunk (`".chunk"`) begins with."""
    kind = f"chat.completion{suffix}" if isinstance(answer.request, ChatRequest) else "text_completion"
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.served.name}


def whole_choices(answer: Reply, choice: ReplyChoice) -> list[dict[str, Any]]:
    """The choices of a whole reply with one text."""
    content = choice.text.content
    log_probs = _log_probs(answer, lambda: tokens_within(choice.call.log_probs, content))
    found: dict[str, Any] = {"finish_reason": _reason(choice), "logprobs": log_probs}
    if isinstance(answer.request, ChatRequest):
        message = {"role": "assistant", "content": content, "refusal": None, "adafuse": _adafuse(answer, choice)}
        if choice.text.calls:
            message |= {"content": content or None, "tool_calls": [call.body for call in choice.text.calls]}
        found["message"] = message
    else:
        found |= {"text": choice.prompt + content, "adafuse": _adafuse(answer, choice)}
    return [{"index": index, **_with_own_ids(found, at)} for at, index in enumerate(choice.indices)]


def opening_chunks(answer: Reply) -> list[dict[str, Any]]:
    """The chunks that a stream of a chat begins with."""
    opening = {"finish_reason": None, "delta": {"role": "assistant", "content": ""}}
    return [made for one in answer.choices for made in _chunks(answer, one, opening)]


def text_chunks(answer: Reply, choice: ReplyChoice, text: str) -> list[dict[str, Any]]:
    """The chunks with new text of a choice. There are none where neither text nor a whole word is new, and for the text
    of a member by itself."""
    if choice not in answer.choices:
        return []
    has_words = answer.request.options.stream_words
    words = with_nulls(choice.text.new_words()) if has_words else []
    if not text and not words:
        return []
    more = {"adafuse": {"words": words}} if has_words else {}
    found: dict[str, Any] = {"finish_reason": None, "logprobs": _log_probs(answer, choice.new_log_probs)}
    if isinstance(answer.request, ChatRequest):
        # The words are beside the delta: clients that add up deltas cannot add up lists without an index.
        return _chunks(answer, choice, {**found, "delta": {"content": text}, **more})
    is_first = choice.text.num_sent == len(text)
    return _chunks(answer, choice, {**found, "text": (choice.prompt if is_first else "") + text, **more})


def last_chunks(answer: Reply) -> list[dict[str, Any]]:
    """The chunks that a stream ends with."""
    is_chat = isinstance(answer.request, ChatRequest)
    made = []
    for one in answer.choices:
        if one.text.calls:
            calls = [{"index": number, **call.body} for number, call in enumerate(one.text.calls)]
            made += _chunks(answer, one, {"finish_reason": None, "delta": {"tool_calls": calls}})
        adafuse = _adafuse(answer, one)
        found = {"finish_reason": _reason(one), "logprobs": None, "adafuse": adafuse}
        text = "" if one.text.content else one.prompt
        # The field stands beside the delta, where the page reads it, and in the delta: clients that add up deltas to a
        # message keep nothing else of a choice.
        made += _chunks(answer, one, found | ({"delta": {"adafuse": adafuse}} if is_chat else {"text": text}))
    if answer.request.includes_usage:
        made.append({**head(answer, ".chunk"), "choices": [], "usage": usage(answer)})
    return made


def _chunks(answer: Reply, choice: ReplyChoice, found: dict[str, Any]) -> list[dict[str, Any]]:
    """A chunk for each index of a choice."""
    more = {"usage": None} if answer.request.includes_usage else {}
    kind = head(answer, ".chunk")
    each = [(index, _with_own_ids(found, at)) for at, index in enumerate(choice.indices)]
    return [{**kind, "choices": [{"index": index, **one}], **more} for index, one in each]


def _with_own_ids(found: dict[str, Any], at: int) -> dict[str, Any]:
    """A choice with ids of its own for its tool calls, where it is not the first of those with one text."""
    part = next((name for name in ("message", "delta") if found.get(name, {}).get("tool_calls")), None)
    if at == 0 or part is None:
        return found
    calls = [{**call, "id": new_call_id()} for call in found[part]["tool_calls"]]
    return {**found, part: {**found[part], "tool_calls": calls}}


def _adafuse(answer: Reply, choice: ReplyChoice) -> Any:
    options = answer.request.options
    beside = [one for one in answer.alone if choice.indices[0] in one.indices]
    alone = {one.call.served.name: one.text.content for one in beside} if options.alone else None
    return with_nulls(adafuse_field(choice.text, answer.served.members, choice.call.rounds, options.rounds, alone))


def _log_probs(answer: Reply, tokens: Callable[[], list[tuple[TokenLogProb, int]]]) -> Any:
    """The field `logprobs`; `None`, and nothing is computed, where the request does not ask for it."""
    if answer.request.num_top is None:
        return None
    form = chat_log_probs if isinstance(answer.request, ChatRequest) else text_log_probs
    return with_nulls(form(tokens()))


def _reason(choice: ReplyChoice) -> str:
    reason = getattr(choice.call.rounds, "finish_reason", None) or "stop"
    return "tool_calls" if choice.text.calls and reason == "stop" else reason


def num_prompt_tokens(answer: Reply) -> int:
    """How many tokens of the main model all prompts have together: several texts behind one prompt count it once."""
    number = answer.request.n or 1
    return sum(one.call.num_prompt_tokens for one in answer.choices if one.indices[0] % number == 0)


def usage(answer: Reply) -> dict[str, Any]:
    """The field `usage`, counted in tokens of the main model. Texts that choices share count for each of them, with the
    thoughts before them."""
    read = num_prompt_tokens(answer)
    written = sum(one.call.num_tokens * len(one.indices) for one in answer.choices)
    found: dict[str, Any] = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    thought = sum(one.call.num_thinking_tokens * len(one.indices) for one in answer.choices)
    return {**found, **({"completion_tokens_details": {"reasoning_tokens": thought}} if thought else {})}
