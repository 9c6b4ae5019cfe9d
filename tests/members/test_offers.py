"""Tools offered to an ensemble: what may be offered, the grammar of calls, and calls that come back."""

from __future__ import annotations

import collections
import functools
import json
import types

import numpy
import pytest
import xgrammar
from support.chats import CLOCK, LIMA, NOW, QUESTION, WEATHER, members

from hf_adafuse import AdaFuseEnsemble
from hf_adafuse.members.structured import parse_grammar, read_structured
from hf_adafuse.members.tools import Offer, with_tools


def shared_definitions(name: str) -> dict:
    parameters = {
        "type": "object",
        "properties": {"place": {"$ref": "#/$defs/place"}},
        "required": ["place"],
        "$defs": {"place": {"enum": ["a", "b"]}},
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def follows(text: str, offer: Offer) -> tuple[bool, bool]:
    """Whether a text follows the grammar of an offer so far, and whether it may end there."""
    info = xgrammar.TokenizerInfo(
        [bytes([byte]) for byte in range(256)] + [b""], xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[256]
    )
    grammar = parse_grammar(read_structured(offer.structured))
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_grammar(grammar))
    if not all(matcher.accept_token(byte) for byte in text.encode()):
        return False, False
    return True, matcher.accept_token(256)


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [
        ("It is warm.", True),
        (LIMA, True),
        (f"Let me see.\n{LIMA}\n{NOW} so", True),
        ("a < b and <tool_", True),
        (LIMA[:40], False),
        ('<tool_call>\n{"name": "clock", "arguments": {', False),
    ],
)
def test_words_and_whole_calls_follow_the_grammar(text, is_whole):
    assert follows(text, Offer([WEATHER, CLOCK])) == (True, is_whole)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>It",
        LIMA.replace("Lima", "Cairo"),
        LIMA.replace("weather", "other"),
        NOW.replace("{}", '{"at": 3}'),
        LIMA.replace(": ", ":  "),  # one way of writing JSON, so that no member writes spaces for ever
    ],
)
def test_other_calls_do_not(text):
    assert follows(text, Offer([WEATHER, CLOCK])) == (False, False)


def test_definitions_of_tools_do_not_meet():
    offer = Offer([shared_definitions("one"), shared_definitions("two")])
    for name in ("one", "two"):
        call = f'<tool_call>\n{{"name": "{name}", "arguments": {{"place": "b"}}}}\n</tool_call>'
        assert follows(call, offer) == (True, True)
        assert follows(call.replace('"b"', '"c"'), offer) == (False, False)


NODES = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "below": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["value", "below"],
    "additionalProperties": False,
}
PARTS = {**NODES, "properties": {**NODES["properties"], "below": {"$ref": "#/properties/value"}}}


@pytest.mark.parametrize("forced", [[], ["tree"]])
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (NODES, {"value": 1, "below": [{"value": 2, "below": []}]}, {"value": 1, "below": [{"name": "tree"}]}),
        (PARTS, {"value": 1, "below": 2}, {"value": 1, "below": []}),
    ],
)
def test_a_schema_that_refers_to_itself(schema, right, wrong, forced):
    """`#` is the schema of the arguments, and not that of the call around them."""
    offer = Offer([{"type": "function", "function": {"name": "tree", "parameters": schema}}, CLOCK], forced)
    for arguments, is_right in ((right, True), (wrong, False)):
        call = json.dumps({"name": "tree", "arguments": arguments})
        text = call if forced else f"<tool_call>\n{call}\n</tool_call>"
        assert follows(text, offer) == (is_right, is_right)


def test_names_with_dots_do_not_meet():
    inner = {"type": "object", "properties": {"x": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "integer"}}}
    functions = [{"name": "a", "parameters": inner}, {"name": "a.b", "parameters": NODES}]
    offer = Offer([{"type": "function", "function": one} for one in functions])
    for name, arguments in [("a", {"x": 1}), ("a.b", {"value": 1, "below": []})]:
        call = json.dumps({"name": name, "arguments": arguments})
        assert follows(f"<tool_call>\n{call}\n</tool_call>", offer) == (True, True)


@pytest.mark.parametrize("written", ["see </tool_call> here", "see <tool_call> here", '<tool_call>{"name": "x"}'])
def test_marks_in_arguments_end_no_call(written):
    offer = Offer([WEATHER, CLOCK])
    call = json.dumps({"name": "weather", "arguments": {"city": written}})
    marked = f"<tool_call>\n{call}\n</tool_call>"
    read = lambda text: (offer.read(text)[0], [json.loads(one.arguments) for one in offer.read(text)[1]])  # noqa: E731
    assert read(call) == ("", [{"city": written}])
    assert read(marked) == read(f" {marked}\nso") == ("", [{"city": written}])
    assert read(f"Let me see.\n{marked}\n{NOW} so") == ("Let me see.\n", [{"city": written}, {}])
    assert read(marked.replace("\n</tool", " so\n</tool")) == (marked.replace("\n</tool", " so\n</tool"), [])


def function(**parts):
    return {"type": "function", "function": {"name": "clock", **parts}}


def now(zone: str) -> str:
    """
    The time.

    Args:
        zone: Of the clock.
    """
    return zone


