"""What single keywords of a JSON schema mean to xgrammar 0.2.8, which makes a grammar of it: which types they are
about, which rule nothing out, and whether a value is surely valid by one. `schema_keywords` goes through a schema.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# Of a schema with some of these keywords xgrammar reads the first one in this order, and nothing that stands beside it.
EXCLUSIVE_KEYWORDS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
# The keywords that rule out values of any type, then those that rule out values of one type.
_OF_ANY = ("not", "if", "$dynamicRef", "$recursiveRef")
_OF_TYPE = {
    "object": (
        "properties", "required", "patternProperties", "additionalProperties", "propertyNames", "minProperties",
        "maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties",
    ),
    "array": (
        "items", "prefixItems", "contains", "minContains", "maxContains", "minItems", "maxItems", "uniqueItems",
        "unevaluatedItems",
    ),
    "string": (
        "minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType", "contentSchema",
    ),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}  # fmt: skip
_TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
# By which of these a schema without `type` is read as one of objects, or else of arrays.
MEANS_OBJECT = ("properties", "additionalProperties", "unevaluatedProperties")
_MEANS_ARRAY = ("items", "prefixItems", "unevaluatedItems")
# Never enforced, wherever they stand.
IGNORED = {
    *_OF_ANY,
    *("dependentRequired", "dependentSchemas", "dependencies"),
    *("contains", "minContains", "maxContains", "uniqueItems"),
    *("contentEncoding", "contentMediaType", "contentSchema"),
}
# The formats that have a regular expression, in whose place `pattern` and lengths are not read. Those of JSON pointers
# let quotes into a string.
KNOWN_FORMATS = {
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
    *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
}
UNSAFE_FORMATS = {"json-pointer", "relative-json-pointer"}
# Multiples are counted up to this number, and within bounds that are at most so far apart.
_MOST_MULTIPLE = 1024
_MOST_APART = 10_000
# What a keyword's value is, where it is not a schema, a number or anything at all.
_SHAPES: dict[Any, tuple[str, ...]] = {
    str: ("$ref", "pattern", "format"),
    list: ("enum", "anyOf", "oneOf", "allOf", "required", "prefixItems"),
    dict: ("properties", "patternProperties"),
    (int, float): (
        *_OF_TYPE["number"],
        *(f"{end}{name}" for end in ("min", "max") for name in ("Length", "Items", "Properties")),
    ),
}
_SHAPE_OF = {keyword: shape for shape, keywords in _SHAPES.items() for keyword in keywords}
_BOUNDS = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}
# What the library leaves out, wherever it stands, where it compares two schemas: names of properties among it.
_ANNOTATIONS = {
    *("title", "default", "description", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"),
}
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def well_formed(schema: Any) -> dict[str, Any] | None:
    """A schema without the keywords whose value is of another type than theirs: the library refuses these."""
    if not isinstance(schema, Mapping):
        return None
    return {key: value for key, value in schema.items() if isinstance(value, _SHAPE_OF.get(key, object))}


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def types_read(schema: Mapping[str, Any]) -> list[str]:
    """The types as which the library reads a schema without one of `EXCLUSIVE_KEYWORDS`; none: as anything at all."""
    if "type" in schema:
        return [one for one in listed(schema["type"]) if one in _TYPES]
    is_object = any(keyword in schema for keyword in MEANS_OBJECT)
    return ["object"] if is_object else ["array"] if any(keyword in schema for keyword in _MEANS_ARRAY) else []


def others_keyword(schema: Mapping[str, Any]) -> str | None:
    """The keyword by which properties without a name of their own are allowed."""
    keyword = next((key for key in MEANS_OBJECT[1:] if key in schema), None)
    return None if keyword is None or schema[keyword] is False else keyword


def assertions(schema: Mapping[str, Any], types: Iterable[str] | None = None) -> Iterator[str]:
    """The keywords of a schema that rule out some value, of these types where they are given."""
    known = {*_TYPES} if types is None else {*types}
    keywords = {
        "type",
        *EXCLUSIVE_KEYWORDS,
        *_OF_ANY,
        *(one for kind in numbers_alike(known) for one in _OF_TYPE.get(kind, ())),
    }
    return (keyword for keyword in schema if keyword in keywords and not _allows_everything(schema, keyword))


def _allows_everything(schema: Mapping[str, Any], keyword: str) -> bool:
    value = schema[keyword]
    if keyword == "if":
        return "then" not in schema and "else" not in schema
    if keyword in ("minContains", "maxContains"):
        return "contains" not in schema or (value == 0 and keyword == "minContains")
    if keyword == "contains":  # `true` and `{}`, too, want an item
        return bool(schema.get("minContains") == 0)
    if keyword in ("const", "enum", "anyOf", "oneOf", "type"):
        return False
    if isinstance(value, bool):
        return value is (keyword not in ("uniqueItems", "not"))
    if keyword in ("minLength", "minItems", "minProperties"):
        return bool(value == 0)
    return keyword != "not" and value in ([], {})


def counts_multiples(schema: Mapping[str, Any]) -> bool:
    """Whether `multipleOf` holds for integers."""
    multiple = schema.get("multipleOf", 1)
    if not isinstance(multiple, (int, float)) or multiple <= 0 or 1 % multiple == 0:
        return True
    low, high = (
        [schema[name] for name in names if name in schema]
        for names in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
    )
    if multiple % 1 or multiple > _MOST_MULTIPLE or bool(low) != bool(high):
        return False
    return not low or min(high) - max(low) < _MOST_APART


def json_type(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", list: "array"}
    return "integer" if isinstance(value, float) and value.is_integer() else kinds.get(type(value), "object")


def numbers_alike(types: set[str]) -> set[str]:
    return {"number" if one == "integer" else one for one in types}


def is_same_value(one: Any, other: Any) -> bool:
    return bool(one == other) and json_type(one) == json_type(other)


def listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema or "enum" in schema:
        return [schema["const"]] if "const" in schema else schema["enum"]
    return None


def required_properties(schema: Mapping[str, Any]) -> list[str]:
    """The properties that a text by the grammar has, with a schema of their own."""
    return [name for name in schema.get("required", ()) if name in (schema.get("properties") or {})]


def lacks_required(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether what the grammar of one schema allows lacks a property that the other requires."""
    is_closed = others_keyword(one) is None and not one.get("patternProperties") and not one.get("propertyNames")
    return is_closed and bool(set(other.get("required", ())) - set(one.get("properties") or {}))


