"""Keywords that the grammar does not enforce: what is reported is tried on the grammar itself, and what is not, too. A
newer library that enforces more, or less, fails here."""

from __future__ import annotations

import functools
import json
import logging

import pytest
import xgrammar
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from hf_adafuse.members.json_patterns import why_unenforced
from hf_adafuse.members.schema_keywords import Unenforced, opened, unenforced_keywords
from hf_adafuse.members.structured import parse_grammar, read_structured
from hf_adafuse.members.tools import Offer

INTEGER, STRING, NUMBER = ({"type": name} for name in ("integer", "string", "number"))
INTEGERS = {"type": "array", "items": INTEGER}
NAMES = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}
OPEN = {"type": "object", "additionalProperties": INTEGER}


@functools.cache
def compiler():
    info = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)] + [b""], stop_token_ids=[256])
    return xgrammar.GrammarCompiler(info)


def allows(schema, text):
    """Whether a whole text follows the grammar of a schema."""
    matcher = xgrammar.GrammarMatcher(compiler().compile_grammar(parse_grammar(("json_schema", json.dumps(schema)))))
    return matcher.accept_string(text) and matcher.accept_token(256)


def is_valid(schema, text):
    try:
        return Draft202012Validator(schema).is_valid(json.loads(text))
    except json.JSONDecodeError:
        return False


def a_record(title, **others):
    return {"type": "object", "properties": {"title": title, **others}, "required": ["title"]}


