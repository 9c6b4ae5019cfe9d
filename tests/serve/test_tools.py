"""Tools: what members are told of them, calls in what they write, whole and streamed, and calls that must be made."""

from __future__ import annotations

import copy
import json

import openai
import pytest
from servers_of_tests import MODEL, alone, running, service_of
from support.chats import CLOCK, LIMA, NOW, QUESTION, WEATHER, members

from hf_adafuse import AdaFuseEnsemble
from hf_adafuse.ensemble import as_chats
from hf_adafuse.members.tools import Offer, ToolCall, with_tools
from hf_adafuse.serve.answers import GrowingText
from hf_adafuse.serve.calls import conversation
from hf_adafuse.serve.ensembles import serve_members
from hf_adafuse.serve.requests import ChatRequest

OFFER = Offer([WEATHER, CLOCK])
CALL = ToolCall("weather", '{"city": "Lima"}')
BODY = {"model": MODEL, "messages": QUESTION, "max_tokens": 60, "tools": [WEATHER, CLOCK]}


# Tools are told of in several hundred tokens of the members of tests.
PAIR = members(max_positions=2048)


@pytest.fixture(scope="module")
def client():
    with running(service_of(pair=PAIR)) as (_, client):
        yield client


@pytest.mark.parametrize(
    ("text", "words", "calls"),
    [
        ("It is warm.", "It is warm.", []),
        (LIMA, "", [CALL]),
        ("\n" + LIMA, "", [CALL]),
        ("Let me see.\n" + LIMA + "\n" + NOW, "Let me see.\n", [CALL, ToolCall("clock", "{}")]),
        (LIMA.removesuffix("</tool_call>"), "", [CALL]),
        (LIMA + "\nIt is", "", [CALL]),
        ('{"name": "weather", "parameters": {"city": "Lima"}}', "", [CALL]),
        ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
        (LIMA.replace("weather", "other"), LIMA.replace("weather", "other"), []),
        ("a " + LIMA[:30], "a " + LIMA[:30], []),
        (LIMA + '<tool_call>{"name"', LIMA + '<tool_call>{"name"', []),
        ('<tool_call>{"name": "clock", "arguments": 3}', '<tool_call>{"name": "clock", "arguments": 3}', []),
        ("[1]", "[1]", []),
        *((bad, bad, []) for bad in (LIMA.replace('"Lima"', value) for value in ("NaN", "-Infinity", "1e999"))),
        ("", "", []),
    ],
)
def test_calls_in_a_text(text, words, calls):
    assert OFFER.read(text) == (words, calls)
    # Of a text that comes bit by bit, what is sent early is what is sent in the end.
    for size in (1, 3, 7):
        growing, sent = GrowingText([], [], OFFER), ""
        for end in range(size, len(text) + size, size):
            growing._text = ""
            sent += growing.add([Piece(text[:end])])
        growing._text = ""
        assert sent + growing.end([Piece(text)]) == words and growing.calls == calls


class Piece:
    """A round, as far as its text goes."""

    def __init__(self, text):
        self.text = text


def test_one_call_at_most():
    assert Offer([WEATHER, CLOCK], most_calls=1).read(LIMA + NOW) == ("", [CALL])


def test_what_members_are_told():
    made = with_tools([{"role": "system", "content": "Be kind."}, *QUESTION], OFFER)
    assert made[0]["content"].startswith("Be kind.\n\n# Tools\n") and json.dumps(WEATHER) in made[0]["content"]
    assert made[1:] == QUESTION
    assert [one["role"] for one in with_tools(QUESTION, OFFER)] == ["system", "user"]
    (only,) = with_tools(QUESTION, OFFER, takes_system=False)
    assert only["content"].startswith("# Tools") and only["content"].endswith(QUESTION[0]["content"])


def test_earlier_calls_and_their_results_are_texts():
    calls = [call.body for call in (CALL, ToolCall("clock", "{}"))]
    chat = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "warm", "tool_call_id": calls[0]["id"]},
        {"role": "tool", "content": "noon", "tool_call_id": calls[1]["id"]},
    ]
    _, answer, result = with_tools(chat, None)
    assert answer == {"role": "assistant", "content": LIMA + "\n" + NOW}
    results = "<tool_response>\nwarm\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    assert result == {"role": "user", "content": results}
    assert "tool_calls" in chat[1] and chat[3]["role"] == "tool"  # the request's messages stay as they are


TWO_CALLS = [call.body | {"id": name} for call, name in ((CALL, "a"), (ToolCall("clock", "{}"), "b"))]
ASKED = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": TWO_CALLS}]


