"""`hf-adafuse serve` as OpenAI's own client sees it: texts are those of `generate()`, errors have the API's form."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from servers_of_tests import MODEL, Passes, alone, client_of, running, service_of
from support.chats import CONFIG, LONGER, QUESTION, members
from support.waiting import until

from hf_adafuse.confidence.answer_text import cut_at
from hf_adafuse.outputs import AdaFuseRound
from hf_adafuse.serve.answers import GrowingText, tokens_within
from hf_adafuse.serve.calls import TokenLogProb
from hf_adafuse.serve.engine import Engine
from hf_adafuse.serve.ensembles import serve_members, without_paths
from hf_adafuse.serve.service import Service, seed_of
from hf_adafuse.trees.backend import ForwardError
from hf_adafuse.trees.kv_cache_backend import KVCacheBackend

CHAT = {"model": MODEL, "messages": QUESTION, "max_tokens": 8}


@pytest.fixture(scope="module")
def server():
    with running() as (service, client):
        yield service, client


@pytest.fixture(scope="module")
def client(server):
    return server[1]


@pytest.fixture
def post(client):
    """The answer to a body that no client would send."""
    url = str(client.base_url)

    def send(content, path="chat/completions", **options):
        content = content if isinstance(content, (str, bytes)) else json.dumps(content)
        headers = {"Content-Type": "application/json"}
        return httpx.post(url + path, content=content, headers=headers, **{"timeout": 60, **options})

    return send


def words_of(adafuse):
    assert all(set(word) == {"text", "proposers", "confidence"} for word in adafuse["words"])
    assert all(set(word["proposers"]) <= set(adafuse["members"]) for word in adafuse["words"])
    return "".join(word["text"] for word in adafuse["words"])


def test_models(client):
    names = [one.id for one in client.models.list()]
    assert names[0] == MODEL and len(names) == 3
    assert client.models.retrieve(MODEL).adafuse["members"] == names[1:]
    with pytest.raises(openai.NotFoundError, match="must be one of"):
        client.models.retrieve("gpt-4")


@pytest.mark.parametrize("chat", [QUESTION, LONGER], ids=["question", "longer"])
def test_a_chat_gets_the_text_of_generate(client, chat):
    expected = alone(chat, {"max_new_tokens": 12})
    answer = client.chat.completions.create(model=MODEL, messages=chat, max_tokens=12)
    (choice,) = answer.choices
    assert choice.message.content == expected.text and choice.message.role == "assistant"
    assert choice.finish_reason == expected.finish_reason
    adafuse = choice.message.adafuse
    assert words_of(adafuse) == expected.text
    assert adafuse["confidence"] == pytest.approx(expected.confidence) and 0 < expected.confidence < 1
    sure = [value for one in expected for value in one.confidences[: len(one.words)]]
    assert [word["confidence"] for word in adafuse["words"]] == pytest.approx(sure)
    assert [word["text"] for word in adafuse["words"]] == [word for one in expected for word in one.words]
    winners = [one.candidates[one.winner].proposers for one in expected for _ in one.words]
    assert [word["proposers"] for word in adafuse["words"]] == [[adafuse["members"][k] for k in one] for one in winners]
    assert answer.usage.completion_tokens == sum(one.num_tokens for one in expected)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert "rounds" not in adafuse and sum(adafuse["shares"].values()) >= 1


def test_a_message_of_parts_and_the_developer_role(client):
    system = [{"role": "system", "content": "was"}, *QUESTION]
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "wa"}, {"type": "text", "text": "s"}]},
        *QUESTION,
    ]
    texts = [
        client.chat.completions.create(**{**CHAT, "messages": one}).choices[0].message.content
        for one in (system, parts)
    ]
    assert texts[0] == texts[1] == alone(system, {"max_new_tokens": 8}).text


def test_completions(client):
    prompts = ["Once upon a time", "She"]
    expected = [alone(prompt, {}) for prompt in prompts]
    answer = client.completions.create(model=MODEL, prompt=prompts, echo=True)
    assert [one.text for one in answer.choices] == [p + one.text for p, one in zip(prompts, expected, strict=True)]
    assert [words_of(one.adafuse) for one in answer.choices] == [one.text for one in expected]
    ids = members()[0][1](prompts[0]).input_ids
    assert client.completions.create(model=MODEL, prompt=ids).choices[0].text == expected[0].text


def test_a_stream_is_the_whole_answer_in_parts(client):
    expected = alone(QUESTION, {"max_new_tokens": 20})
    options = {"include_usage": True}
    body = {**CHAT, "max_tokens": 20, "stream": True, "stream_options": options}
    *chunks, usage = client.chat.completions.create(**body, extra_body={"adafuse": {"stream_words": True}})
    assert chunks[0].choices[0].delta.role == "assistant"
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(parts) == expected.text and sum(map(bool, parts)) > 1
    last = chunks[-1].choices[0]
    assert last.finish_reason == expected.finish_reason and words_of(last.delta.adafuse) == expected.text
    assert last.adafuse == last.delta.adafuse
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    words = [word for chunk in chunks[1:-1] for word in chunk.choices[0].adafuse["words"]]
    assert words == last.delta.adafuse["words"]
    assert usage.choices == [] and usage.usage.completion_tokens == sum(one.num_tokens for one in expected)
    # A client that adds up the deltas has the message of a whole answer.
    words = {"adafuse": {"stream_words": True}}
    body = CHAT | {"max_tokens": 20, "stop": expected.text[4:7], "extra_body": words}
    with client.chat.completions.stream(**body) as stream:
        message = stream.get_final_completion().choices[0].message
    assert words_of(message.adafuse) == message.content
    text = client.completions.create(model=MODEL, prompt="She", max_tokens=20, stream=True, echo=True)
    assert "".join(chunk.choices[0].text for chunk in text) == "She" + alone("She", {"max_new_tokens": 20}).text


def test_a_stop_text_that_does_not_come_cuts_no_streamed_word(client):
    """What may be its beginning is held back, also in the middle of a word."""
    expected = alone(QUESTION, {"max_new_tokens": 20})
    whole = [word for one in expected for word in one.words]
    inside = [word[at : at + 1] for word in whole for at in range(1, len(word) - 1)]
    assert inside
    for start in dict.fromkeys(inside):
        body = {**CHAT, "max_tokens": 20, "stop": f"{start}\x07", "stream": True}
        *chunks, last = client.chat.completions.create(**body, extra_body={"adafuse": {"stream_words": True}})
        words = [word for chunk in chunks[1:] for word in chunk.choices[0].adafuse["words"]]
        assert words == last.choices[0].adafuse["words"] and [word["text"] for word in words] == whole


def test_words_of_a_growing_text_are_sent_whole():
    one, other = (
        AdaFuseRound("".join(words), words, False, None, None, [], [], 1, True) for words in (["foo", " bar"], [" qux"])
    )
    for stop, expected in {
        "r baz": [["foo"], [" bar", " qux"], []],  # held back, and then not met
        "ar q": [["foo"], [], [" b"]],  # held back, and then met
        "ar": [["foo"], [], [" b"]],
        "\n": [["foo", " bar"], [" qux"], []],
    }.items():
        growing, found = GrowingText([stop], ["a", "b"]), []
        for take, rounds in ((growing.add, [one]), (growing.add, [other]), (growing.end, [one, other])):
            take(rounds)
            found.append([word["text"] for word in growing.new_words()])
        assert found == expected, stop


def test_the_asynchronous_client(client):
    async def ask():
        async with client_of(str(client.base_url).removesuffix("/v1/"), kind=openai.AsyncOpenAI) as other:
            whole, stream = await asyncio.gather(
                other.chat.completions.create(**CHAT), other.chat.completions.create(**CHAT, stream=True)
            )
            return whole.choices[0].message.content, "".join([c.choices[0].delta.content or "" async for c in stream])

    assert asyncio.run(ask()) == (alone(QUESTION, {"max_new_tokens": 8}).text,) * 2


@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_an_answer_stops_at_is_no_part_of_it(client, is_streamed):
    text = alone(QUESTION, {"max_new_tokens": 20}).text
    stop = text[4:7]
    expected = alone(QUESTION, {"max_new_tokens": 20, "stop_strings": [stop]})
    body = {**CHAT, "max_tokens": 20, "stop": stop, "stream": is_streamed}
    answer = client.chat.completions.create(**body)
    if is_streamed:
        chunks = list(answer)
        content, last = "".join(one.choices[0].delta.content or "" for one in chunks), chunks[-1].choices[0]
        adafuse = last.adafuse
    else:
        last = answer.choices[0]
        content, adafuse = last.message.content, last.message.adafuse
    assert content == cut_at(expected.text, [stop]) == words_of(adafuse) != expected.text
    assert last.finish_reason == "stop"


def test_choices_and_seeds(client):
    drawn = {"temperature": 1.5, "seed": 7, "max_tokens": 10}
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, n=3, **drawn)
    call = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 10}
    seeds = [seed_of(7, k) for k in range(3)]
    assert seeds[0] == 7 and not set(seeds) & {8, 9, *(seed_of(other, k) for other in (8, 9) for k in range(3))}
    expected = [alone(QUESTION, call | {"seed": seed}).text for seed in seeds]
    assert [one.message.content for one in answer.choices] == expected and len(set(expected)) > 1
    assert [one.index for one in answer.choices] == [0, 1, 2]
    greedy = client.chat.completions.create(**CHAT, n=2, temperature=0)
    assert [one.message.content for one in greedy.choices] == [alone(QUESTION, {"max_new_tokens": 8}).text] * 2
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(model=MODEL, messages=QUESTION, n=3, stream=True, **drawn):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == expected


def test_equal_prompts_get_samples_of_their_own(client):
    """As from `generate()`, which counts repeated prompts."""
    drawn = {"model": MODEL, "temperature": 1.5, "seed": 7, "max_tokens": 10}
    call = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 10}
    expected = {
        prompt: [alone(prompt, call | {"seed": seed_of(7, k)}).text for k in range(number)]
        for prompt, number in (("She", 6), ("was a cat", 2))
    }
    answer = client.completions.create(**drawn, prompt=["She", "was a cat", "She", "She"], n=2)
    of_she = expected["She"]
    assert [one.text for one in answer.choices] == [*of_she[:2], *expected["was a cat"], *of_she[2:]]
    assert len(set(of_she)) > 3
    with_alone = {"extra_body": {"adafuse": {"alone": True}}}
    made = client.completions.create(**drawn, prompt=["She"] * 3, **with_alone).choices
    assert [one.text for one in made] == of_she[:3]
    for name in made[0].adafuse["members"]:
        assert len({one.adafuse["alone"][name] for one in made}) > 1


def test_log_probabilities_of_the_main_model(client):
    answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3).choices[0]
    tokens = answer.logprobs.content
    assert bytes(byte for one in tokens for byte in one.bytes).decode("utf-8", "replace") == answer.message.content
    assert all(one.logprob <= one.top_logprobs[0].logprob and len(one.top_logprobs) == 3 for one in tokens)
    assert tokens[0].top_logprobs[0].logprob > tokens[0].top_logprobs[1].logprob
    chunks = list(client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3, stream=True))
    streamed = [one for c in chunks if c.choices[0].logprobs for one in c.choices[0].logprobs.content]
    assert [one.logprob for one in streamed] == pytest.approx([one.logprob for one in tokens], abs=1e-4)
    asked = {"model": MODEL, "prompt": "She", "max_tokens": 8, "logprobs": 2}
    text = client.completions.create(**asked).choices[0]
    assert "".join(text.logprobs.tokens) == text.text and len(text.logprobs.token_logprobs) == len(text.logprobs.tokens)
    assert text.logprobs.text_offset[0] == 0
    # In a stream, too, what is cut off has none.
    stop = text.text[len(text.text) // 2 :][:2]
    cut = client.completions.create(**asked, stop=stop).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stop=stop, stream=True)]
    streamed = [one.logprobs for one in chunks if one.logprobs]
    assert "".join(one.text for one in chunks) == cut.text
    for field in ("tokens", "text_offset"):
        assert sum((getattr(one, field) for one in streamed), []) == getattr(cut.logprobs, field)


def pieces(*tokens):
    return [TokenLogProb(data, -1.0) for data in tokens]


@pytest.mark.parametrize(
    ("tokens", "content", "starts"),
    [
        ((b"a", b"bc", b"d"), "abcd", [0, 1, 3]),
        ((b"a", b"bc", b"d"), "ab", [0, 1]),
        ((b"\xe2", b"\x82", b"\xac", b"a"), "\u20aca", [0, 0, 0, 1]),  # a character of three tokens
        ((b"\xe2", b"\x82", b"\xac", b"a"), "\u20ac", [0, 0, 0]),
        ((b"\xff", b"a", b"b", b"c"), "\ufffdab", [0, 1, 2]),  # a byte that is no UTF-8
        ((b"\xe2\x82", b"a", b"b"), "\ufffda", [0, 1]),  # a character that is broken off
        ((b"\xe2\x82", b"a", b"b"), "\ufffd", [0]),
        ((b"a\xe2", b"\x82\xacb", b"c"), "a\u20acb", [0, 1]),
        ((b"a", b"", b"b"), "ab", [0, 1, 1]),
        ((b"a", b"", b"b"), "a", [0]),
        ((b"a",), "", []),
    ],
    ids=str,
)
def test_tokens_begin_in_characters(tokens, content, starts):
    made = pieces(*tokens)
    assert tokens_within(made, content) == list(zip(made, starts, strict=False))
    assert b"".join(tokens).decode("utf-8", "replace").startswith(content)


def test_text_by_a_schema(client):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answer = client.chat.completions.create(**{**CHAT, "max_tokens": 40}, response_format=form).choices[0]
    assert set(json.loads(answer.message.content)) == {"a"}
    expected = alone(QUESTION, {"max_new_tokens": 40, "structured": {"json_schema": schema}})
    assert answer.message.content == expected.text and answer.finish_reason == "stop"


@pytest.mark.parametrize("strict", [None, False, True])
def test_a_schema_that_is_not_enforced_is_refused_where_it_is_strict(post, strict):
    """As by OpenAI's API: who asks for `strict` takes the answer for valid."""
    array = {"type": "array", "items": {"enum": [1]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": array, "strict": strict}}
    answer = post({**CHAT, "max_tokens": 40, "response_format": form})
    if strict:
        assert answer.status_code == 400
        assert "but has `uniqueItems` at the root." in answer.json()["error"]["message"]
    else:
        assert answer.json()["choices"][0]["message"]["content"] == "[1, 1]"
    enforced = {**form, "json_schema": {**form["json_schema"], "schema": {"enum": ["a"]}}}
    assert post({**CHAT, "response_format": enforced}).json()["choices"][0]["message"]["content"] == '"a"'


def test_rounds_and_members_alone(client):
    options = {"rounds": True, "alone": True}
    adafuse = client.chat.completions.create(**CHAT, extra_body={"adafuse": options}).choices[0].message.adafuse
    expected = alone(QUESTION, {"max_new_tokens": 8})
    assert [one["text"] for one in adafuse["rounds"]] == [one.text for one in expected]
    assert [len(one["candidates"]) for one in adafuse["rounds"]] == [len(one.candidates) for one in expected]
    for name, text in adafuse["alone"].items():
        answer = client.chat.completions.create(**{**CHAT, "model": name}).choices[0].message
        assert answer.content == text and answer.adafuse["members"] == [name]
    assert list(adafuse["alone"]) == adafuse["members"]


def test_a_request_that_says_no_is_not_sampled(client):
    """As in Python, where `do_sample=False` of the settings goes before what the call says."""
    for drawn in ({"temperature": 2.0}, {"top_p": 0.9}, {"temperature": 2.0, "top_p": 0.9}):
        found = {
            client.chat.completions.create(
                **CHAT, **drawn, seed=seed, extra_body={"adafuse": {"do_sample": False}}
            ).choices[0].message.content
            for seed in range(3)
        }  # fmt: skip
        assert found == {alone(QUESTION, {"max_new_tokens": 8}).text}, drawn


@pytest.mark.parametrize("drawn", [{"temperature": 2.0}, {"top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_a_request_that_samples_goes_before_greedy_settings_of_the_server(drawn):
    call = {"do_sample": True, "temperature": 1.0, "max_new_tokens": 10, **drawn}
    expected = [alone(QUESTION, call | {"seed": seed}).text for seed in range(3)]
    body = {**CHAT, "max_tokens": 10}
    with running(service_of(config=CONFIG.changed({"do_sample": False}))) as (_, client):

        def ask(**more):
            return client.chat.completions.create(**body, **more).choices[0].message.content

        assert [ask(**drawn, seed=seed) for seed in range(3)] == expected and len(set(expected)) > 1
        greedy = alone(QUESTION, {"max_new_tokens": 10}).text
        assert ask() == ask(top_p=1.0) == ask(**drawn, extra_body={"adafuse": {"do_sample": False}}) == greedy


def test_members_alone_read_ids_of_the_main_model_as_texts(server):
    service, client = server
    body = {"model": MODEL, "prompt": "there was a cat on the tree. The", "max_tokens": 8}
    ids = service.served[MODEL].ensemble.tokenizers[0](body["prompt"], add_special_tokens=False).input_ids
    options = {"alone": True, "model_weights": [3, 1], "do_sample": False}  # weights are not of a member alone
    texts, of_ids = (
        client.completions.create(**{**body, "prompt": prompt}, extra_body={"adafuse": options}).choices[0]
        for prompt in (body["prompt"], ids)
    )
    assert of_ids.text == texts.text and of_ids.adafuse["alone"] == texts.adafuse["alone"]
    assert len(set(texts.adafuse["alone"].values())) == 2


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_members_alone_answer_each_prompt(client, is_streamed, n):
    prompts = ["was a cat", "She", "Once upon a time"]
    body = {"model": MODEL, "max_tokens": 6}
    names = [one.id for one in client.models.list()][1:]
    expected = [
        {name: client.completions.create(**{**body, "model": name}, prompt=prompt).choices[0].text for name in names}
        for prompt in prompts
    ]
    asked = {"n": n, "stream": is_streamed, "extra_body": {"adafuse": {"alone": True}}}
    made = client.completions.create(**body, prompt=prompts, **asked)
    choices = [one for part in made for one in part.choices] if is_streamed else made.choices
    found = {one.index: one.adafuse["alone"] for one in choices if one.finish_reason}
    assert [found[index] for index in range(3 * n)] == [one for one in expected for _ in range(n)]
    assert expected[0] != expected[1] != expected[2]


def test_ids_are_read_as_they_are(server):
    """Also those of the padding token."""
    service, client = server
    main, tokenizer = service.served[MODEL].members[0], service.served[MODEL].ensemble.tokenizers[0]
    ids = tokenizer("was a cat", add_special_tokens=False).input_ids
    for place in (0, 1, len(ids)):
        prompt = [*ids[:place], tokenizer.pad_token_id, *ids[place:]]
        text = tokenizer.decode(prompt)
        assert tokenizer(text, add_special_tokens=False).input_ids == prompt
        by_ids, by_text = (client.completions.create(model=main, prompt=one, max_tokens=6) for one in (prompt, text))
        assert by_ids.choices[0].text == by_text.choices[0].text
        assert by_ids.usage.prompt_tokens == len(prompt)
        assert client.completions.create(model=MODEL, prompt=prompt, max_tokens=6).usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize(
    ("path", "body", "param", "reason"),
    [
        ("completions", {"prompt": [-1]}, "prompt.0", "greater than or equal to 0"),
        ("completions", {"prompt": [5, 2**62]}, "prompt.1", "less than"),
        ("completions", {"prompt": [[5], [2**63]]}, "prompt.1.0", "less than"),
        ("completions", {"prompt": [1, "a"]}, "prompt.1", "valid integer"),
        ("completions", {"prompt": ["a", 5]}, "prompt.1", "valid string"),
        ("chat/completions", {**CHAT, "tool_choice": "maybe"}, "tool_choice", "'none', 'auto' or 'required'"),
        ("chat/completions", {**CHAT, "tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
        (
            "chat/completions",
            {**CHAT, "tool_choice": {"type": "function", "function": {"name": 5}}},
            "tool_choice.function.name",
            "valid string",
        ),
        ("completions", {"prompt": []}, "prompt", "at least 1 item"),
        ("completions", {"prompt": "a", "stop": [""]}, "stop.0", "at least 1 item"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0.type",
            "'text'",
        ),
    ],
)
def test_the_part_of_a_body_that_is_wrong_is_named(post, path, body, param, reason):
    error = post({"model": MODEL, **body}, path).json()["error"]
    assert error["param"] == param and reason in error["message"] and " at 0x" not in error["message"]


def test_a_prompt_of_several_texts_counts_once(client):
    body = {"model": MODEL, "prompt": ["was a cat", "She"], "max_tokens": 4}
    single = client.completions.create(**body).usage.prompt_tokens
    for sampled in ({}, {"temperature": 1.0, "seed": 3}):
        assert client.completions.create(**body, n=3, **sampled).usage.prompt_tokens == single


def test_settings_of_one_request(client):
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**CHAT, extra_body={"adafuse": {"method": "none"}})
    answer = client.chat.completions.create(**CHAT, extra_body={"adafuse": {"method": "unite"}})
    expected = alone(QUESTION, {"max_new_tokens": 8, "adafuse_config": {"method": "unite"}})
    assert answer.choices[0].message.content == expected.text


@pytest.mark.parametrize("is_streamed", [False, True])
def test_members_rate_answers_where_a_request_asks_for_it(client, is_streamed):
    """With settings of its own, beside others in one batch."""
    chats, numbers = [QUESTION, LONGER, QUESTION], [8, 12, 5]
    settings = {"method": "peer-review", "rubric": "Rate.", "max_score": 3}

    def ask(chat, number, more):
        body = {"model": MODEL, "messages": chat, "max_tokens": number}
        made = client.chat.completions.create(**body, stream=is_streamed, extra_body={"adafuse": {**more, **options}})
        if not is_streamed:
            return made.choices[0].message.content, made.choices[0].message.adafuse
        chunks = list(made)
        return "".join(one.choices[0].delta.content or "" for one in chunks), chunks[-1].choices[0].adafuse

    options = {"rounds": True}
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(ask, chats * 2, numbers * 2, [settings] * 3 + [{}] * 3))
    for (text, adafuse), chat, number in zip(found[:3], chats, numbers, strict=False):
        call = {"max_new_tokens": number, "adafuse_config": CONFIG.changed(settings)}
        expected = alone(chat, call)
        assert text == expected.text == words_of(adafuse)
        assert [one["criterion"] for one in adafuse["rounds"]] == ["mean rating"] * len(expected)
        scores = [[one.score for one in each.candidates] for each in expected]
        made = [[one["score"] for one in each["candidates"]] for each in adafuse["rounds"]]
        assert made == [pytest.approx(each, abs=1e-4) for each in scores]
    for (text, _), chat, number in zip(found[3:], chats, numbers, strict=True):
        assert text == alone(chat, {"max_new_tokens": number}).text


def test_a_request_like_an_earlier_one_is_planned_at_once(monkeypatch):
    """Without a thread of the plans; what is drawn may have to wait for the random numbers there."""
    with running() as (service, client):
        submit, clients = service._quick.submit, []
        monkeypatch.setattr(service._quick, "submit", lambda client, work: clients.append(1) or submit(client, work))

        def ask(chat, **more):
            made = client.chat.completions.create(**{**CHAT, "messages": chat, **more})
            return made.choices[0].message.content, len(clients)

        expected = [alone(chat, {"max_new_tokens": 8}).text for chat in (QUESTION, LONGER)]
        assert [ask(QUESTION), ask(LONGER), ask(QUESTION)] == [(expected[k], 1) for k in (0, 1, 0)]
        assert ask(LONGER, max_tokens=9) == (alone(LONGER, {"max_new_tokens": 9}).text, 2)
        drawn = {"do_sample": True, "temperature": 1.2, "max_new_tokens": 8}
        for number, seed in ((3, 1), (4, 2)):
            found = ask(QUESTION, temperature=1.2, seed=seed)
            assert found == (alone(QUESTION, {**drawn, "seed": seed}).text, number)
        with pytest.raises(openai.BadRequestError, match="must be at most 512 tokens"):
            ask([{"role": "user", "content": "a cat " * 600}])


@pytest.mark.parametrize(
    ("change", "status", "match"),
    [
        ({"model": "other"}, 404, "must be one of"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        ({"messages": [{"role": "king", "content": "a"}]}, 400, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "a" * 1_000_001}]}, 400, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "a" * 40_000}]}, 400, "at most"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": "8"}, 400, "max_tokens"),
        ({"max_tokens": 10**9}, 400, "max_tokens"),
        ({"temperature": 3}, 400, "temperature"),
        ({"temperature": -1}, 400, "temperature"),
        ({"stop": ""}, 400, "stop"),
        ({"n": 100}, 400, "n"),
        ({"frequency_penalty": 1}, 400, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"top_logprobs": 2}, 400, "logprobs"),
        ({"unheard_of": 1}, 400, "unheard_of"),
        ({"response_format": {"type": "json_schema"}}, 400, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "what"}}}}, 400, "json_schema"),
        ({"adafuse": {"num_branches": 0}}, 400, "num_branches"),
        ({"adafuse": {"unheard_of": 1}}, 400, "unheard_of"),
        ({"adafuse": {"preset": "best"}}, 400, "preset"),
        ({"adafuse": {"num_branches": 10**6}}, 400, "num_branches"),
        ({"adafuse": {"method": "blender", "ranker": "somebody/model"}}, 400, "ranker"),
        ({"adafuse": {"method": "blender", "method_options": {"fuser": "somebody/model"}}}, 400, "fuser"),
        ({"adafuse": {"method": "words", "mean": "root", "method_options": [1]}}, 400, "`method_options` must be a"),
        ({"adafuse": {"preset": "robust", "method_options": "x"}}, 400, "`method_options` must be a"),
        ({"adafuse": {"method": "deepen", "learning_rate": 1e308}}, 400, "`learning_rate` must be a number from 0 to"),
        ({"adafuse": {"method": "majority", "pattern": "(a+)+$"}}, 400, "pattern"),
        ({"adafuse": {"method": "select", "calibration": "/etc/passwd"}}, 400, "calibration"),
        ({"adafuse": {"method": "select", "calibration": {"version": 1}}}, 400, "calibration"),
        ({"adafuse": {"model_weights": [1.0] * 2000}}, 400, "model_weights"),
        ({"reasoning_effort": "endless"}, 400, "reasoning_effort"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, 400, "chat_template"),
        ({"adafuse": {"thinking": "loud"}}, 400, "thinking"),
        ({"seed": -1}, 400, "seed"),
        ({"seed": True}, 400, "seed"),
    ],
    ids=str,
)
def test_requests_that_cannot_be_honoured(post, change, status, match):
    answer = post({**CHAT, **change})
    error = answer.json()["error"]
    assert answer.status_code == status and match in f"{error['param']} {error['message']}"
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("function_call", {"name": "weather", "arguments": "{}"}),
        ("refusal", "I cannot."),
        ("audio", {"id": "a"}),
        ("reasoning", "2 + 2"),
        ("reasoning_content", "2 + 2"),
        ("prefix", True),
        ("partial", True),
    ],
)
def test_parts_of_a_message_that_cannot_be_honoured(post, field, value):
    def ask(value):
        said = {"role": "assistant", "content": "It is", field: value}
        return post({**CHAT, "messages": [*QUESTION, said, *QUESTION]})

    answer = ask(value)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"messages.1.{field}"
    assert "must be left out" in answer.json()["error"]["message"]
    for nothing in (None, type(value)()):
        assert ask(nothing).status_code == 200


