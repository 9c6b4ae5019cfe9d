"""Tools: what members are told of them, the grammar of the calls, and the calls in what members write.

All members are told of tools in one form, so that they can write a call together: that of Hermes and Qwen, in the
system message. A call is `<tool_call>\\n{"name": "weather", "arguments": {"city": "Lima"}}\\n</tool_call>`, and what
comes of it is a user's message `<tool_response>\\n...\\n</tool_response>`. The templates of the members get neither:
many of them do not know tools, and the others write calls in forms of their own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils import get_json_schema

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_DEFINITIONS = ("$defs", "definitions")
_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder(strict=False)  # the grammar lets control characters into some strings


def new_call_id() -> str:
    """An id by which the answer to a call will be known."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class ToolCall:
    """
    A call of a tool.

    Args:
        name (`str`): the tool's name.
        arguments (`str`): the arguments, in JSON.
        id (`str`): by which the answer to it will be known.
    """

    name: str
    arguments: str
    id: str = field(default_factory=new_call_id, compare=False)

    @property
    def body(self) -> dict[str, Any]:
        """The call in the form of OpenAI's API."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Offer:
    """
    The tools that a request offers.

    Args:
        tools (`list[dict]`): as the request has them: `{"type": "function", "function": {"name": ...}}`. With
            `"strict": True` beside the name, arguments that the grammar cannot keep to the schema are refused.
        forced (`list[str]`): the tools of which one must be called; empty where the members may answer in words.
        most_calls (`int`, *optional*): how many calls an answer may hold.
    """

    tools: Sequence[Mapping[str, Any]]
    forced: Sequence[str] = ()
    most_calls: int | None = None

    @classmethod
    def of(cls, tools: Sequence[Any] | None, choice: str | Mapping[str, Any] | None = None) -> Offer | None:
        """
        What `generate(tools=..., tool_choice=...)` offers; `None` where no tool may be called.

        Args:
            tools (`list`, *optional*): functions with type hints and a docstring, or descriptions as OpenAI's API has
                them. Without tools nothing is offered.
            choice (`str` or `dict`, *optional*, defaults to `"auto"`): `"auto"`: the members may call tools.
                `"required"`: they must call one. `"none"`: they are not told of any. The name of a tool, or
                `{"type": "function", "function": {"name": ...}}`: they must call that one.

        Raises:
            ValueError: an empty list, a tool that cannot be described, two of one name, or a choice that is none of
                them.
        """
        is_word = choice is None or (isinstance(choice, str) and choice in ("auto", "none", "required"))
        if tools is None:
            if is_word and choice != "required":
                return None
            raise ValueError(
                f'`tool_choice` must be "auto", "none" or left out without `tools`, but is {choice!r}. Pass the tools.'
            )
        if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence) or not tools:
            raise ValueError(f"`tools` must be a list of tools, but is {tools!r}. Leave it out where there are none.")
        made = [_described(one) if callable(one) else one for one in tools]
        names = [_name_of(one) for one in made]
        if len(set(names)) < len(names):
            raise ValueError(f"`tools` must have a name each, but are named {names}. Rename one.")
        if is_word:
            return None if choice == "none" else cls(made, names if choice == "required" else [])
        function = choice.get("function") if isinstance(choice, Mapping) else None
        named = function.get("name") if isinstance(function, Mapping) else choice
        if not isinstance(named, str) or named not in names:
            raise ValueError(
                f'`tool_choice` must be "auto", "none", "required" or one of {names}, but is {choice!r}. Choose one.'
            )
        return cls(made, [named])

    @property
    def prompt(self) -> str:
        """The text by which members are told of the tools."""
        described = [{**tool, "function": {**tool["function"]}} for tool in self.tools]
        for tool in described:
            tool["function"].pop("strict", None)  # a word for the grammar
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in described)
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
            f"function signatures within <tools></tools> XML tags:\n<tools>\n{lines}\n</tools>\n\nFor each function "
            "call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
            f'{OPENING}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{CLOSING}'
        )

    @property
    def schema(self) -> dict[str, Any] | None:
        """The JSON schema of a text that is one call of a forced tool; `None` where none is forced."""
        if not self.forced:
            return None
        shared: dict[str, Any] = {}
        of_tools = enumerate(self.tools)
        calls = [self._schema(k, tool, shared) for k, tool in of_tools if tool["function"]["name"] in self.forced]
        return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), **({"$defs": shared} if shared else {})}

    @property
    def structured(self) -> dict[str, Any]:
        """What `generate(structured=...)` takes: the text is one call of a forced tool; or words in which each call
        that begins is whole and valid."""
        functions = [tool["function"] for tool in self.tools]
        is_strict = any(one.get("strict") for one in functions if not self.forced or one["name"] in self.forced)
        strict = {"strict": True} if is_strict else {}
        if self.forced:
            return {"json_schema": self.schema, **strict}
        shared: dict[str, Any] = {}
        calls = [self._schema(k, tool, shared) for k, tool in enumerate(self.tools)]
        content = {"type": "json_schema", "json_schema": {"anyOf": calls, "$defs": shared}}
        tag = {"type": "tag", "begin": f"{OPENING}\n", "content": content, "end": f"\n{CLOSING}"}
        form = {
            "type": "triggered_tags",
            "triggers": [OPENING],
            "tags": [tag],
            "stop_after_first": self.most_calls == 1,
        }
        return {"structural_tag": {"type": "structural_tag", "format": form}, **strict}

    @staticmethod
    def _schema(number: int, tool: Mapping[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
        """The JSON schema of a call of the tool of a number; what it defines is put into `shared`."""
        function = tool["function"]
        parameters = function.get("parameters") or {"type": "object", "additionalProperties": False}
        own = _lifted(parameters, str(number), shared)
        return {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": own},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }

    def read(self, text: str) -> tuple[str, list[ToolCall]]:
        """The words of an answer, and the tool calls behind them. A text with a call that cannot be read, or of a tool
        that was not offered, is all words. Text behind a call is left out."""
        found = self._bare_call(text) or self._marked_calls(text)
        if found is None:
            return text, []
        words, calls = found
        return words if words.strip() else "", calls[: self.most_calls]

    def num_plain_characters(self, text: str) -> int:
        """How many of the first characters of an unfinished text are words of the answer and not of a call, whatever
        follows."""
        if not text.strip() or text.lstrip().startswith("{"):
            return 0
        at = text.find(OPENING)
        if at < 0:
            most = min(len(OPENING) - 1, len(text))
            at = len(text) - next((n for n in range(most, 0, -1) if text.endswith(OPENING[:n])), 0)
        return at if text[:at].strip() else 0

    def _bare_call(self, text: str) -> tuple[str, list[ToolCall]] | None:
        """No words and the one call that a text without marks is; `None` where it is anything else."""
        found = self._call_at(text, 0)
        return None if found is None or text[found[1] :].strip() else ("", [found[0]])

    def _marked_calls(self, text: str) -> tuple[str, list[ToolCall]] | None:
        """The words before the first mark, and the calls behind the marks; `None` where one cannot be read."""
        first = at = text.find(OPENING)
        calls = []
        while at >= 0:
            # A string in the arguments may hold the marks themselves, so that JSON says where a call ends.
            found = self._call_at(text, at + len(OPENING))
            if found is None:
                return None
            call, end = found
            behind = text[end:].lstrip()
            if behind and not behind.startswith((OPENING, CLOSING)):
                return None
            calls.append(call)
            at = text.find(OPENING, end)
        return (text[:first], calls) if calls else None

    def _call_at(self, text: str, start: int) -> tuple[ToolCall, int] | None:
        """The call that begins at a character of a text, behind whitespace, and where it ends; `None` where there is
        none."""
        try:
            found, end = _DECODER.raw_decode(text, _SPACE.match(text, start).end())  # type: ignore[union-attr]
            if not isinstance(found, dict):
                return None
            arguments = found.get("arguments", found.get("parameters", {}))
            written = json.dumps(arguments, allow_nan=False)  # Python reads NaN, which is no JSON
        except (ValueError, RecursionError):
            return None
        is_known = found.get("name") in [tool["function"]["name"] for tool in self.tools]
        return (ToolCall(found["name"], written), end) if is_known and isinstance(arguments, dict) else None


def with_tools(
    messages: Sequence[Mapping[str, Any]], offer: Offer | None, takes_system: bool = True
) -> list[dict[str, Any]]:
    """
    A conversation as the members read it: with a description of the tools, and with earlier calls and their results as
    text. Results stand in the order of their calls.

    Args:
        messages (`list[dict]`): each with `role` and `content`, maybe those of the assistant with `tool_calls`, and
            those of tools with `tool_call_id`, the id of the call that they answer.
        offer (`Offer`, *optional*): the tools that the members may call.
        takes_system (`bool`): whether the members' templates take a message of the system's.
    """
    made: list[dict[str, Any]] = []
    before: Mapping[str, Any] = {}
    for is_result, run in itertools.groupby(messages, lambda one: bool(one["role"] == "tool")):
        part = list(run)
        if is_result:
            results = _in_order_of_calls(part, before.get("tool_calls") or [])
            texts = [f"<tool_response>\n{_text(one)}\n</tool_response>" for one in results]
            made.append({"role": "user", "content": "\n".join(texts)})
            continue
        for one in part:
            message = {name: value for name, value in one.items() if name not in ("tool_calls", "tool_call_id")}
            if calls := one.get("tool_calls"):
                texts = [_text(one)] if _text(one) else []
                message["content"] = "\n".join([*texts, *map(_written, calls)])
            made.append(message)
        before = part[-1]
    if offer is not None:
        role = "system" if takes_system else "user"
        at = next((k for k, one in enumerate(made) if one["role"] == role), None) if made else None
        if at is None or (role == "system" and at > 0):
            made.insert(0, {"role": role, "content": offer.prompt})
        else:
            parts = [_text(made[at]), offer.prompt]
            made[at]["content"] = "\n\n".join(parts if takes_system else parts[::-1])
    return made


def _in_order_of_calls(
    results: Sequence[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """
    The results of calls in the order of the calls: tools that run side by side end in any order. Results without ids,
    and those of calls without ids, stand in that order already.

    Raises:
        ValueError: an id that is that of no call, or no id beside results that have one.
    """
    given = [one.get("tool_call_id") for one in results]
    ids = [call.get("id") for call in calls]
    if not any(given) or (ids and not any(ids)):
        return results
    for one in given:
        if one is None or one not in ids:
            known = (
                f"one of {ids}, the ids of the calls in the message before" if ids else "behind a message with calls"
            )
            raise ValueError(
                f"`tool_call_id` of a result must be {known}, but is {one!r}. Put the result behind its call, and give "
                "its id."
            )
    return sorted(results, key=lambda one: ids.index(one["tool_call_id"]))


def _described(function: Any) -> dict[str, Any]:
    """A function as OpenAI's API describes it."""
    try:
        return dict(get_json_schema(function))
    except Exception as error:  # also where something can be called, but is no function
        raise ValueError(
            f"`tools` must be functions with type hints and a docstring that names each argument, but {function!r} "
            f"cannot be described: {error} Add them, or describe the function in a dict."
        ) from error