# A schema, what of it is reported, and a text that is not valid by it.
UNENFORCED = [
    # Of any values
    ({**STRING, "not": {"const": "a"}}, "`not` at the root", '"a"'),
    ({**INTEGER, "if": {"minimum": 5}, "then": {"multipleOf": 5}}, "`if` at the root", "6"),
    ({**INTEGER, "if": {"minimum": 5}, "else": {"minimum": 3}}, "`if` at the root", "1"),
    ({"$defs": {"A": {"$dynamicAnchor": "A", **INTEGER}}, "$dynamicRef": "#A"}, "`$dynamicRef` at the root", "true"),
    # Of arrays
    ({**INTEGERS, "uniqueItems": True}, "`uniqueItems` at the root", "[1, 1]"),
    ({**INTEGERS, "contains": {"const": 1}}, "`contains` at the root", "[2]"),
    ({**INTEGERS, "contains": {"const": 1}, "minContains": 2}, "`contains` at the root, `minContains`", "[1, 2]"),
    ({**INTEGERS, "contains": {"const": 1}, "maxContains": 1}, "`contains` at the root, `maxContains`", "[1, 1]"),
    # Of objects
    ({**NAMES, "dependentRequired": {"a": ["b"]}}, "`dependentRequired` at the root", '{"a": 1}'),
    ({**NAMES, "dependentSchemas": {"a": {"required": ["b"]}}}, "`dependentSchemas` at the root", '{"a": 1}'),
    ({**NAMES, "required": ["c"]}, "`required` at the root ('c' is not in `properties`)", '{"a": 1}'),
    ({**OPEN, "required": ["c"]}, "`required` at the root ('c' is not in `properties`)", '{"a": 1}'),
    ({**OPEN, "minProperties": 2}, "`minProperties` at the root (a name may come twice)", '{"a": 1, "a": 1}'),
    (
        {"type": "object", "patternProperties": {"^a.?$": INTEGER, "^.?b$": STRING}},
        "`patternProperties` at the root (several patterns may match a name)",
        '{"ab": 1}',
    ),
    (
        {"type": "object", "properties": {"ab": STRING}, "patternProperties": {"^a": INTEGER}},
        "`patternProperties` at the root (beside `properties`)",
        '{"ab": "x"}',
    ),
    (
        {**OPEN, "properties": {"c": STRING}, "patternProperties": {"^a$": STRING}},
        "`patternProperties` at the root (beside `additionalProperties`), "
        "`properties` at the root (beside `patternProperties` and `additionalProperties`)",
        '{"a": 1}',
    ),
    (
        {**OPEN, "properties": {"c": STRING}, "patternProperties": {"^a$": STRING}},
        "`patternProperties` at the root (beside `additionalProperties`), `properties` at the root (beside",
        '{"c": 1}',
    ),
    (
        {"type": "object", "patternProperties": {"^(?=x)a$": INTEGER}, "additionalProperties": False},
        "`patternProperties` at the root ('^(?=x)a$' looks around)",
        '{"a": 1}',
    ),
    (
        {**NAMES, "propertyNames": {"pattern": "^a$"}},
        "`propertyNames` at the root (beside `properties`)",
        '{"b": 1}',
    ),
    (
        {"type": "object", "propertyNames": {"pattern": "^a$"}, "patternProperties": {"^b$": INTEGER}},
        "`propertyNames` at the root (beside `patternProperties`)",
        '{"b": 1}',
    ),
    (
        {**NAMES, "propertyNames": {"maxLength": 1}, "additionalProperties": True},
        "`properties` at the root (beside `propertyNames`, which allows these names with any value)",
        '{"a": "x"}',
    ),
    (
        {"type": "object", "propertyNames": {"maxLength": 1}, "additionalProperties": False},
        "`additionalProperties` at the root (beside `propertyNames`)",
        '{"a": 1}',
    ),
    (
        {"type": "object", "propertyNames": {"maxLength": 1}, "unevaluatedProperties": False},
        "`unevaluatedProperties` at the root (beside `propertyNames`)",
        '{"a": 1}',
    ),
    (
        {"type": "object", "propertyNames": {"anyOf": [{"maxLength": 1}]}},
        "`maxLength` at /propertyNames/anyOf/0 (without `type`)",
        '{"ab": 1}',
    ),
    # Of strings
    ({**STRING, "pattern": "^a*$", "minLength": 2}, "`minLength` at the root (beside `pattern`)", '"a"'),
    ({**STRING, "pattern": "^a*$", "maxLength": 2}, "`maxLength` at the root (beside `pattern`)", '"aaa"'),
    ({**STRING, "format": "email", "maxLength": 3}, "`maxLength` at the root (beside `format`)", '"ab@example.com"'),
    ({**STRING, "format": "date", "pattern": "^2"}, "`pattern` at the root (beside `format`)", '"1999-01-01"'),
    ({**STRING, "pattern": "^(?!a).$"}, "`pattern` at the root (looks around)", '"a"'),
    ({**STRING, "pattern": "^(a$)b$"}, "`pattern` at the root (has an anchor inside)", '"ab"'),
    ({**STRING, "pattern": "a^"}, "`pattern` at the root (has an anchor inside)", '"a"'),
    ({**STRING, "pattern": '^"a"$'}, "`pattern` at the root (writes quotes", '""a""'),
    ({**STRING, "pattern": '^("\\d")$'}, "`pattern` at the root (writes quotes", '""1""'),
    ({**STRING, "pattern": "^é.$"}, "`pattern` at the root (writes quotes", '"é""'),
    ({**STRING, "pattern": "^[^é]$"}, "`pattern` at the root (writes quotes", '"\\"'),
    ({**STRING, "format": "json-pointer"}, "`format` at the root ('json-pointer' is not safe)", '"/a"b"'),
    # Of numbers
    ({**NUMBER, "multipleOf": 2}, "`multipleOf` at the root (of numbers)", "3"),
    ({**NUMBER, "multipleOf": 0.5}, "`multipleOf` at the root (of numbers)", "0.7"),
    ({**INTEGER, "multipleOf": 1025}, "`multipleOf` at the root (large, or beside a bound)", "3"),
    ({**INTEGER, "multipleOf": 1.5}, "`multipleOf` at the root (large, or beside a bound)", "2"),
    ({**INTEGER, "multipleOf": 3, "minimum": 0}, "`multipleOf` at the root (large, or beside a bound)", "4"),
    (
        {**INTEGER, "multipleOf": 3, "minimum": 0, "maximum": 10_001},
        "`multipleOf` at the root (large, or beside a bound)",
        "4",
    ),
    ({"type": ["integer", "number"], "multipleOf": 2}, "`multipleOf` at the root (of numbers)", "3"),
    # Without a type
    *(
        ({keyword: value}, f"`{keyword}` at the root (without `type`)", text)
        for keyword, value, text in [
            ("minLength", 2, '"a"'),
            ("maxLength", 0, '"a"'),
            ("pattern", "^a$", '"b"'),
            ("minimum", 0, "-1"),
            ("maximum", 0, "4"),
            ("exclusiveMinimum", 0, "0"),
            ("exclusiveMaximum", 0, "3"),
            ("multipleOf", 2, "3"),
            ("minItems", 1, "[]"),
            ("maxItems", 0, "[1, 2]"),
            ("required", ["c"], "{}"),
            ("minProperties", 1, "{}"),
            ("maxProperties", 0, '{"a": 1}'),
            ("patternProperties", {"^a$": INTEGER}, '{"a": "x"}'),
            ("propertyNames", {"pattern": "^a$"}, '{"b": 1}'),
        ]
    ),
    ({"uniqueItems": True}, "`uniqueItems` at the root", "[1, 1]"),
    # Beside what alone is read
    ({"$defs": {"A": INTEGER}, "$ref": "#/$defs/A", "minimum": 3}, "`minimum` at the root (beside `$ref`)", "2"),
    ({"enum": ["a", "bb"], "minLength": 2}, "`minLength` at the root (beside `enum`)", '"a"'),
    ({"enum": ["a", 1], **STRING}, "`type` at the root (beside `enum`)", "1"),
    ({"const": "a", "minLength": 2}, "`minLength` at the root (beside `const`)", '"a"'),
    ({"const": "c", "enum": ["a"]}, "`enum` at the root (beside `const`)", '"c"'),
    ({"anyOf": [INTEGER, {"type": "null"}], "minimum": 3}, "`minimum` at the root (beside `anyOf`)", "2"),
    ({"anyOf": [INTEGER, STRING], **INTEGER}, "`type` at the root (beside `anyOf`)", '"a"'),
    ({"oneOf": [INTEGER, STRING], "minimum": 3}, "`minimum` at the root (beside `oneOf`)", "2"),
    ({"allOf": [INTEGER], "minimum": 3}, "`minimum` at the root (beside `allOf`)", "2"),
    ({"allOf": [], **STRING}, "`type` at the root (beside `allOf`)", "1"),
    (
        {**NAMES, "anyOf": [{**NAMES, "required": [name]} for name in "ab"], "maxProperties": 1},
        "`properties` at the root (beside `anyOf`), `maxProperties` at the root (beside `anyOf`)",
        '{"a": 1, "b": 1}',
    ),
    (
        {"$defs": {"A": OPEN}, "$ref": "#/$defs/A", "additionalProperties": False},
        "`additionalProperties` at the root (beside `$ref`)",
        '{"a": 1}',
    ),
    ({"allOf": [INTEGERS], "items": False}, "`items` at the root (beside `allOf`)", "[1]"),
    ({**INTEGERS, "contains": {}}, "`contains` at the root", "[]"),
    ({"allOf": [INTEGER, {"minimum": 3}]}, "`allOf` at the root (several schemas)", "2"),
    ({"oneOf": [{**INTEGER, "minimum": 1}, INTEGER]}, "`oneOf` at the root (read as `anyOf`)", "3"),
    ({"oneOf": [INTEGER, NUMBER]}, "`oneOf` at the root (read as `anyOf`)", "3"),
    ({"oneOf": [{"properties": {"a": {}}}, INTEGER]}, "`oneOf` at the root (read as `anyOf`)", "1"),
    ({"oneOf": [{"enum": [1, 2]}, {"const": 2}]}, "`oneOf` at the root (read as `anyOf`)", "2"),
    ({"oneOf": [NAMES, {**NAMES, "required": ["a"]}]}, "`oneOf` at the root (read as `anyOf`)", '{"a": 1}'),
    ({"enum": [2**64 + 1]}, "`enum` at the root (integers of more than 64 bits)", str(float(2**64))),
    # References
    (
        {"$defs": {"A": {"$anchor": "A", **INTEGER}}, "type": "array", "items": {"$ref": "#A"}},
        "`$ref` at /items (to another place than `#` or `#/...`)",
        '["a"]',
    ),
    (
        {
            "$id": "http://a.test/root",
            "$defs": {
                "A": {"$id": "http://a.test/a", "$defs": {"T": STRING}, **INTEGERS, "items": {"$ref": "#/$defs/T"}},
                "T": INTEGER,
            },
            "anyOf": [{"$ref": "#/$defs/A"}],
        },
        "`$ref` at /anyOf/0 (to another place than `#` or `#/...`)",
        "[1]",
    ),
    # Where names of properties are taken for annotations
    (
        {"type": "array", "prefixItems": [a_record(STRING), a_record(INTEGER)], "items": False},
        "`properties` at /prefixItems/1 (taken for that at /prefixItems/0, as names like `title` do not count)",
        '[{"title": "a"}, {"title": "a"}]',
    ),
    (
        {"type": "array", "prefixItems": [{"const": {"title": 1}}, {"const": {"title": 2}}], "items": False},
        "`const` at /prefixItems/1 (taken for that at /prefixItems/0, as names like `title` do not count)",
        '[{"title":1}, {"title":1}]',
    ),
]  # fmt: skip