def test_an_answer_may_be_sent_back_as_it_came(client):
    message = client.chat.completions.create(**CHAT).choices[0].message
    for said in (message, message.model_dump()):
        chat = [*QUESTION, said, *QUESTION]
        assert client.chat.completions.create(**{**CHAT, "messages": chat}).choices[0].message.content


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_null_counts_as_left_out(post, path):
    """Also of fields that are not known here, as clients send all of them."""
    body = CHAT if path == "chat/completions" else {"model": MODEL, "prompt": "She", "max_tokens": 4}
    unused = ["functions", "function_call", "audio", "prediction", "web_search_options", "verbosity", "unheard_of"]
    assert post({**body, **dict.fromkeys(unused)}, path).json()["choices"] == post(body, path).json()["choices"]
    for name in unused:
        assert post({**body, name: {"a": 1}}, path).json()["error"]["param"] == name
    part = {"type": "text", "text": QUESTION[0]["content"]}
    chats = [[{"role": "user", "content": [one]}] for one in (part, {**part, "cache_control": None})]
    texts = [post({**CHAT, "messages": chat}).json()["choices"] for chat in chats]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        ("{", 400),
        ("[]", 400),
        ("null", 400),
        (b"\xff\xfe", 400),
        ('{"model": "ensemble", "messages": ' + "[" * 100_000, 400),
        ('{"model": "ensemble", "messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        ('{"model": "ensemble", "temperature": NaN, "messages": [{"role": "user", "content": "a"}]}', 400),
        (b" " * (5 * 2**20), 413),
    ],
    ids=["broken", "list", "null", "bytes", "deep", "surrogate", "nan", "huge"],
)
def test_bodies_that_are_none(post, content, status):
    answer = post(content)
    assert answer.status_code == status and set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("kind", [None, "text/plain", "multipart/form-data", "application/jsonl"])