def _name_of(tool: Any) -> str:
    """The name of a tool.

    Raises:
        ValueError: it is not described as OpenAI's API describes tools.
    """
    name = (
        tool["function"].get("name") if isinstance(tool, Mapping) and isinstance(tool.get("function"), dict) else None
    )
    if not isinstance(name, str):
        raise ValueError(
            '`tools` must be functions or like {"type": "function", "function": {"name": ..., "parameters": ...}}, but '
            f"hold {tool!r}. Put the description of the function under that name."
        )
    if not isinstance(tool["function"].get("parameters") or {}, dict):
        raise ValueError(
            f"`parameters` of a tool must be a dict with a JSON schema, but is {tool['function']['parameters']!r}. "
            "Leave it out where the function has no arguments."
        )
    try:
        json.dumps({**tool})
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"`tools` must be what JSON can hold, but hold {tool!r}: {error}. Mend that part.") from None
    return name


def _text(message: Mapping[str, Any]) -> str:
    """
    The text of a message whose content is a text, a list of parts with texts, or, as OpenAI allows beside `tool_calls`,
    `None` or left out: then it is empty.

    Raises:
        ValueError: a part has no text.
    """
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, (list, tuple)) else [content]
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts):
        raise ValueError(
            f"`content` of a message beside tools must be a text or parts of type text, but is {content!r}. Write what "
            "it says as text."
        )
    return "".join(texts)