# A schema of which nothing is reported, a text that is not valid by it, and one that is.
ENFORCED = [
    ({**INTEGERS, "minItems": 2}, "[1]", "[1, 2]"),
    ({**INTEGERS, "maxItems": 1}, "[1, 2]", "[1]"),
    ({**INTEGERS, "uniqueItems": False, "minContains": 1}, '["a"]', "[1, 1]"),
    ({**INTEGERS, "contains": STRING, "minContains": 0}, '["a"]', "[1]"),
    ({"allOf": [INTEGERS], "minItems": 0, "items": {}, "not": False}, '["a"]', "[1]"),
    ({"type": "array", "prefixItems": [STRING], "items": INTEGER, "minItems": 2}, '["a"]', '["a", 1]'),
    ({"type": "array", "prefixItems": [STRING], "items": INTEGER, "maxItems": 2}, '["a", 1, 2]', '["a", 1]'),
    ({"prefixItems": [STRING], "unevaluatedItems": INTEGER}, '["a", "b"]', '["a", 1]'),
    ({"type": "array", "prefixItems": [STRING], "unevaluatedItems": False}, '["a", 1]', '["a"]'),
    ({"items": INTEGER}, '["a"]', "[1]"),
    ({**INTEGERS, "additionalItems": False}, '["a"]', "[1]"),  # of tuples in older drafts; says nothing here
    ({**NAMES, "required": ["b"]}, '{"a": 1}', '{"b": 1}'),
    ({"properties": {"c": INTEGER}, "required": ["c"]}, "{}", '{"c": 1}'),
    ({**NAMES, "minProperties": 2}, '{"a": 1}', '{"a": 1, "b": 2}'),
    ({**NAMES, "maxProperties": 1}, '{"a": 1, "b": 2}', '{"a": 1}'),
    ({**NAMES, "maxProperties": 0}, '{"a": 1}', "{}"),
    ({**OPEN, "maxProperties": 1}, '{"a": 1, "b": 2}', '{"a": 1}'),
    ({**OPEN, "minProperties": 1}, "{}", '{"a": 1}'),
    ({**NAMES, "additionalProperties": STRING}, '{"c": 1}', '{"a": 1, "c": "x"}'),
    ({**NAMES, "additionalProperties": STRING}, '{"a": "x"}', '{"a": 1}'),
    ({**NAMES, "unevaluatedProperties": STRING}, '{"c": 1}', '{"a": 1, "c": "x"}'),
    ({**NAMES, "unevaluatedProperties": False}, '{"c": 1}', '{"a": 1}'),
    ({"unevaluatedProperties": STRING}, '{"c": 1}', '{"c": "x"}'),
    ({"type": "object", "patternProperties": {"^a$": INTEGER}}, '{"a": "x"}', '{"a": 1}'),
    ({"type": "object", "properties": {"b": STRING}, "patternProperties": {"^a": INTEGER}}, '{"b": 1}', '{"b": "x"}'),
    ({"type": "object", "propertyNames": {"pattern": "^a$"}}, '{"b": 1}', '{"a": 1}'),
    ({"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": INTEGER}, '{"a": "x"}', '{"a": 1}'),
    ({**NAMES, "propertyNames": {"maxLength": 1}}, '{"a": "x"}', '{"a": 1}'),
    ({**STRING, "minLength": 2}, '"a"', '"ab"'),
    ({**STRING, "maxLength": 1}, '"ab"', '"é"'),
    ({**STRING, "pattern": "^a{1,3}$", "minLength": 0}, '"b"', '"aa"'),
    ({**STRING, "pattern": "^(^a|b$)$"}, '"ab"', '"b"'),
    ({**STRING, "pattern": '^[^a]|"$'}, '"""', '"b"'),
    ({**STRING, "pattern": "^[a-zé]+$"}, '"B"', '"é"'),
    ({**INTEGER, "multipleOf": 3}, "4", "6"),
    ({**INTEGER, "multipleOf": 0.5}, "1.5", "2"),
    ({**INTEGER, "multipleOf": 3, "minimum": 0, "exclusiveMaximum": 9_999}, "4", "9996"),
    ({**INTEGER, "exclusiveMinimum": 3}, "3", "4"),
    ({**NUMBER, "exclusiveMinimum": 0.5}, "0.5", "0.51"),
    ({**NUMBER, "exclusiveMaximum": 0}, "-0", "-0.1"),
    ({**NUMBER, "minimum": 1.5, "maximum": 1.7}, "1.8", "1.6"),
    ({"type": ["integer", "string"], "minimum": 3, "minLength": 2}, '"a"', "3"),
    ({"type": ["object", "null"], **{key: NAMES[key] for key in ["properties"]}}, '{"a": "x"}', "null"),
    ({"allOf": [{**INTEGER, "minimum": 3}]}, "2", "3"),
    ({"enum": ["a", "b"], **STRING, "maxLength": 1}, '"c"', '"a"'),
    ({"const": 1, **NUMBER, "minimum": 1}, "2", "1"),
    ({"anyOf": [INTEGER, {"type": "null"}], "maxLength": 2}, '"abc"', "null"),
    ({"anyOf": [INTEGER, {"enum": [0.5]}], **NUMBER}, "1.5", "0.5"),
    ({"oneOf": [INTEGER, STRING]}, "true", "1"),
    ({"oneOf": [{"enum": [1, 2]}, {"const": "2"}]}, "3", "2"),
    (
        {
            "$defs": {name: {**NAMES, "properties": {"kind": {"const": name}}, "required": ["kind"]} for name in "AB"},
            "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
            "discriminator": {"propertyName": "kind"},
        },
        '{"kind": "C"}',
        '{"kind": "B"}',
    ),
    (
        {"oneOf": [{"properties": {name: INTEGER}, "required": [name]} for name in "ab"]},
        '{"a": 1, "b": 1}',
        '{"b": 1}',
    ),
    (
        {**NAMES, "properties": {"next": {"$ref": "#"}, "kinds": {"$ref": "#/properties/next"}}},
        '{"kinds": 1}',
        '{"next": {"kinds": {}}}',
    ),
    ({"$defs": {"A": {**INTEGER, "not": {}}, "B": INTEGER}, "$ref": "#/$defs/B", "default": 1}, '"a"', "1"),
    # Properties that are named as keywords are
    ({"properties": {"not": INTEGER, "if": INTEGER, "$ref": STRING}, "required": ["not"]}, "{}", '{"not": 1}'),
    ({**INTEGER, "title": "a", "description": "a", "examples": [{"not": {}}], "nullable": True}, '"a"', "1"),
    (
        {"type": "array", "prefixItems": [{**STRING, "title": "One"}, {**STRING, "title": "Two"}], "items": False},
        '["a", 1]',
        '["a", "b"]',
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "expected", "text"), UNENFORCED, ids=lambda value: str(value)[:60])
def test_what_is_reported_is_not_enforced(schema, expected, text):
    assert ", ".join(map(str, unenforced_keywords(schema))).startswith(expected)
    assert not is_valid(schema, text)
    assert allows(schema, text)