def test_a_body_that_is_not_said_to_be_json(client, kind):
    """A page of another origin may send such a body unasked."""
    headers = {} if kind is None else {"Content-Type": kind}
    answer = httpx.post(f"{client.base_url}chat/completions", content=json.dumps(CHAT), headers=headers)
    assert answer.status_code == 400 and "Content-Type" in answer.json()["error"]["message"]
    right = {"Content-Type": "application/json; charset=utf-8"}
    assert httpx.post(f"{client.base_url}chat/completions", content=json.dumps(CHAT), headers=right).is_success


def test_a_body_without_a_length_is_cut_off():
    sent = (b" " * 2**20 for _ in range(6))
    with running() as (_, client):
        answer = httpx.post(f"{client.base_url}chat/completions", content=sent)
    assert answer.status_code == 413


def test_paths_that_there_are_not(post, client):
    assert post({}, "embeddings").status_code == 404
    assert set(post({}, "embeddings").json()) == {"error"}
    root = str(client.base_url).removesuffix("/v1/")
    for method, path, allowed in (("GET", "/v1/chat/completions", "POST"), ("POST", "/v1/models", "GET")):
        answer = httpx.request(method, root + path)
        assert answer.status_code == 405 and answer.headers["Allow"] == allowed and set(answer.json()) == {"error"}
    for path in ("/", "/health"):
        answer = httpx.head(root + path)
        assert answer.status_code == 200 and answer.content == b"" and int(answer.headers["Content-Length"]) > 0


