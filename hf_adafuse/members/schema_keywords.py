"""Keywords of a JSON schema that the grammar made of it does not enforce, each with the JSON pointer of its schema.
`structured` warns of them, or refuses them.

The rules are what xgrammar 0.2.8 was seen to do: `tests/members/test_schema_keywords.py` tries each of them on the
grammar itself, with a document that violates the keyword. Where a keyword cannot be told to hold, it is reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .json_patterns import why_unenforced
from .keyword_rules import (
    EXCLUSIVE_KEYWORDS,
    IGNORED,
    KNOWN_FORMATS,
    MEANS_OBJECT,
    UNSAFE_FORMATS,
    assertions,
    compared_part,
    counts_multiples,
    holds,
    is_same_value,
    json_type,
    lacks_required,
    listed,
    listed_values,
    meaning_of,
    numbers_alike,
    others_keyword,
    required_properties,
    types_read,
    well_formed,
)

# Keywords whose value is schemas by name, and those whose value is no schema. A `$ref` may lead into any other.
_HOLDS_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_HOLDS_VALUES = frozenset({"const", "enum", "default", "examples"})
# One of these says which items or properties may come.
_SAYS_ITEMS = frozenset({"items", "prefixItems", "unevaluatedItems"})
_SAYS_PROPERTIES = frozenset(
    {"properties", "patternProperties", "propertyNames", "additionalProperties", "unevaluatedProperties"}
)


class Unenforced(NamedTuple):
    """A keyword, the JSON pointer of its schema, and why it is not enforced, where it would be elsewhere."""

    keyword: str
    path: str
    reason: str = ""

    def __str__(self) -> str:
        place = f"at {self.path}" if self.path else "at the root"
        return f"`{self.keyword}` {place}" + (f" ({self.reason})" if self.reason else "")


def unenforced_keywords(schema: Any) -> list[Unenforced]:
    """
    What of a JSON schema the grammar does not enforce, so that a text by the grammar may violate it.

    Schemas that a `$ref` leads to are reported where they stand, once; those that nothing leads to are not. Annotations
    (`title`, `default`, ...) and unknown keywords rule nothing out.

    Args:
        schema (`dict` or `bool`): as `json.loads` reads it.

    Example:
        `{"type": "array", "uniqueItems": True}` gives `[Unenforced("uniqueItems", "", "")]`.
    """
    schema = opened(schema)
    reader = _Reader(schema)
    reader.read(schema, ())
    return list(dict.fromkeys(reader.found))


def opened(schema: Any) -> Any:
    """
    A schema of the same meaning in which arrays and objects that say nothing of their items and properties say that any
    may come. The library allows them none where another keyword stands there.

    Args:
        schema (`dict` or `bool`): as `json.loads` reads it. It stays as it is.

    Example:
        `{"type": "array", "maxItems": 3}` gives `{"type": "array", "maxItems": 3, "items": {}}`.
    """
    if isinstance(schema, list):
        return [opened(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _HOLDS_SCHEMAS and isinstance(value, Mapping):
            made[keyword] = {name: opened(one) for name, one in value.items()}
        else:
            made[keyword] = value if keyword in _HOLDS_VALUES else opened(value)
    types = [] if any(keyword in schema for keyword in EXCLUSIVE_KEYWORDS) else types_read(schema)
    if "array" in types and not _SAYS_ITEMS & set(schema):
        made["items"] = {}
    if "object" in types and not _SAYS_PROPERTIES & set(schema):
        made["additionalProperties"] = True
    return made


class _Reader:
    """Goes through a schema as the library does, and notes what that does not read."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.found: list[Unenforced] = []
        self._seen: set[tuple[str, ...]] = set()
        self._alike: dict[str, tuple[str, str]] = {}  # what the library compares -> the meaning and the first path

    def read(self, schema: Any, path: tuple[str, ...], is_name: bool = False) -> None:
        """A schema; `is_name`: of the names of properties, which are strings."""
        schema = well_formed(schema)
        if schema is None or path in self._seen or self._is_taken_for_another(schema, path):
            return
        self._seen.add(path)
        first = next((keyword for keyword in EXCLUSIVE_KEYWORDS if keyword in schema), None)
        if first is not None:
            self._read_exclusive(schema, path, first)
            return
        types = ["string"] if is_name and "type" not in schema else types_read(schema)
        if not types:
            for keyword in assertions(schema):
                self._note(keyword, path, "" if keyword in IGNORED else "without `type`")
            return
        for keyword in assertions(schema, types):
            if keyword in IGNORED:
                self._note(keyword, path)
        if "object" in types:
            self._read_object(schema, path)
        if "array" in types:
            self._read_array(schema, path)
        if "string" in types:
            self._read_string(schema, path)
        is_lost = "number" in types or ("integer" in types and not counts_multiples(schema))
        if is_lost and "multipleOf" in schema:
            self._note("multipleOf", path, "of numbers" if "number" in types else "large, or beside a bound")

    def _note(self, keyword: str, path: tuple[str, ...], reason: str = "") -> None:
        self.found.append(Unenforced(keyword, _pointer(path), reason))

    def _is_taken_for_another(self, schema: Any, path: tuple[str, ...]) -> bool:
        """Record and return whether xgrammar confuses this schema with an earlier one that differs only in the names of
        annotations. It leaves these names out where it compares schemas, those of properties among them."""
        meaning = json.dumps(meaning_of(schema), sort_keys=True)
        known, where = self._alike.setdefault(
            json.dumps(compared_part(schema), sort_keys=True), (meaning, _pointer(path))
        )
        if known != meaning:
            keyword = next((one for one in ("properties", "const", "enum") if one in schema), next(iter(schema)))
            where = where or "the root"
            self._note(keyword, path, f"taken for that at {where}, as names like `title` do not count")
        return known != meaning

    def _read_exclusive(self, schema: Any, path: tuple[str, ...], first: str) -> None:
        """Read a schema with an exclusive keyword, `first`: xgrammar reads nothing that stands beside it."""
        value = schema[first]
        possible = self._types({first: value})
        for keyword in assertions(schema, possible):
            if keyword != first and not self._is_implied(schema, first, keyword, possible):
                self._note(keyword, path, "" if keyword in IGNORED else f"beside `{first}`")
        if first == "$ref":
            target = self._target(value, path)
            if target is None:
                self._note("$ref", path, "to another place than `#` or `#/...`")
            else:
                self.read(*target)
        elif first in ("const", "enum"):
            values = value if first == "enum" else [value]
            if any(isinstance(one, int) and abs(one) >= 2**63 for one in values):
                self._note(first, path, "integers of more than 64 bits")
        else:
            if first == "allOf" and len(value) > 1:
                self._note("allOf", path, "several schemas")
                return
            for index, option in enumerate(value):
                self.read(option, (*path, first, str(index)))
            if first == "oneOf" and self._may_overlap(value):
                self._note("oneOf", path, "read as `anyOf`")

    def _is_implied(self, schema: Any, first: str, keyword: str, possible: set[str] | None) -> bool:
        """Whether what stands beside `first` holds for every value that this allows."""
        if first in ("const", "enum"):
            values = schema[first] if first == "enum" else [schema[first]]
            return all(holds(value, keyword, schema[keyword]) for value in values)
        if keyword == "type" and possible is not None:
            types = set(listed(schema["type"]))
            return possible <= types | ({"integer"} if "number" in types else set())
        return False

    def _read_object(self, schema: Any, path: tuple[str, ...]) -> None:
        """Read the keywords of objects, and note those that the grammar drops beside others."""
        properties = schema.get("properties") or {}
        patterns = schema.get("patternProperties") or {}
        names = schema.get("propertyNames")
        others = others_keyword(schema)
        for required in schema.get("required", ()):
            if required not in properties:
                self._note("required", path, f"{required!r} is not in `properties`")
        is_open = bool(patterns) or others is not None or (bool(names) and not properties)
        if is_open and isinstance(least := schema.get("minProperties"), int) and least > 1:
            self._note("minProperties", path, "a name may come twice")
        if patterns:
            self._read_patterns(schema, path)
        if names:
            if patterns or not all(self._holds_all(name, names) for name in properties):
                self._note("propertyNames", path, f"beside `{'patternProperties' if patterns else 'properties'}`")
            if not patterns and others is not None and any(self._holds_all(name, names) for name in properties):
                self._note("properties", path, "beside `propertyNames`, which allows these names with any value")
            if not patterns and not properties:
                closed = next((key for key in MEANS_OBJECT[1:] if schema.get(key) is False), None)
                if closed is not None:
                    self._note(closed, path, "beside `propertyNames`")
            self.read(names, (*path, "propertyNames"), is_name=True)
        for keyword, group in (("properties", properties), ("patternProperties", patterns)):
            for name, option in group.items():
                self.read(option, (*path, keyword, name))
        if others is not None and (properties or not patterns):
            self.read(schema[others], (*path, others))

    def _read_patterns(self, schema: Any, path: tuple[str, ...]) -> None:
        """Read `patternProperties`, which the grammar may not enforce with several patterns or beside `properties`."""
        patterns = schema["patternProperties"]
        properties = schema.get("properties") or {}
        others = others_keyword(schema)
        if len(patterns) > 1:
            self._note("patternProperties", path, "several patterns may match a name")
        elif any(not holds(name, "not", {"pattern": pattern}) for name in properties for pattern in patterns):
            self._note("patternProperties", path, "beside `properties`")
        elif properties and others is not None:
            self._note("patternProperties", path, f"beside `{others}`")
        for pattern in patterns:
            if reason := why_unenforced(pattern):
                self._note("patternProperties", path, f"{pattern!r} {reason}")
        if properties and others is not None:
            self._note("properties", path, f"beside `patternProperties` and `{others}`")

    def _read_array(self, schema: Any, path: tuple[str, ...]) -> None:
        for index, option in enumerate(schema.get("prefixItems", [])):
            self.read(option, (*path, "prefixItems", str(index)))
        others = "items" if "items" in schema else "unevaluatedItems"
        self.read(schema.get(others), (*path, others))

    def _read_string(self, schema: Any, path: tuple[str, ...]) -> None:
        """Read the keywords of strings. A known `format` stands in the place of `pattern`, and either of lengths."""
        form = schema.get("format")
        pattern = schema.get("pattern")
        instead = "format" if form in KNOWN_FORMATS else None if pattern is None else "pattern"
        for keyword in ("minLength", "maxLength", "pattern"):
            if instead not in (None, keyword) and keyword in assertions(schema):
                self._note(keyword, path, f"beside `{instead}`")
        if form is not None and form not in KNOWN_FORMATS - UNSAFE_FORMATS:
            self._note("format", path, f"{form!r} is {'not safe' if form in KNOWN_FORMATS else 'not known'}")
        if instead == "pattern" and (reason := why_unenforced(pattern)):
            self._note("pattern", path, reason)

    def _target(self, uri: str, path: tuple[str, ...]) -> tuple[Any, tuple[str, ...]] | None:
        """The schema that a `$ref` leads to, and its path; `None` where the library does not follow it."""
        if not (uri == "#" or uri.startswith("#/")) or self._is_embedded(path):
            return None
        names = tuple(name for name in uri[1:].split("/") if name)
        return (self._at(names), names) if not self._is_embedded(names) else None

    def _at(self, path: Iterable[str]) -> Any:
        place = self.root
        for name in path:
            if isinstance(place, list) and name.isdigit() and int(name) < len(place):
                place = place[int(name)]
            else:
                place = place.get(name) if isinstance(place, Mapping) else None
        return place

    def _is_embedded(self, path: tuple[str, ...]) -> bool:
        """Whether the place is in a schema with an `$id` of its own, from which `#` is counted."""
        inner = (self._at(path[:end]) for end in range(1, len(path) + 1))
        return any(isinstance(place, Mapping) and isinstance(place.get("$id"), str) for place in inner)

    def _types(self, schema: Any, seen: frozenset[str] = frozenset(), is_said: bool = False) -> set[str] | None:
        """The types of the values that the grammar of a schema allows, or with `is_said` the schema; `None`: any."""
        schema = well_formed(schema)
        if schema is None:
            return None
        first = next((keyword for keyword in EXCLUSIVE_KEYWORDS if keyword in schema), None)
        if first is None:
            return set(types_read(schema)) or None if not is_said or "type" in schema else None
        value = schema[first]
        if first == "$ref":
            target = None if value in seen else self._target(value, ())
            return None if target is None else self._types(target[0], seen | {value}, is_said)
        if first in ("const", "enum"):
            return {json_type(one) for one in (value if first == "enum" else [value])}
        if first == "allOf" and len(value) != 1:
            return None
        options = [self._types(option, seen, is_said) for option in value]
        return None if None in options else {one for option in options for one in option or ()}

    def _may_overlap(self, options: list[Any]) -> bool:
        pairs = [(one, other) for index, one in enumerate(options) for other in options[:index]]
        return not all(self._are_apart(self._resolved(one), self._resolved(other)) for one, other in pairs)

    def _resolved(self, schema: Any) -> Any:
        """What a `$ref` leads to in the end; `None` where it leads in a circle or elsewhere."""
        for _ in range(20):
            if isinstance(schema, bool):
                return schema
            schema = well_formed(schema)
            if schema is None or "$ref" not in schema:
                return schema
            target = self._target(schema["$ref"], ())
            schema = None if target is None else target[0]
        return None

    def _are_apart(self, one: Any, other: Any) -> bool:
        """Whether no value that the grammar of one of the schemas allows is valid by the other."""
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return one is False or other is False
        types = self._types(one)
        others = self._types(other)
        sides = ((types, self._types(other, is_said=True)), (others, self._types(one, is_said=True)))
        if all(left and right and not numbers_alike(left) & numbers_alike(right) for left, right in sides):
            return True
        values = listed_values(one)
        other_values = listed_values(other)
        if values is not None and other_values is not None:
            return not any(is_same_value(value, other_value) for value in values for other_value in other_values)
        if types != {"object"} or others != {"object"}:
            return False
        shared = [name for name in required_properties(one) if name in required_properties(other)]
        if any(
            self._are_apart(self._resolved(one["properties"][name]), self._resolved(other["properties"][name]))
            for name in shared
        ):
            return True
        return lacks_required(one, other) and lacks_required(other, one)

    def _holds_all(self, name: str, schema: Any) -> bool:
        """Whether the name of a property is surely valid by a schema."""
        schema = self._resolved(schema)
        return isinstance(schema, Mapping) and all(holds(name, key, schema[key]) for key in assertions(schema))


def _pointer(path: tuple[str, ...]) -> str:
    return "".join(f"/{name.replace('~', '~0').replace('/', '~1')}" for name in path)
