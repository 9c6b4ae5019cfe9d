"""What a request may hold: the fields of OpenAI's API that are honoured, and which settings of AdaFuse it may name.

A field that would change the text and cannot be honoured is refused. Fields that say nothing about the text (`user`,
`metadata`) are taken and not used. Anybody may ask. So a request must not load models, run a regular expression of its
own, or ask for much more work than a usual request.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, model_validator

from ..members.tools import Offer
from .request_parts import (
    MOST_CHARACTERS,
    MOST_CHOICES,
    MOST_MESSAGES,
    MOST_PROMPTS,
    MOST_SCHEMA,
    MOST_TOKENS,
    MOST_TOP_LOGPROBS,
    AdaFuseOptions,
    JsonSchema,
    Message,
    ResponseFormat,
    Seed,
    Stop,
    StreamOptions,
    Text,
    TokenId,
    Tool,
    ToolChoice,
    _Model,
    _unicode,
)

_NO_OPTIONS = AdaFuseOptions()


class GenerationRequest(_Model):
    """The fields that chat and completion requests share."""

    model: Annotated[str, Field(max_length=256)]
    max_tokens: Annotated[StrictInt, Field(ge=1, le=MOST_TOKENS)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Seed | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    adafuse: AdaFuseOptions | None = None
    # Taken only with values that change nothing.
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    # They say nothing about the text.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @property
    def options(self) -> AdaFuseOptions:
        """The field `adafuse`; where it is not given, its defaults."""
        return self.adafuse or _NO_OPTIONS

    @property
    def stops(self) -> list[str]:
        """The stop texts."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def is_greedy(self) -> bool:
        """Whether the request says by `do_sample` that nothing is sampled."""
        return self.options.settings.get("do_sample") is False

    @property
    def samples(self) -> bool:
        """Whether the request asks for sampling: without `temperature` and `top_p` it does not, nor with `do_sample` of
        its own that says no."""
        if self.is_greedy:
            return False
        if self.temperature is None:
            return self.top_p is not None and self.top_p < 1
        return self.temperature > 0

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def structured(self) -> dict[str, Any] | None:
        """The structure that the text must have, as `generate(structured=...)` takes it."""
        given = {kind: value for kind in ("regex", "grammar") if (value := getattr(self.options, kind)) is not None}
        form = self.response_format
        if form is not None and form.type != "text":
            asked = form.json_schema or JsonSchema()
            given["json_schema"] = asked.schema_
            if asked.strict:
                given["strict"] = True
        return given or None

    @model_validator(mode="after")
    def _check(self) -> GenerationRequest:
        if len({*(self.structured or {})} - {"strict"}) > 1:
            raise ValueError("only one of `response_format`, `adafuse.regex` and `adafuse.grammar` may be given")
        if _size(self.structured) > MOST_SCHEMA:
            raise ValueError(f"`response_format` must be of at most {MOST_SCHEMA} characters of JSON")
        return self


class ThinkingSwitches(_Model):
    """The chat template variables that a request may set."""

    enable_thinking: StrictBool | None = None
    thinking: StrictBool | None = None