def test_health_and_metrics(server):
    service, client = server
    root = str(client.base_url).removesuffix("/v1/")
    before = service.metrics.requests["/v1/chat/completions", MODEL, 200]
    client.chat.completions.create(**CHAT)
    assert httpx.get(f"{root}/health").json()["status"] == "ok"
    text = httpx.get(f"{root}/metrics").text
    assert f'adafuse_requests_total{{path="/v1/chat/completions",model="{MODEL}",status="200"}} {before + 1}' in text
    assert 'adafuse_request_seconds_bucket{le="+Inf"}' in text and "adafuse_running 0" in text
    assert service.engine.num_passes > 0


def test_a_full_queue_refuses(monkeypatch):
    passes = Passes(monkeypatch)
    with running(service_of(1, 1)) as (service, client), ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.chat.completions.create, **CHAT)
        until(lambda: service.engine.num_running == 1)
        second = pool.submit(client.chat.completions.create, **CHAT)
        until(lambda: service.engine.num_waiting == 1)
        with pytest.raises(openai.RateLimitError, match="busy") as caught:
            client.chat.completions.create(**CHAT)
        assert int(caught.value.response.headers["Retry-After"]) >= 1
        passes.is_open = True
        assert first.result().choices == second.result().choices
        assert client.chat.completions.create(**CHAT).choices == first.result().choices
        assert service.engine.num_refused == 1