@pytest.mark.parametrize(("schema", "wrong", "right"), ENFORCED, ids=lambda value: str(value)[:60])
def test_what_is_not_reported_is_enforced(schema, wrong, right):
    assert unenforced_keywords(schema) == []
    assert is_valid(schema, right) and not is_valid(schema, wrong)
    assert allows(schema, right) and not allows(schema, wrong)


FORMATS = {
    "email": "a", "date": "2024-13-01", "time": "24:00:00Z", "date-time": "2024-01-01", "duration": "1 h",
    "ipv4": "1.1", "ipv6": "g::", "hostname": "-", "uuid": "1", "uri": "a", "uri-reference": "^", "uri-template": "{",
}  # fmt: skip


@pytest.mark.parametrize("name", [*FORMATS, "regex", "idn-email", "idn-hostname", "iri", "iri-reference", "phone"])
def test_formats(name):
    schema = {**STRING, "format": name}
    assert allows(schema, json.dumps(FORMATS.get(name, "("))) == (name not in FORMATS)
    reported = [Unenforced("format", "", f"{name!r} is not known")]
    assert unenforced_keywords(schema) == ([] if name in FORMATS else reported)


def test_annotations_that_say_what_a_string_holds():
    schema = {**STRING, "contentEncoding": "base64", "contentMediaType": "text/html"}
    assert [one.keyword for one in unenforced_keywords(schema)] == ["contentEncoding", "contentMediaType"]
    assert allows(schema, '"<!!"')


