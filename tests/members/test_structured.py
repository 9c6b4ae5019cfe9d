"""Grammars compiled for the tokens of one member: what may come next is what the text allows, for any tokenizer."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch
import xgrammar
from pydantic import BaseModel
from support.tiny import TOKENIZERS, eos_ids

from hf_adafuse.members.structured import compile_grammar, parse_grammar, read_structured
from hf_adafuse.members.vocabulary import Vocabulary, vocabulary_of

# All tokenizers have these characters.
TEXTS = ["cat", "cats", "a tree", "is it", "at 1.", "at 2."]
REGEX = "|".join(map(re.escape, TEXTS)).replace("\\ ", " ")


class Answer(BaseModel):
    ok: bool


# 1. What is given


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ({"regex": "a+"}, ("regex", "a+")),
        ({"grammar": 'root ::= "a"'}, ("grammar", 'root ::= "a"')),
        ({"json_schema": {"enum": ["é"]}}, ("json_schema", json.dumps({"enum": ["é"]}))),
        ({"json_schema": '{"type": "null"}'}, ("json_schema", '{"type": "null"}')),
        ({"json_schema": Answer}, ("json_schema", json.dumps(Answer.model_json_schema()))),
    ],
)
def test_what_is_given(given, expected):
    assert read_structured(given) == expected


@pytest.mark.parametrize("given", ["a", {}, {"regexp": "a"}, {"regex": "a", "grammar": "b"}, ["regex"]])
def test_other_things_are_refused(given):
    with pytest.raises(
        ValueError, match=r"`structured` must be a dict with one of \['json_schema', 'regex', 'gra"
    ) as e:
        read_structured(given)
    assert f"but is {given!r}." in str(e.value)


@pytest.mark.parametrize("kind", ["json_schema", "regex", "grammar"])
@pytest.mark.parametrize("value", [3, None, ["a"], re.compile("a")])
def test_other_values_are_refused(kind, value):
    with pytest.raises(ValueError, match=rf"`structured\['{kind}'\]` must be text, but is "):
        read_structured({kind: value})


def test_a_schema_that_is_no_json_is_refused():
    with pytest.raises(
        ValueError, match=r"`structured\['json_schema'\]` must be of JSON values, but Object of type set"
    ):
        read_structured({"json_schema": {"enum": {1}}})


@pytest.mark.parametrize(
    ("structured", "reason"),
    [
        (("regex", "(a"), "Regex parsing error at position 3: The parenthesis is not closed"),
        (("json_schema", '{"type": "it"}'), 'Unsupported type "it"'),
        (("json_schema", "false"), "Schema 'false' cannot accept any value"),
        (
            ("grammar", 'top ::= "a"'),
            'EBNF parser error at line 1, column 1: The root rule with name "root" is not found',
        ),
    ],
)
def test_what_does_not_compile(structured, reason):
    """The reason is the library's, without the line of its source and the time."""
    message = f"must be one that compiles, but does not: {reason}. Correct it."
    with pytest.raises(ValueError, match="must be one that compiles") as caught:
        compile_grammar(structured, vocabulary_of(TOKENIZERS["byte_level"]()), [0], "the main model")
    assert str(caught.value) == f"`structured[{structured[0]!r}]` {message}"
    with pytest.raises(ValueError, match="must be one that compiles") as caught:
        parse_grammar(structured, "`--flag`")
    assert str(caught.value) == f"`--flag` {message}"


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    message = r"^`structured` needs the package xgrammar. Install it with `pip install \"hf_adafuse\[structured\]\"`.$"
    with pytest.raises(ImportError, match=message):
        compile_grammar(("regex", "a"), vocabulary_of(TOKENIZERS["byte_level"]()), [0], "the main model")


# 2. What is allowed


def matcher_of(structured):
    """Follows a text byte by byte; token 256 ends it."""
    info = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)] + [b""], stop_token_ids=[256])
    return xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_grammar(parse_grammar(structured)))