def _written(call: Any) -> str:
    """A call of an earlier answer, as members write calls; without arguments it has none."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            '`tool_calls` of a message must be like {"type": "function", "function": {"name": ..., "arguments": ...}}, '
            f"but have {call!r}. Put the name of the function there."
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    body = f'{{"name": {json.dumps(function["name"])}, "arguments": {json.dumps(arguments, ensure_ascii=False)}}}'
    return f"{OPENING}\n{body}\n{CLOSING}"


def _lifted(schema: Mapping[str, Any], name: str, shared: dict[str, Any]) -> dict[str, Any]:
    """A tool's schema as a part of another one: what it defines is put into `shared` under a name of its own, and so is
    the schema itself, where it refers to itself or to a part of itself."""
    refers_to_itself = False

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(one) for one in value]
        if not isinstance(value, dict):
            return value
        nonlocal refers_to_itself
        made = {key: moved(one) for key, one in value.items()}
        target = made.get("$ref")
        if isinstance(target, str) and (target == "#" or target.startswith("#/")):
            group = next((one for one in _DEFINITIONS if target.startswith(f"#/{one}/")), None)
            refers_to_itself |= group is None
            if group is None:
                made["$ref"] = f"#/$defs/{name}{target[1:]}"
            else:
                made["$ref"] = f"#/$defs/{name}.{target.removeprefix(f'#/{group}/')}"
        return made

    for group in _DEFINITIONS:
        found = schema.get(group)
        if isinstance(found, dict):
            shared.update({f"{name}.{key}": moved(value) for key, value in found.items()})
    own: dict[str, Any] = moved({key: value for key, value in schema.items() if key not in _DEFINITIONS})
    if not refers_to_itself:
        return own
    shared[name] = own
    return {"$ref": f"#/$defs/{name}"}
