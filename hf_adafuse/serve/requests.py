"""What a request may hold: the fields of OpenAI's API that are honoured, and those of `adafuse`. Bounds all sizes;
knows no ensemble.

A field that would change the text and cannot be honoured is refused. Those that say nothing about the text (`user`,
`metadata`) are taken and not used.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt, model_validator

from ..members.tools import Offer

# The longest text of a message or prompt, in characters, and the most of both in one request.
MOST_CHARACTERS = 1_000_000
MOST_MESSAGES = 1_000
MOST_PROMPTS = 64
MOST_CHOICES = 16
MOST_TOKENS = 32_768
MOST_TOP_LOGPROBS = 20
# The largest JSON schema or grammar, and all tools together, in characters of JSON.
MOST_SCHEMA = 100_000


def _unicode(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("must be Unicode text, but holds half of a surrogate pair") from None
    return text


Text = Annotated[str, Field(max_length=MOST_CHARACTERS), AfterValidator(_unicode)]
Seed = Annotated[StrictInt, Field(ge=0, lt=2**63)]
Stop = Annotated[Text, Field(min_length=1, max_length=1000)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class TextPart(_Model):
    """A part of a message; members read text."""

    type: Literal["text"]
    text: Text


class CalledFunction(BaseModel):
    """The function of a call."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[Text, Field(min_length=1, max_length=256)]
    arguments: Text = "{}"


class CalledTool(BaseModel):
    """A call in an earlier answer."""

    model_config = ConfigDict(extra="ignore")

    function: CalledFunction


class Function(BaseModel):
    """A function that members may call."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(BaseModel):
    """A tool that members may call."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    function: Function


class NamedFunction(_Model):
    """The name of a function."""

    name: Annotated[str, Field(max_length=64)]


class ToolChoice(_Model):
    """The tool that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=100)] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[CalledTool], Field(max_length=128)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None

    @property
    def text(self) -> str:
        """What it says in words."""
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content or [])


class JsonSchema(BaseModel):
    """The schema of a `response_format`. With `strict`, keywords that the grammar does not enforce are refused, as the
    API refuses those that it does not know: its clients take an answer for valid."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    name: str = ""
    strict: StrictBool | None = None
    schema_: dict[str, Any] = Field(default_factory=lambda: {"type": "object"}, alias="schema")


class ResponseFormat(BaseModel):
    """What the text must be."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("`json_schema` must be given with this type, but is not")
        return self


class StreamOptions(BaseModel):
    """Of a stream."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class AdaFuseOptions(BaseModel):
    """
    The field `adafuse` of a request. Fields beyond these are settings of `AdaFuseConfig` for this request, options of
    its method among them.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    rounds: StrictBool = False  # the rounds in the answer: who proposed, who won, by what
    alone: StrictBool = False  # each member's own answer beside that of the ensemble
    stream_words: StrictBool = False  # the words of each chunk of a stream, with who proposed them
    thinking: Literal["apart", "main", "off"] | None = None
    max_thinking_tokens: Annotated[StrictInt, Field(ge=0, le=MOST_TOKENS)] | None = None
    regex: Annotated[Text, Field(max_length=MOST_SCHEMA)] | None = None
    grammar: Annotated[Text, Field(max_length=MOST_SCHEMA)] | None = None
    top_k: Annotated[StrictInt, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Those of `AdaFuseConfig`."""
        return dict(self.model_extra or {})

    @property
    def drawn(self) -> dict[str, Any]:
        """How tokens are drawn, as far as it is said here; or options of a method, where it has some of these names."""
        return {name: value for name in ("top_k", "min_p") if (value := getattr(self, name)) is not None}


class GenerationRequest(_Model):
    """What both kinds of requests have."""

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
    # Taken only where they say nothing.
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
        return self.adafuse or AdaFuseOptions()

    @property
    def stops(self) -> list[str]:
        """The texts to stop at."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def samples(self) -> bool:
        """Whether the request asks for sampling: without `temperature` and `top_p` it does not."""
        if self.temperature is None:
            return self.top_p is not None and self.top_p < 1
        return self.temperature > 0

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def structured(self) -> dict[str, Any] | None:
        """What the text must be, as `generate(structured=...)` takes it."""
        form, options = self.response_format, self.options
        given = {kind: value for kind in ("regex", "grammar") if (value := getattr(options, kind)) is not None}
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
    """What of the variables of chat templates a request may set."""

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
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_top(self) -> int | None:
        """Of how many tokens log-probabilities are asked for at each; `None`: of none."""
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
        """Of all messages."""
        called = [call.function for message in self.messages for call in message.tool_calls or []]
        return sum(len(message.text) for message in self.messages) + sum(len(one.arguments) for one in called)

    @functools.cached_property
    def offer(self) -> Offer | None:
        """The tools that the members are told of."""
        choice = self.tool_choice
        if not self.tools and choice in (None, "none", "auto"):
            return None
        tools = [tool.model_dump(exclude_unset=True) for tool in self.tools or []]
        offer = Offer.of(tools, choice.model_dump() if isinstance(choice, ToolChoice) else choice)
        return replace(offer, most_calls=1) if offer is not None and self.parallel_tool_calls is False else offer

    @property
    def structured(self) -> dict[str, Any] | None:
        """As of [`GenerationRequest`]; a call that must be made is a text by a schema, too."""
        return self.offer.structured if self.offer is not None and self.offer.forced else super().structured

    @property
    def thinking(self) -> str | None:
        """Who thinks before the answer, as `generate()` takes it."""
        switches = self.chat_template_kwargs or ThinkingSwitches()
        is_off = self.reasoning_effort == "none" or False in (switches.enable_thinking, switches.thinking)
        return self.options.thinking or ("off" if is_off else None)


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    prompt: (
        Text
        | Annotated[list[StrictInt], Field(min_length=1, max_length=MOST_TOKENS)]
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[
            list[Annotated[list[StrictInt], Field(min_length=1, max_length=MOST_TOKENS)]],
            Field(min_length=1, max_length=MOST_PROMPTS),
        ]
    )
    logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None
    best_of: Annotated[StrictInt, Field(ge=1, le=MOST_CHOICES)] | None = None

    @property
    def num_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def num_top(self) -> int | None:
        return self.logprobs

    @property
    def num_characters(self) -> int:
        """Of all prompts that are texts."""
        return sum(len(one) for one in self.prompts if isinstance(one, str))

    @property
    def prompts(self) -> list[str | list[int]]:
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