def allowed_after(processor, ids, size):
    """Which tokens may come after these ids, which the processor has been called with one by one."""
    prompt = [7, 7, 7]
    for end in range(len(ids) + 1):
        scores = processor(torch.tensor([prompt + ids[:end]]), torch.zeros(1, size))
    assert scores.shape == (1, size)
    assert set(scores[0].tolist()) <= {0.0, -torch.inf}
    return {token for token, score in enumerate(scores[0].tolist()) if score == 0}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_may_come_next_is_what_the_text_allows(name):
    tokenizer = TOKENIZERS[name]()
    vocabulary, eos = vocabulary_of(tokenizer), eos_ids(tokenizer)
    pieces = vocabulary.all_pieces()
    waiting, num_seen = [([], b"")], 0
    while waiting and num_seen < 200:
        ids, text = waiting.pop()
        processor = compile_grammar(("regex", REGEX), vocabulary, eos, "the main model")
        onward = {
            token
            for token, piece in enumerate(pieces)
            if piece and any(whole.encode().startswith(text + piece) for whole in TEXTS)
        }
        expected = onward | set(eos) if text.decode() in TEXTS else onward
        assert allowed_after(processor, ids, len(pieces)) == expected, text
        waiting += [([*ids, token], text + pieces[token]) for token in sorted(onward)]
        num_seen += 1
    assert num_seen > 20


@pytest.mark.parametrize("name", TOKENIZERS)
def test_whatever_follows_the_end_is_not_ruled_out(name):
    tokenizer = TOKENIZERS[name]()
    vocabulary, eos = vocabulary_of(tokenizer), eos_ids(tokenizer)
    ids = vocabulary.encode("cats").ids
    for end in eos:
        processor = compile_grammar(("regex", "cats"), vocabulary, eos, "the main model")
        size = len(vocabulary.all_pieces())
        assert allowed_after(processor, ids, size) == set(eos)
        assert allowed_after(processor, [*ids, end], size) == set(range(size))


def test_a_text_that_has_left_the_grammar_goes_on_unguided():
    """As of an assistant, whose tokenizer may not have what is committed."""
    vocabulary = vocabulary_of(TOKENIZERS["characters"]())
    processor = compile_grammar(("regex", "cats"), vocabulary, [2], "an assistant")
    size = len(vocabulary.all_pieces())
    ids = vocabulary.encode("ct").ids
    assert allowed_after(processor, ids, size) == set(range(size))


def test_scores_of_more_ids_than_the_tokenizer_has():
    """An embedding that is padded: what has no text cannot come."""
    vocabulary = Vocabulary(TOKENIZERS["byte_level"](), 400)
    processor = compile_grammar(("regex", "[a-z]+"), vocabulary, [0], "the main model")
    allowed = allowed_after(processor, [], 400)
    assert allowed and max(allowed) < len(TOKENIZERS["byte_level"]())


@pytest.mark.parametrize("schema", [{"maxLength": 3}, {"minLength": 1}, {"pattern": r"^\s.\W$"}, {}])
@pytest.mark.parametrize("name", ["byte_level", "trailing_space", "sentencepiece"])
def test_no_control_character_comes_into_json(name, schema):
    """Python's reader, as others, refuses them in strings."""
    vocabulary = vocabulary_of(TOKENIZERS[name]())
    structured = read_structured({"json_schema": {"type": "string", **schema}})
    processor = compile_grammar(structured, vocabulary, eos_ids(TOKENIZERS[name]()), "the main model")
    pieces = vocabulary.all_pieces()
    (quote,) = (token for token, piece in enumerate(pieces) if piece == b'"')
    ids = [quote]
    for _ in range(3):
        allowed = allowed_after(processor, ids, len(pieces)) - set(eos_ids(TOKENIZERS[name]()))
        assert allowed and not [token for token in allowed if any(byte < 32 for byte in pieces[token])]
        inside = [token for token in allowed if len(pieces[token]) == 1 and pieces[token] not in (b'"', b"\\")]
        if not inside:
            break
        ids.append(min(inside))
        processor = compile_grammar(structured, vocabulary, eos_ids(TOKENIZERS[name]()), "the main model")
    assert len(ids) > 1


def test_a_grammar_is_compiled_once_for_a_vocabulary_and_its_ends():
    vocabulary = vocabulary_of(TOKENIZERS["byte_level"]())
    one, two = (compile_grammar(("regex", "cats"), vocabulary, [0], "it") for _ in range(2))
    assert one is not two
    for eos in ([0], [0, 1]):
        processor = compile_grammar(("regex", "cats"), vocabulary, eos, "it")
        assert allowed_after(processor, vocabulary.encode("cats").ids, len(vocabulary.all_pieces())) == set(eos)