def test_dependencies_of_older_drafts():
    schema = {**NAMES, "dependencies": {"a": ["b"]}}
    assert unenforced_keywords(schema) == [Unenforced("dependencies", "")]
    assert allows(schema, '{"a": 1}')


def test_paths():
    """Pointers to the schemas; what a `$ref` leads to stands where it is, and once."""
    unique = {"type": "array", "uniqueItems": True}
    schema = {
        "$defs": {"A": {"type": "object", "properties": {"a/b~c": unique}}, "unused": {"not": {}}},
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/A"},
            "b": {"$ref": "#/$defs/A"},
            "tags": {"anyOf": [{"type": "null"}, {**unique, "maxItems": 2}]},
            "c": {"type": "array", "prefixItems": [{**unique, "maxItems": 3}], "items": {**unique, "maxItems": 4}},
            "d": {**NAMES, "additionalProperties": {**unique, "maxItems": 5}},
        },
    }
    assert [one.path for one in unenforced_keywords(schema)] == [
        "/$defs/A/properties/a~1b~0c",
        "/properties/tags/anyOf/1",
        "/properties/c/prefixItems/0",
        "/properties/c/items",
        "/properties/d/additionalProperties",
    ]


@pytest.mark.parametrize(
    "schema",
    [
        *(True, False, 3, "a", [], {}, {"$ref": "#"}, {"$ref": 3}, {"$ref": "#/a/b"}, {"type": "it"}, {"type": 3}),
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "oneOf": [{"$ref": "#/$defs/a"}, {}]},
        *({"type": kind, keyword: 3} for kind in ("object", "array", "string", "integer")
          for keyword in ("properties", "required", "items", "enum", "anyOf", "allOf", "pattern", "propertyNames",
                          "patternProperties", "prefixItems", "additionalProperties", "oneOf", "format", "multipleOf")),
        {"type": "string", "pattern": "("}, {"enum": [[1], {"a": 1}], "minimum": "a"}, {"oneOf": [3, {"required": 4}]},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_schema_is_the_librarys_to_refuse(schema):
    assert isinstance(unenforced_keywords(schema), list)


@pytest.mark.parametrize(
    ("pattern", "flaw"),
    [
        *(
            (pattern, "")
            for pattern in ["", "a|b$", "^[$^]$", r"\^a\$", r"^(?<y>\d{4})$", r"^a\\?$", '^(a|")$', "^.*$"]
        ),
        *((pattern, "looks around") for pattern in ["^(?=a)b$", "a(?!b)", "(?<=a)b", "(?<!a)b"]),
        *(
            (pattern, f"has the escape {pattern[:2]}, which the grammar takes for a letter")
            for pattern in [r"\Aa", r"\z"]
        ),
        *((pattern, "has an anchor inside") for pattern in ["$a", "a^", "^(a|b$)c$", "^a(^b)$"]),
    ],
)
def test_patterns(pattern, flaw):
    assert why_unenforced(pattern) == flaw


# What is said of it


class Tags(BaseModel):
    tags: set[str]
    score: float = Field(multiple_of=0.5)


MESSAGE = (
    "`uniqueItems` at /properties/tags, `multipleOf` at /properties/score (of numbers)"  # what pydantic makes of it
)


def test_one_warning_names_all(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hf_adafuse"), "propagate", True)
    for _ in range(2):
        assert read_structured({"json_schema": Tags}) == ("json_schema", json.dumps(Tags.model_json_schema()))
    (message,) = caplog.messages
    assert message == (
        f"The JSON schema has keywords that the grammar does not enforce: {MESSAGE}. A text may violate these. Check "
        "it yourself, leave them out, or pass `strict` to refuse them."
    )
    read_structured({"json_schema": INTEGERS})
    assert len(caplog.messages) == 1


def test_strict_refuses():
    with pytest.raises(ValueError, match="must have only keywords") as caught:
        read_structured({"json_schema": Tags, "strict": True})
    assert str(caught.value) == (
        "`structured['json_schema']` must have only keywords that the grammar enforces where it is strict, but has "
        f"{MESSAGE}. Leave these out, or `strict`, and check the text yourself."
    )
    assert read_structured({"json_schema": INTEGERS, "strict": True}) == ("json_schema", json.dumps(INTEGERS))


def test_schemas_in_structural_tags():
    content = {"type": "json_schema", "json_schema": Tags.model_json_schema()}
    form = {"type": "sequence", "elements": [{"type": "const_string", "value": "a"}, content]}
    tag = {"type": "structural_tag", "format": form}
    assert read_structured({"structural_tag": tag}) == ("structural_tag", json.dumps(tag))
    with pytest.raises(ValueError, match=r"^`structured\['structural_tag'\]` must have only keywords that") as caught:
        read_structured({"structural_tag": tag, "strict": True})
    assert f"but has {MESSAGE}. Leave" in str(caught.value)
    content["json_schema"] = INTEGERS
    assert read_structured({"structural_tag": tag, "strict": True}) == ("structural_tag", json.dumps(tag))


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("strict", [None, False, True])
def test_strict_tools(choice, strict):
    """As of OpenAI's API: the grammar is to keep the arguments to the schema. Members are not told of it."""
    function = {"name": "f", "parameters": {**NAMES, "not": {}}, **({} if strict is None else {"strict": strict})}
    offer = Offer.of([{"type": "function", "function": function}], choice)
    assert '"strict"' not in offer.prompt and '"not"' in offer.prompt
    if strict:
        with pytest.raises(ValueError, match=r"has `not` at .*/properties/arguments\. Leave"):
            read_structured(offer.structured)
    else:
        assert read_structured(offer.structured) is not None
    assert function.get("strict") == strict


@pytest.mark.parametrize("given", [{"json_schema": {}, "strict": "yes"}, {"regex": "a", "strict": True}])
def test_strict_is_of_schemas(given):
    with pytest.raises(ValueError, match=r"^`structured\['strict'\]` must be True or False beside a JSON schema, but"):
        read_structured(given)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "array", "maxItems": 3}, '["a", 1, null]'),
        ({"type": "array", "uniqueItems": True}, '[["a"], {"b": 1}]'),
        ({"type": "array", "minItems": 2}, "[1, 2, 3]"),
        ({"type": "array", "minItems": 0}, "[true]"),
        ({"type": ["array", "null"], "maxItems": 1}, "[1]"),
        ({"type": "object", "maxProperties": 2}, '{"a": [1], "b": 2}'),
        ({"type": "object", "minProperties": 1}, '{"a": {}}'),
        ({"type": "object", "required": ["a"]}, '{"a": 1}'),
        ({"type": "object", "properties": {"tags": {"type": "array", "maxItems": 3}}}, '{"tags": ["a", "b"]}'),
        ({"type": "array", "items": {"type": "object", "maxProperties": 1}}, '[{"a": 1}]'),
        ({"anyOf": [{"type": "array", "minItems": 1}, {"type": "null"}]}, "[0]"),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"type": "array", "minItems": 1}}}, "[0]"),
        ({"prefixItems": [INTEGER, {"type": "array", "maxItems": 1}], "type": "array"}, "[1, [2]]"),
        ({"$ref": "#/components/schemas/A", "components": {"schemas": {"A": {"type": "array", "maxItems": 1}}}}, "[0]"),
        ({"type": "object", "properties": {"enum": {"type": "array", "maxItems": 1}}}, '{"enum": [0]}'),
    ],
)
def test_what_says_nothing_of_items_and_properties_allows_any(schema, text):
    """The library allows none of them beside another keyword."""
    assert is_valid(schema, text) and allows(schema, text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "array", "maxItems": 1}, "[1, 2]"),
        ({"type": "array", "minItems": 2}, "[1]"),
        ({"type": "object", "maxProperties": 1}, '{"a": 1, "b": 2}'),
        ({"type": "object", "properties": {}}, '{"a": 1}'),  # a tool without arguments
        ({"type": "object", "properties": {"a": INTEGER}}, '{"b": 1}'),
        ({"enum": [{"type": "array", "maxItems": 1}]}, '{"type": "array", "maxItems": 1, "items": {}}'),
    ],
)
def test_what_says_something_is_as_before(schema, text):
    assert not allows(schema, text)


def test_names_that_come_twice_are_reported_where_any_may_come():
    assert [one.keyword for one in unenforced_keywords({"type": "object", "minProperties": 2})] == ["minProperties"]
    assert allows({"type": "object", "minProperties": 2}, '{"a": 1, "a": 2}')


def test_a_schema_given_is_not_changed():
    schema = {"type": "object", "properties": {"a": {"type": "array", "maxItems": 3}}}
    before = json.dumps(schema)
    assert opened(schema)["properties"]["a"] == {"type": "array", "maxItems": 3, "items": {}}
    assert json.dumps(schema) == before and opened(True) is True
