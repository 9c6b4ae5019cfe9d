"""Prompt templates: a text with fields in braces, filled from a record."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class PromptTemplate:
    """
    A text with fields in braces, `Question: {question}`; `{{` and `}}` are braces.

    Args:
        text (`str`): the template.
        argument (`str`, *optional*, defaults to `"template"`): what an error calls it.
        read (`Callable`, *optional*): makes of the text between the fields what stands in the prompt.

    Attributes:
        text (`str`): the template.
        fields (`list[str]`): their names.

    Raises:
        ValueError: it has no field, or one that is not just a name.
    """

    def __init__(self, text: str, argument: str = "template", read: Callable[[str], str] = str) -> None:
        self.text = text
        try:
            self._parts = [(read(part), field) for part, field in _parsed(text)]
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"`{argument}` must be text with fields as {{name}}, but is {text!r}: {error}. Write other braces "
                "twice."
            ) from None
        self.fields = list(dict.fromkeys(field for _, field in self._parts if field))
        if not self.fields:
            raise ValueError(f"`{argument}` must have a field as {{name}}, but is {text!r}. Name one of the input's.")

    @classmethod
    def of_field(cls, name: str) -> PromptTemplate:
        """The template that is one field and nothing else. The field's name may be any text."""
        template = cls("{field}")
        template.text = f"{{{name}}}"
        template.fields = [name]
        template._parts = [("", name)]
        return template

    def fill(self, record: Mapping[str, Any]) -> str:
        """The prompt of a record. A value that is no text is written as JSON. Raises `ValueError` where the record
        lacks a field."""
        prompt = ""
        is_blank = True
        for part, field in self._parts:
            prompt += part
            if field is None:
                continue
            if field in record and record[field] is None:
                raise ValueError(f"must have a value in the field {field!r}, but it is null")
            if field not in record:
                have = ", ".join(map(str, record)) or "none"
                raise ValueError(f"must have the field {field!r}, but its fields are: {have}")
            value = record[field]
            if isinstance(value, bytes):
                raise ValueError(f"must have a text in the field {field!r}, but it is bytes")
            if _is_conversation(value):
                raise ValueError(
                    f"must have a text in the field {field!r}, but it is a conversation. Give the text of one message; "
                    "`AdaFuseEnsemble.texts(..., chat=True)` takes conversations"
                )
            value = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)
            prompt += value
            is_blank = is_blank and not value.strip()
        if is_blank:
            raise ValueError("must make a prompt, but the template's fields are empty in it")
        if not is_unicode(prompt):
            raise ValueError("must be valid Unicode text, but has half of a surrogate pair")
        return prompt


def _is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages, also as pandas and Ray hold one: in an array."""
    messages = value.tolist() if hasattr(value, "tolist") else value
    is_list = isinstance(messages, (list, tuple)) and len(messages) > 0
    return is_list and all(
        isinstance(one, Mapping) and "role" in one and ("content" in one or "tool_calls" in one) for one in messages
    )


def is_unicode(text: str) -> bool:
    """Whether a tokenizer can read the text. Python reads a byte that is not UTF-8 as half of a surrogate pair."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _plain(value: Any) -> Any:
    """What JSON does not know: an array as a list, all else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _parsed(text: str) -> Iterator[tuple[str, str | None]]:
    for part, field, style, conversion in string.Formatter().parse(text):
        if field is not None and (style or conversion or not field.isidentifier()):
            raise ValueError(f"{field!r} is not just a name")
        yield part, field