# 3. Members that cannot


def test_a_member_without_an_end():
    with pytest.raises(ValueError, match="`structured` must be used with members that can end a text, but Bob has no"):
        compile_grammar(("regex", "a"), vocabulary_of(TOKENIZERS["byte_level"]()), [], "Bob")


def test_a_member_that_cannot_begin():
    vocabulary = vocabulary_of(TOKENIZERS["wordpiece"]())  # which has no capitals
    with pytest.raises(ValueError, match="members that can write the text, but Bob has no token that may come first"):
        compile_grammar(("regex", "(Yes|No)"), vocabulary, [1], "Bob")
    compile_grammar(("regex", "(Yes|no)"), vocabulary, [1], "Bob")


@pytest.mark.parametrize(
    "pattern",
    [r"\A[0-9]{2}\Z", r"ab\z", r"$5", r"a^b", r"[\h]x", r"(?=a)a", r"[\p{L} ]+", r"[^\P{L}]", r"[\B]", r"a\0", r"\x00"],
)
def test_a_regex_of_another_dialect_is_refused(pattern):
    """The library takes `\\A` for a letter, and leaves an anchor inside out."""
    with pytest.raises(ValueError, match=r"`structured\['regex'\]` must be one that compiles, but does not: it "):
        parse_grammar(("regex", pattern))


@pytest.mark.parametrize(
    "pattern",
    [r"^[0-9]{2}$", r"\d+\.\d", r"[\w\-]+\\A", r"\x41|\u0042", r"[\x00-\x7F]{1,20}", r"[^\x00-\x1f]", r"[\\0-9]"],
)
def test_ordinary_regexes_compile(pattern):
    parse_grammar(("regex", pattern))


@pytest.mark.parametrize(
    ("pattern", "text", "is_allowed"),
    [
        ("a.b", "axb", True),
        ("a.b", "a\nb", False),
        ("a.b", "a\rb", True),
        (r"a[.]b", "axb", False),
        (r"a[.]b", "a.b", True),
        (r"a\.b", "a.b", True),
        (r"a\\.b", "a\\\nb", False),
        (r"a[\s\S]b", "a\nb", True),
        (".{1,3}", "é中a", True),
        ("(?:.|\n)*", "a\n\nb", True),
    ],
)
def test_a_dot_is_any_character_but_a_line_break(pattern, text, is_allowed):
    """As Python has it."""
    assert (re.fullmatch(pattern, text) is not None) == is_allowed
    matcher = matcher_of(("regex", pattern))
    assert (matcher.accept_string(text) and matcher.accept_token(256)) == is_allowed


@pytest.mark.parametrize("schema", [{"maxLength": 3}, {"minLength": 1}, {}])
def test_no_control_character_comes_into_the_json_of_a_tag(schema):
    """Outside of it a text may have line breaks."""
    content = {"type": "json_schema", "json_schema": {"type": "string", **schema}}
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>\n", "content": content, "end": "\n</a>"}}
    for text, is_allowed in (("xé", True), ("x\ty", False), ("\x01", False), ("\x0b", False)):
        matcher = matcher_of(read_structured({"structural_tag": tag}))
        assert matcher.accept_string(f'<a>\n"{text}"\n</a>') == is_allowed, text


def in_tag(content, text):
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}}
    return matcher_of(read_structured({"structural_tag": tag})).accept_string(f"<a>{text}</a>")


def test_what_stands_in_a_tag_follows_the_rules_of_texts_without_tags():
    regex = {"type": "regex", "pattern": "a.b"}
    assert in_tag(regex, "axb") and not in_tag(regex, "a\nb")
    with pytest.raises(ValueError, match="it has an anchor inside"):
        in_tag({"type": "regex", "pattern": "a$b"}, "")
    for others in ({}, {"style": "json"}):
        array = {"type": "json_schema", "json_schema": {"type": "array", "maxItems": 3}, **others}
        assert in_tag(array, '["a", 1]')
    assert not in_tag(
        {"type": "json_schema", "json_schema": {"type": "string", "maxLength": 3}, "style": "json"}, '"\t"'
    )
