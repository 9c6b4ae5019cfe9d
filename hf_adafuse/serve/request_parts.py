"""The parts of a request's body: messages, tools, response formats, the field `adafuse`. All sizes have bounds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt, model_validator
from pydantic_core import PydanticCustomError

# The most in one request: characters of its texts (of one and of all together), messages, prompts, choices, new tokens,
# and likely tokens at a position.
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
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Seed = Annotated[StrictInt, Field(ge=0, lt=2**63)]
Stop = Annotated[Text, Field(min_length=1, max_length=1000)]


def _left_out(value: Any) -> Any:
    if value:
        raise PydanticCustomError("extra_forbidden", "must be left out")
    return value


# A field that would change the text and cannot be honoured. Where it is empty, it says nothing.
LeftOut = Annotated[Any, AfterValidator(_left_out)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Clients write `null` for fields that they do not use, also for fields that are not known here."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None or name in cls.model_fields}


class TextPart(_Model):
    """A text part of a message."""

    type: Literal["text"]
    text: Text


class CalledFunction(BaseModel):
    """The function in a tool call of an earlier answer."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[Text, Field(min_length=1, max_length=256)]
    arguments: Text = "{}"


class CalledTool(BaseModel):
    """A tool call in an earlier answer."""

    model_config = ConfigDict(extra="ignore")

    id: Annotated[str, Field(max_length=256)] | None = None
    function: CalledFunction


class Function(BaseModel):
    """The description of a function that may be called."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(BaseModel):
    """A tool that may be called."""

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
    function_call: LeftOut = None
    refusal: LeftOut = None
    audio: LeftOut = None
    reasoning: LeftOut = None
    reasoning_content: LeftOut = None
    prefix: LeftOut = None
    partial: LeftOut = None

    @property
    def text(self) -> str:
        """The text of the message."""
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content or [])


class JsonSchema(BaseModel):
    """The schema of a `response_format`. With `strict`, keywords that the grammar does not enforce are refused: clients
    take an answer for valid by the schema."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    name: str = ""
    strict: StrictBool | None = None
    schema_: dict[str, Any] = Field(default_factory=lambda: {"type": "object"}, alias="schema")


class ResponseFormat(BaseModel):
    """The format that the text must have."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("`json_schema` must be given with this type, but is not")
        return self


class StreamOptions(BaseModel):
    """Options of a streamed reply."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class AdaFuseOptions(BaseModel):
    """
    The field `adafuse` of a request. Any other field in it is a setting of `AdaFuseConfig` for this request, or an
    option of its method.
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
        """The other fields: settings of `AdaFuseConfig` and options of its method."""
        return dict(self.model_extra or {})

    @property
    def drawn(self) -> dict[str, Any]:
        """`top_k` and `min_p`, where they are given. They say how tokens are sampled, unless the method has such an
        option."""
        return {name: value for name in ("top_k", "min_p") if (value := getattr(self, name)) is not None}