def result_of(name, text):
    return {"role": "tool", "content": text, **({} if name is None else {"tool_call_id": name})}


def test_results_in_another_order_are_read_in_the_order_of_the_calls():
    expected = with_tools([*ASKED, result_of("a", "warm"), result_of("b", "noon")], None)
    chat = [*ASKED, result_of("b", "noon"), result_of("a", "warm")]
    assert with_tools(chat, None) == conversation(ChatRequest(model=MODEL, messages=chat)) == expected
    assert with_tools([*ASKED, result_of(None, "warm"), result_of(None, "noon")], None) == expected
    # Each turn has calls of its own.
    (*_, last) = with_tools([*chat, {**ASKED[1], "tool_calls": TWO_CALLS[1:]}, result_of("b", "one")], None)
    assert last["content"] == "<tool_response>\none\n</tool_response>"


@pytest.mark.parametrize(
    "results",
    [
        [result_of("c", "warm")],
        [result_of("a", "warm"), result_of(None, "noon")],
        [QUESTION[0], result_of("a", "warm")],
        [result_of("a", "warm"), {**ASKED[1], "tool_calls": TWO_CALLS[1:]}, result_of("a", "warm")],
    ],
    ids=["another", "none beside one", "behind a question", "of an earlier turn"],
)
def test_a_result_of_no_call_is_refused(client, results):
    with pytest.raises(ValueError, match="`tool_call_id` of a result must be "):
        AdaFuseEnsemble(PAIR).texts([*ASKED, *results], chat=True, max_new_tokens=2)
    with pytest.raises(openai.BadRequestError, match="`tool_call_id` of a result must be "):
        client.chat.completions.create(model=MODEL, messages=[*ASKED, *results])


PARTS = [{"type": "text", "text": "wa"}, {"type": "text", "text": "rm"}]
RESULT = "<tool_response>\nwarm\n</tool_response>"


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "assistant", "tool_calls": [CALL.body]}, LIMA),  # OpenAI allows to leave the content out
        ({"role": "assistant", "content": PARTS, "tool_calls": [CALL.body]}, f"warm\n{LIMA}"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "clock"}}]}, NOW),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "clock", "arguments": ""}}]}, NOW),
        ({"role": "tool", "content": PARTS}, RESULT),
        ({"role": "tool"}, "<tool_response>\n\n</tool_response>"),
    ],
    # The calls have random names: as a part of the tests' ids they would differ from worker to worker.
    ids=["no content", "parts and a call", "no arguments", "empty arguments", "a result in parts", "an empty result"],
)
def test_contents_may_be_left_out_or_in_parts(message, content):
    assert with_tools([message], None)[0]["content"] == content


def test_members_are_told_of_tools_beside_a_system_message_in_parts_or_without_content():
    for message, words in (({"content": PARTS}, "warm\n\n# Tools\n"), ({}, "\n\n# Tools\n")):
        (told, *_) = with_tools([{"role": "system", **message}, *QUESTION], OFFER)
        assert told["content"].startswith(words)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "tool", "content": [{"type": "image_url"}]}, "`content`"),
        ({"role": "tool", "content": 3}, "`content`"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "`tool_calls`"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}, "`tool_calls`"),
        ({"role": "assistant", "tool_calls": ["clock"]}, "`tool_calls`"),
    ],
    ids=str,
)
def test_messages_that_cannot_be_read_are_refused_by_name(message, field):
    with pytest.raises(ValueError, match=field):
        with_tools([message], None)


@pytest.mark.parametrize("choice", [{"function": {}}, {"function": "clock"}, {"function": None}], ids=str)
def test_a_choice_without_a_name_is_refused(choice):
    with pytest.raises(ValueError, match="`tool_choice` must be"):
        Offer.of([WEATHER], choice)


@pytest.mark.parametrize("chat", [[{"content": "a"}], [[{"role": "user", "content": "a"}, "b"]]], ids=str)
def test_a_message_without_a_role_is_refused(chat):
    with pytest.raises(ValueError, match="`prompts` must be of messages with a `role`"):
        as_chats(chat)


def test_it_reads_as_the_template_of_qwen_has_it():
    """The form is that of Qwen2.5, whose template has these lines."""
    call, result = LIMA, "<tool_response>\nwarm\n</tool_response>"
    assert with_tools([{"role": "assistant", "content": None, "tool_calls": [CALL.body]}], None)[0]["content"] == call
    assert with_tools([{"role": "tool", "content": "warm"}], None)[0]["content"] == result