def test_a_request_of_more_texts_than_there_are_places():
    with running(service_of(1, 1)) as (_, client), pytest.raises(openai.BadRequestError, match="at most 2 texts"):
        client.completions.create(model=MODEL, prompt=["a", "b", "c"])


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_goes_away_frees_its_place_within_one_pass(monkeypatch, is_streamed):
    passes = Passes(monkeypatch)
    body = {**CHAT, "max_tokens": 200, "stream": is_streamed}
    with running(service_of(1, 1)) as (service, client):
        engine = service.engine
        with httpx.Client() as other:
            if is_streamed:
                with other.stream("POST", f"{client.base_url}chat/completions", json=body) as stream:
                    until(lambda: engine.num_running == 1)
                    passes.allow(3)
                    until(lambda: engine.num_passes == 3)
                    next(stream.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    other.post(f"{client.base_url}chat/completions", json=body, timeout=0.5)
        until(lambda: engine._cancelled)
        before = engine.num_passes
        passes.allow()
        until(lambda: engine.num_running == 0)
        assert engine.num_passes <= before + 1
        passes.is_open = True
        assert client.chat.completions.create(**CHAT).choices[0].message.content
        until(lambda: service.metrics.disconnects == 1)


def test_a_pass_that_fails_once_is_no_failure(monkeypatch):
    forward, failures = KVCacheBackend._forward, [0]

    def breaking(self, *args, **kwargs):
        failures[0] += 1
        if failures[0] == 6:
            raise ForwardError("out of memory")
        return forward(self, *args, **kwargs)

    with running(service_of(4)) as (_, client), ThreadPoolExecutor(4) as pool:
        monkeypatch.setattr(KVCacheBackend, "_forward", breaking)
        asked = [pool.submit(client.chat.completions.create, **{**CHAT, "messages": c}) for c in (QUESTION, LONGER) * 2]
        texts = []
        for one in asked:
            try:
                texts.append(one.result().choices[0].message.content)
            except openai.InternalServerError:
                texts.append(None)
    expected = [alone(chat, {"max_new_tokens": 8}).text for chat in (QUESTION, LONGER) * 2]
    # One that was alone in its batch has failed; all others have been answered.
    assert sum(text is None for text in texts) <= 1
    assert all(text in (None, right) for text, right in zip(texts, expected, strict=True))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_member_that_fails(monkeypatch, is_streamed):
    def broken(self, *args, **kwargs):
        raise ForwardError("no memory at /srv/somebody/models/weights.bin")

    with running() as (_, client):
        with monkeypatch.context() as patched:
            patched.setattr(KVCacheBackend, "_forward", broken)
            with pytest.raises(openai.APIError, match="failed in round") as caught:
                list(client.chat.completions.create(**CHAT, stream=is_streamed))
        assert "somebody" not in str(caught.value) and "weights.bin" in str(caught.value)
        assert client.chat.completions.create(**CHAT).choices[0].message.content


def test_a_server_that_stops_ends_its_streams(monkeypatch):
    passes = Passes(monkeypatch)
    with running() as (service, client):
        stream = client.chat.completions.create(**{**CHAT, "max_tokens": 200}, stream=True)
        until(lambda: service.engine.num_running == 1)
        service.engine.begin_to_stop()
        passes.is_open = True
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            client.chat.completions.create(**CHAT)


def test_the_key(monkeypatch):
    with running(api_key="secret") as (_, client):
        root = str(client.base_url).removesuffix("/v1/")
        with pytest.raises(openai.AuthenticationError, match="key"):
            client.models.list()
        assert httpx.get(f"{root}/health").status_code == 200
        assert httpx.get(f"{root}/metrics").status_code == 401
        with client_of(root, "secret") as other:
            assert len(other.models.list().data) == 3
        for given, status in {"bearer secret": 200, "BEARER  secret": 200, "Basic secret": 401, "Bearer": 401}.items():
            assert httpx.get(f"{root}/metrics", headers={"Authorization": given}).status_code == status


def test_pages_of_other_origins():
    headers = {"Origin": "https://a.example"}
    with running() as (_, client):
        assert "access-control-allow-origin" not in httpx.get(f"{client.base_url}models", headers=headers).headers
    with running(cors_origins=["https://a.example"]) as (_, client):
        answer = httpx.get(f"{client.base_url}models", headers=headers)
        assert answer.headers["access-control-allow-origin"] == "https://a.example"


def test_names_must_differ():
    served = serve_members("ensemble", members(), CONFIG)
    with pytest.raises(ValueError, match="must differ"):
        Service([*served, served[0]], Engine())


def test_messages_name_no_folder():
    assert without_paths("no file /a/b.c/weights.bin here") == "no file weights.bin here"
    assert without_paths("`a/b` and 1/2 and http://host/v1/x") == "`a/b` and 1/2 and http://host/v1/x"