class ChatRequest(GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1, le=MOST_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: ThinkingSwitches | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None

    @property
    def num_tokens(self) -> int | None:
        """The most new tokens; `None`: the server's default."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_top(self) -> int | None:
        """How many likely tokens are asked for at each position; `None`: no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("`logprobs` must be true with `top_logprobs`")
        if self.num_characters > MOST_CHARACTERS:
            raise ValueError(f"`messages` must be of at most {MOST_CHARACTERS} characters together")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        described = json.dumps([tool.model_dump() for tool in self.tools or []], ensure_ascii=False)
        if len(_unicode(described)) > MOST_SCHEMA:
            raise ValueError(f"`tools` must be of at most {MOST_SCHEMA} characters of JSON")
        offer = self.offer
        is_json = "json_schema" in (super().structured or {})
        if offer is not None and (is_json or (offer.forced and super().structured)):
            raise ValueError('`response_format` must be left out with `tools`, unless `tool_choice` is "none"')

    @property
    def num_characters(self) -> int:
        """The characters of all messages together."""
        called = [call.function for message in self.messages for call in message.tool_calls or []]
        return sum(len(message.text) for message in self.messages) + sum(len(one.arguments) for one in called)

    @property
    def size(self) -> int:
        """How much there is to read, roughly in characters."""
        return self.num_characters

    @functools.cached_property
    def offer(self) -> Offer | None:
        """The tools that members are told of."""
        choice = self.tool_choice
        if not self.tools and choice in (None, "none", "auto"):
            return None
        tools = [tool.model_dump(exclude_unset=True) for tool in self.tools or []]
        offer = Offer.of(tools, choice.model_dump() if isinstance(choice, ToolChoice) else choice)
        return replace(offer, most_calls=1) if offer is not None and self.parallel_tool_calls is False else offer

    @property
    def structured(self) -> dict[str, Any] | None:
        """As of [`GenerationRequest`]. Where a tool must be called, it is the structure of that call."""
        return self.offer.structured if self.offer is not None and self.offer.forced else super().structured

    @property
    def thinking(self) -> str | None:
        """Which members think before the answer, as `generate()` takes it."""
        switches = self.chat_template_kwargs or ThinkingSwitches()
        is_off = self.reasoning_effort == "none" or False in (switches.enable_thinking, switches.thinking)
        return self.options.thinking or ("off" if is_off else None)


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    prompt: (
        Text
        | Annotated[list[TokenId], Field(min_length=1, max_length=MOST_TOKENS)]
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1, max_length=MOST_TOKENS)]],
            Field(min_length=1, max_length=MOST_PROMPTS),
        ]
    )
    logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None
    best_of: Annotated[StrictInt, Field(ge=1, le=MOST_CHOICES)] | None = None

    @property
    def num_tokens(self) -> int | None:
        """The most new tokens. OpenAI's default for completions is 16."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def num_top(self) -> int | None:
        """As of [`ChatRequest`]."""
        return self.logprobs

    @property
    def num_characters(self) -> int:
        """The characters of all prompts that are texts."""
        return sum(len(one) for one in self.prompts if isinstance(one, str))

    @property
    def size(self) -> int:
        """As of [`ChatRequest`]: an id counts as a character."""
        return sum(map(len, self.prompts))

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or ids of the main model."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("`echo` must be false with `logprobs`: a prompt is not scored here, use `hf-adafuse eval`")
        if self.best_of not in (None, self.n or 1):
            raise ValueError("`best_of` must be left out or be `n`: answers are not ranked here")
        if self.num_characters > MOST_CHARACTERS:
            raise ValueError(f"`prompt` must be of at most {MOST_CHARACTERS} characters together")
        if len(self.prompts) * (self.n or 1) > MOST_PROMPTS:
            raise ValueError(f"`n` times the prompts must be at most {MOST_PROMPTS}")
        return self


def _size(value: Any) -> int:
    return 0 if value is None else len(json.dumps(value))


# The largest whole numbers that a request may give to settings: several times what is useful.
_MOST = {
    "num_branches": 16,
    "max_words": 64,
    "max_word_tokens": 256,
    "num_words": 256,
    "num_tokens": 256,
    "num_samples": 8,
    "num_fused": 8,
    "top_k": 1000,
    "num_steps": 20,
    "num_anchors": 10_000,
}
# The largest whole number for any other setting, like an option of a method that the server has registered itself, and
# the longest list.
_MOST_OF_OTHERS = 1000


def check_request_settings(settings: Mapping[str, Any]) -> None:
    """
    Check the settings of AdaFuse that a request names.

    Raises:
        ValueError: a number is too large, or a list too long.
    """
    options = settings.get("method_options")
    if isinstance(options, Mapping):
        check_request_settings(options)
    for name, value in settings.items():
        most = _MOST.get(name, _MOST_OF_OTHERS)
        if isinstance(value, int) and value > most:
            raise ValueError(f"`{name}` must be at most {most} in a request, but is {value}. Ask for less.")
        if isinstance(value, (list, dict)) and len(value) > _MOST_OF_OTHERS:
            raise ValueError(f"`{name}` must have at most {_MOST_OF_OTHERS} parts, but has {len(value)}. Shorten it.")


def check_request_options(cls: type[Any], settings: Mapping[str, Any]) -> None:
    """
    Check the options of a method that a request names, before the method is made.

    Args:
        cls (`type`): the class of the method. Its `request_options` names the options that a request may set to
            anything; any other option may only be a number.
        settings (`dict`): the settings of the request. Options stand among them or in `method_options`.

    Raises:
        ValueError: an option may be set only where the server is started.
    """
    inner = settings.get("method_options")
    if isinstance(inner, Mapping):
        check_request_options(cls, inner)
    for name in inspect.signature(cls).parameters:
        value = settings.get(name)
        if name not in cls.request_options and not (value is None or isinstance(value, (bool, int, float))):
            raise ValueError(
                f"`{name}` must be left out of requests, but is given. Set it where the server is started."
            )
