"""Members that think, behind the server: they think in turn with the running batch, and only while somebody waits."""

from __future__ import annotations

import functools
import threading
import time

import httpx
import openai
import pytest
import torch
from servers_of_tests import MODEL, alone, running, service_of
from support.chats import QUESTION
from support.thinkers import CHAT, endless, pair
from support.waiting import until

from hf_adafuse import AdaFuseConfig, AdaFuseEnsemble
from hf_adafuse.serve.calls import Seeded
from hf_adafuse.serve.engine import Engine

LONG = {"model": MODEL, "messages": QUESTION, "max_tokens": 4, "adafuse": {"max_thinking_tokens": 400}}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_thoughts_are_in_the_answer(is_streamed):
    with running(service_of(pair=pair(), config=AdaFuseConfig())) as (_, client):
        made = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=4, stream=is_streamed)
        if is_streamed:
            chunks = list(made)
            text, adafuse = "".join(one.choices[0].delta.content or "" for one in chunks), chunks[-1].choices[0].adafuse
        else:
            text, adafuse = made.choices[0].message.content, made.choices[0].message.adafuse
        assert text.strip() == "sky"
        assert list(adafuse["thoughts"].values()) == ["blue dim", "red dim"]
        off = [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}]
        for given in [*off, {"adafuse": {"thinking": "off"}}]:
            answer = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=4, extra_body=given)
            assert answer.choices[0].message.content.strip() == "gray"


def test_drawn_thoughts_and_answers_are_those_of_generate():
    """Of several requests at a time, between whose turns others draw."""
    drawn = {"temperature": 1.3, "max_thinking_tokens": 6}
    bodies = [{"seed": seed, "temperature": 1.3, "adafuse": {"max_thinking_tokens": 6}} for seed in range(6)]
    call = {"do_sample": True, "max_new_tokens": 5, **drawn}
    expected = [alone(QUESTION, {**call, "seed": seed}, pair=endless()) for seed in range(6)]
    with running(service_of(pair=endless())) as (_, client):
        made, threads = {}, []

        def ask(number):
            body = {"model": MODEL, "messages": QUESTION, "max_tokens": 5}
            message = client.chat.completions.create(**body, extra_body=bodies[number]).choices[0].message
            made[number] = message.content, list(message.adafuse["thoughts"].values())

        for number in range(6):
            threads.append(threading.Thread(target=ask, args=(number,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
    assert [made[number] for number in range(6)] == [(one.text, one.thoughts) for one in expected]
    assert len({one.thoughts[0] for one in expected}) > 1


def test_others_are_answered_while_members_think():
    with running(service_of(pair=endless())) as (service, client):
        thinking = threading.Thread(
            target=lambda: httpx.post(f"{client.base_url}chat/completions", json=LONG, timeout=60)
        )
        thinking.start()
        until(lambda: service.engine._thinking)
        assert client.completions.create(model=MODEL, prompt="She", max_tokens=4).choices[0].text
        assert thinking.is_alive() and service.engine._thinking
        thinking.join()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_goes_away_while_members_think(monkeypatch, is_streamed):
    think = Engine._think
    # Thoughts to the end would take 40 s.
    monkeypatch.setattr(Engine, "_think", lambda engine: time.sleep(0.1) or think(engine))
    with running(service_of(pair=endless())) as (service, client):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{client.base_url}chat/completions", json={**LONG, "stream": is_streamed}, timeout=0.5)
        until(lambda: not service.engine._thinking and service.engine.num_waiting == 0)
        assert service.engine.num_jobs == 0


def test_thoughts_are_written_and_not_read():
    """They are counted as the text is."""
    with running(service_of(pair=endless())) as (_, client):
        create = functools.partial(client.chat.completions.create, model=MODEL, messages=QUESTION, max_tokens=4)
        usages = [create(extra_body={"adafuse": {"max_thinking_tokens": number}}).usage for number in (5, 50)]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *_, last = create(extra_body={"adafuse": {"max_thinking_tokens": 50}}, **options)
        off = create(extra_body={"adafuse": {"thinking": "off"}}).usage
    assert usages[0].prompt_tokens == usages[1].prompt_tokens <= off.prompt_tokens
    assert off.completion_tokens_details is None and last.usage == usages[1]
    thought = [usage.completion_tokens_details.reasoning_tokens for usage in usages]
    assert 5 <= thought[0] < thought[1] and off.completion_tokens == 4
    assert [usage.completion_tokens for usage in usages] == [number + 4 for number in thought]


def test_thoughts_end_where_a_prompt_must():
    """A short prompt is not too long for thoughts that are."""
    service = service_of(pair=endless())
    prompts = AdaFuseEnsemble(endless()).encode(QUESTION, chat=True)
    own = [prompts, *prompts["assistant_inputs"]]
    lengths = [one["input_ids"].shape[1] for one in own]
    service.served[MODEL].lengths[:] = [lengths[0] + 30, lengths[1] + 40]
    with running(service) as (_, client):
        create = functools.partial(client.chat.completions.create, model=MODEL, messages=QUESTION, max_tokens=4)
        answer = create(extra_body={"adafuse": {"max_thinking_tokens": 100}})
        assert 25 <= answer.usage.completion_tokens_details.reasoning_tokens <= 30
        service.served[MODEL].lengths[:] = [lengths[0] + 3, lengths[1] - 1]
        with pytest.raises(openai.BadRequestError, match=f"must be at most {lengths[1] - 1} tokens"):
            create(extra_body={"adafuse": {"max_thinking_tokens": 100}})


def test_members_alone_think_greedily_beside_an_ensemble_that_draws():
    """Calls of one request use torch's generator in turn, or not at all."""
    config = {"preset": "robust", "do_sample": True}
    with running(service_of(pair=endless(), config=config)) as (service, client):
        body = {"model": MODEL, "messages": QUESTION, "max_tokens": 4, "seed": 3}
        extra = {"max_thinking_tokens": 5}
        answer = client.chat.completions.create(**body, extra_body={"adafuse": {**extra, "alone": True}})
        for name, text in answer.choices[0].message.adafuse["alone"].items():
            alone = client.chat.completions.create(**{**body, "model": name}, extra_body={"adafuse": extra})
            assert alone.choices[0].message.content == text


def test_a_prompt_that_is_too_long_is_not_thought_about():
    with running(service_of(pair=endless())) as (service, client):
        chat = [{"role": "user", "content": "was a cat " * 1000}]
        with pytest.raises(openai.BadRequestError, match="must be at most 512 tokens") as caught:
            client.chat.completions.create(model=MODEL, messages=chat)
        assert caught.value.code == "context_length_exceeded" and service.engine.num_passes == 0


def test_a_server_that_stops_while_members_think():
    with running(service_of(pair=endless())) as (service, client):
        caught = []

        def ask():
            try:
                client.chat.completions.create(
                    **{k: v for k, v in LONG.items() if k != "adafuse"}, extra_body={"adafuse": LONG["adafuse"]}
                )
            except openai.InternalServerError as error:
                caught.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: service.engine._thinking)
        service.engine.begin_to_stop()
        asking.join(60)
        assert "shutting down" in str(caught[0])


def test_the_generator_of_torch_is_as_before():
    before = torch.get_rng_state()
    with Seeded(3) as seeded:
        first = torch.rand(3)
        seeded.hold()
        assert torch.equal(torch.get_rng_state(), before)
        with Seeded(5):
            torch.rand(1)
        seeded.resume()
        second = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with Seeded(3):
        assert torch.equal(torch.rand(6), torch.cat([first, second]))