def holds(value: Any, keyword: str, expected: Any) -> bool:
    """Whether a value is surely valid by a keyword; of keywords that are seldom beside a value, no."""
    is_number = json_type(value) in ("integer", "number")
    try:
        if keyword == "type":
            kind = json_type(value)
            return kind in listed(expected) or (kind == "integer" and "number" in listed(expected))
        if keyword in ("const", "enum"):
            return any(is_same_value(value, one) for one in (expected if keyword == "enum" else [expected]))
        if keyword == "not" and list(expected) == ["pattern"]:
            return re.search(expected["pattern"], value) is None
        if keyword == "pattern":
            return not isinstance(value, str) or re.search(expected, value) is not None
        for sort, names in ((str, "Length"), (list, "Items"), (dict, "Properties")):
            if keyword in (f"min{names}", f"max{names}"):
                is_right = operator.ge if keyword.startswith("min") else operator.le
                return not isinstance(value, sort) or bool(is_right(len(value), expected))
        if keyword in _BOUNDS:
            return not is_number or bool(_BOUNDS[keyword](value, expected))
        if keyword == "multipleOf":
            return not is_number or value % expected == 0
    except (
        TypeError,
        ValueError,
        ArithmeticError,
        re.error,
    ):  # no valid schema: the library says so, or it does not hold
        return False
    return False


def compared_part(value: Any) -> Any:
    """What of a schema the library compares."""
    if isinstance(value, Mapping):
        return {key: compared_part(one) for key, one in value.items() if key not in _ANNOTATIONS}
    return [compared_part(one) for one in value] if isinstance(value, list) else value


def meaning_of(schema: Any) -> Any:
    """A schema without its annotations; properties of such names are none."""
    if isinstance(schema, list):
        return [meaning_of(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value
        if key in ("const", "enum")
        else {name: meaning_of(one) for name, one in value.items()}
        if key in _OF_NAMES and isinstance(value, Mapping)
        else meaning_of(value)
        for key, value in schema.items()
        if key not in _ANNOTATIONS
    }