def test_what_is_offered():
    assert Offer.of([WEATHER, CLOCK]).forced == []
    assert Offer.of([WEATHER, CLOCK], "required").forced == ["weather", "clock"]
    assert Offer.of([WEATHER, CLOCK], "clock").forced == ["clock"]
    assert Offer.of([WEATHER], {"type": "function", "function": {"name": "weather"}}).forced == ["weather"]
    assert Offer.of([WEATHER], "none") is None
    named = {"type": "function", "function": {"name": "none"}}  # a tool may be called like a word for the choice
    assert Offer.of([named, CLOCK], named).forced == ["none"]
    (made,) = Offer.of([now]).tools
    assert made["function"]["name"] == "now" and made["function"]["parameters"]["required"] == ["zone"]


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([], None, "`tools` must be a list of tools, but is \\[\\]"),
        (WEATHER, None, "`tools` must be a list of tools"),
        ([CLOCK, CLOCK], None, "`tools` must have a name each, but are named"),
        (["clock"], None, "`tools` must be functions or like .* but hold 'clock'"),
        ([CLOCK], "weather", "`tool_choice` must be .* or one of \\['clock'\\], but is 'weather'"),
        ([CLOCK], numpy.array(["clock", "none"]), "`tool_choice` must be .* but is array"),
        ([lambda zone: zone], None, "`tools` must be functions with type hints and a docstring .* it has no docstring"),
        ([functools.partial(now, "UTC")], None, "`tools` must be functions with type hints and a docstring"),
        ([function(parameters=5)], None, "`parameters` of a tool must be a dict with a JSON schema, but is 5"),
        ([function(description=b"a")], None, "`tools` must be what JSON can hold, but hold .*bytes"),
    ],
)
def test_what_cannot_be_offered(tools, choice, message):
    with pytest.raises(ValueError, match=message):
        Offer.of(tools, choice)


# Tools are told of in several hundred tokens of the members of tests.
ENSEMBLE = AdaFuseEnsemble(members(max_positions=2048), adafuse_config={"max_word_tokens": 4})


def test_a_call_that_must_be_made_comes_back():
    (rounds,) = ENSEMBLE.rounds([QUESTION], chat=True, tools=[WEATHER], tool_choice="required", max_new_tokens=60)
    (call,) = rounds.tool_calls
    assert call.name == "weather" and json.loads(call.arguments)["city"] in ("Lima", "Oslo")
    assert json.loads(rounds.text) == {"name": "weather", "arguments": json.loads(call.arguments)}
    heard = []
    how = dict(
        chat=True, tools=[WEATHER], tool_choice="weather", max_new_tokens=60, on_answer=lambda *one: heard.append(one)
    )
    ENSEMBLE.rounds([QUESTION], **how)
    assert [(row, rounds.tool_calls[0].arguments) for row, rounds in heard] == [(0, call.arguments)]


def test_results_of_calls_are_told_to_all_members():
    (rounds,) = ENSEMBLE.rounds([QUESTION], chat=True, tools=[CLOCK], tool_choice="clock", max_new_tokens=60)
    (call,) = rounds.tool_calls
    told = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call.body]},
        {"role": "tool", "content": "noon", "tool_call_id": call.id},
    ]
    plain = [
        *QUESTION,
        {"role": "assistant", "content": NOW},
        {"role": "user", "content": "<tool_response>\nnoon\n</tool_response>"},
    ]
    how = dict(chat=True, max_new_tokens=8)
    assert ENSEMBLE.texts([told], **how) == ENSEMBLE.texts([plain], **how)


def test_words_are_no_call():
    (rounds,) = ENSEMBLE.rounds([QUESTION], chat=True, tools=[CLOCK], max_new_tokens=8)
    assert rounds.tool_calls == [] and rounds.text
    untold, without = (
        ENSEMBLE.texts([QUESTION], chat=True, max_new_tokens=8, **more)
        for more in ({}, dict(tools=[CLOCK], tool_choice="none"))
    )
    assert untold == without != [rounds.text]


def test_tools_are_for_chats_and_alone():
    with pytest.raises(ValueError, match="`tools` must be left out without `chat`"):
        ENSEMBLE.texts("Hi", tools=[CLOCK])
    with pytest.raises(ValueError, match="`structured` must be left out with `tools`"):
        ENSEMBLE.texts([QUESTION], chat=True, tools=[CLOCK], structured={"regex": "a"})
    for choice in ("required", "clock"):
        with pytest.raises(ValueError, match=f"`tool_choice` must be .* without `tools`, but is {choice!r}"):
            ENSEMBLE.texts([QUESTION], chat=True, tool_choice=choice)


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_without_tools_a_choice_of_none_of_them_says_nothing(choice):
    plain = ENSEMBLE.texts([QUESTION], chat=True, max_new_tokens=4)
    assert ENSEMBLE.texts([QUESTION], chat=True, tool_choice=choice, max_new_tokens=4) == plain


@pytest.mark.parametrize("ids", [(None, None), ("a", "b")])
def test_results_of_calls_without_ids_stand_in_their_order(ids):
    """Histories of transformers give calls no ids."""
    function = {"name": "weather", "arguments": {}}
    calls = [{"type": "function", "function": function, **({} if one is None else {"id": one})} for one in ids]
    results = [{"role": "tool", "content": text, "tool_call_id": one} for one, text in (("b", "2"), ("a", "1"))]
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    said = with_tools(chat, None)[-1]["content"]
    assert (said.index("1") < said.index("2")) == (ids == ("a", "b"))
    with pytest.raises(ValueError, match="`tool_call_id` of a result must be behind a message with calls, but is 'b'"):
        with_tools([chat[0], *results], None)


@pytest.mark.parametrize("kind", [dict, types.MappingProxyType, collections.UserDict])
def test_tools_may_be_mappings_of_any_kind(kind):
    assert Offer.of([kind(WEATHER)]).prompt == Offer.of([WEATHER]).prompt