def test_answers_in_words_follow_from_what_members_are_told(client):
    answer = client.chat.completions.create(**BODY).choices[0]
    expected = alone(with_tools(QUESTION, OFFER), {"max_new_tokens": 60}, pair=PAIR)
    assert answer.message.content == expected.text and answer.message.tool_calls is None
    without = client.chat.completions.create(**BODY, tool_choice="none").choices[0]
    assert without.message.content == alone(QUESTION, {"max_new_tokens": 60}, pair=PAIR).text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_a_call_that_must_be_made(client, choice):
    answer = client.chat.completions.create(**BODY, tool_choice=choice).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and answer.message.content is None and call.id.startswith("call_")
    assert call.function.name in ("weather", "clock")
    if call.function.name == "weather":
        assert json.loads(call.function.arguments)["city"] in ("Lima", "Oslo")
    adafuse = answer.message.adafuse
    assert adafuse["words"] == [] and 0 < adafuse["confidence"] < 1
    assert json.loads("".join(word["text"] for word in adafuse["call_words"]))["name"] == call.function.name


def test_a_streamed_call_behind_words(client):
    regex = 'so <tool_call>\\n\\{"name": "clock", "arguments": \\{\\}\\}\\n</tool_call>'
    chunks = list(client.chat.completions.create(**BODY, stream=True, extra_body={"adafuse": {"regex": regex}}))
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == "so "
    calls = [call for one in chunks for call in one.choices[0].delta.tool_calls or []]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [(0, "clock", "{}")]
    last = chunks[-1].choices[0]
    assert last.finish_reason == "tool_calls"
    assert "".join(word["text"] for word in last.adafuse["words"]) == "so "


def test_definitions_of_a_schema(client):
    """Of pydantic's nested models, say: two tools may have definitions of one name."""
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}},
        "required": ["a"],
        "$defs": {"A": {"enum": [1, 2]}},
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("f", "g")]
    schema = Offer(tools, ["f", "g"]).schema
    assert set(schema["$defs"]) == {"0.A", "1.A"}
    assert schema["anyOf"][1]["properties"]["arguments"]["properties"]["a"] == {"$ref": "#/$defs/1.A"}
    answer = client.chat.completions.create(**{**BODY, "tools": tools}, tool_choice="required").choices[0]
    assert json.loads(answer.message.tool_calls[0].function.arguments)["a"] in (1, 2)


def test_a_call_that_must_be_made_by_a_strict_tool(client):
    """It is refused where the grammar does not enforce the tool's schema; a call that may be made is not guided."""
    parameters = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    function = {"name": "f", "parameters": parameters, "strict": True}
    body = {**BODY, "tools": [{"type": "function", "function": function}]}
    answer = client.chat.completions.create(**body, tool_choice="required").choices[0]
    assert json.loads(answer.message.tool_calls[0].function.arguments) == {"a": 1}
    function["parameters"] = {**parameters, "not": {}}
    with pytest.raises(openai.BadRequestError, match=r"has `not` at /properties/arguments\. "):
        client.chat.completions.create(**body, tool_choice="required")
    request = ChatRequest(**body)
    assert request.structured is None
    assert "strict" not in request.offer.prompt
    function["strict"] = False
    answer = client.chat.completions.create(**body, tool_choice="required").choices[0]
    assert json.loads(answer.message.tool_calls[0].function.arguments) == {"a": 1}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "none"}}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [], "tool_choice": "required"}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"functions": []}, "functions"),
    ],
    ids=str,
)
def test_tools_that_cannot_be_honoured(client, change, match):
    with pytest.raises(openai.BadRequestError, match=match):
        client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body={"tools": [WEATHER], **change})


def test_templates_without_a_system_message():
    pair = members()
    assert serve_members("a", pair)[0].takes_system
    refusing = "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    tokenizer = copy.deepcopy(pair[1][1])
    tokenizer.chat_template = refusing
    assert not serve_members("a", [pair[0], (pair[1][0], tokenizer)])[0].takes_system


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_equal_choices_have_ids_of_their_own(client, stream):
    forced = {**BODY, "n": 2, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    made = client.chat.completions.create(**forced, stream=stream)
    ids = {}
    for part in made if stream else [made]:
        for one in part.choices:
            for call in (one.delta if stream else one.message).tool_calls or []:
                ids[one.index] = call.id
    assert len(ids) == len(set(ids.values())) == 2 and all(one.startswith("call_") for one in ids.values())
