"""The server of a member takes a request and never answers it: requests that do not use it are answered meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from servers_of_tests import MODEL, alone, running, service_of
from support.chats import members
from support.stand_in import StandIn
from support.stand_in import serving as standing
from support.waiting import until

from hf_adafuse import ServedModel
from hf_adafuse.serve.engine import Engine
from hf_adafuse.serve.ensembles import serve_members
from hf_adafuse.serve.service import Service

LOCAL, OTHER = "local", "other"
# Of the server's silence: much longer than the test.
DEADLINE = 300


class Hanging(StandIn):
    """Before a server: while it hangs, it takes requests and does not answer them."""

    def __init__(self, model, tokenizer):
        super().__init__(model, tokenizer)
        self.goes_on, self.asked = threading.Event(), threading.Event()
        self.goes_on.set()

    def answer(self, path, body, headers):
        if not self.goes_on.is_set():
            self.asked.set()
            self.goes_on.wait()
        return super().answer(path, body, headers)


@contextlib.contextmanager
def three_ensembles():
    """A service with an ensemble of a member here and one behind a server, one with another server, and one of members
    here alone; the server of the first, and a client."""
    main, (model, tokenizer) = members()
    hanging, well = Hanging(model, tokenizer), StandIn(model, tokenizer)
    with standing(hanging) as url, standing(well) as other_url:
        given = {"tokenizer": tokenizer, "eos_token_id": tokenizer.eos_token_id, "timeout": DEADLINE}
        served = [ServedModel(one, "vllm", **given, deadline=DEADLINE) for one in (url, other_url)]
        all_served = service_of(pair=[main, (served[0], tokenizer)]).served
        known = list(all_served.values())
        for name, one in [(OTHER, served[1]), (LOCAL, model)]:
            known += serve_members(name, [main, (one, tokenizer)], known[0].config, None, known)
        names = [one.name for one in known]
        hanging.client = served[0]
        service = Service([one for k, one in enumerate(known) if one.name not in names[:k]], Engine(2, 8), 16)
        try:
            with running(service) as (_, client):
                yield service, hanging, f"{client.base_url}completions"
        finally:
            hanging.goes_on.set()


def ask(url, **changed):
    return httpx.post(url, json={"model": MODEL, "prompt": "She", "max_tokens": 6, **changed}, timeout=60)


@pytest.mark.parametrize("when", ["before", "amid"])
def test_others_are_answered_while_a_server_hangs(when):
    """More requests wait for it than there are places and threads that plan."""
    with three_ensembles() as (service, hanging, url), ThreadPoolExecutor(6) as pool:
        before = {name: ask(url, model=name).json()["choices"] for name in (MODEL, OTHER, LOCAL)}
        if when == "before":  # it is asked whether it is the same one as before
            hanging.client.api.connection.count_absence()
        hanging.goes_on.clear()
        waiting = [pool.submit(ask, url) for _ in range(6)]
        assert hanging.asked.wait(30)
        until(lambda: sum(one.num_running + one.num_waiting for one in service.engine.all) == len(waiting))
        started = time.monotonic()
        for name in (LOCAL, OTHER):
            assert ask(url, model=name).json()["choices"][0]["text"] == before[name][0]["text"]
        for changed in ({"model": service.served[MODEL].members[0]}, {"temperature": 1.0, "seed": 3}, {"stream": True}):
            assert ask(url, **{"model": LOCAL, **changed}).status_code == 200
        assert time.monotonic() - started < 60 and not any(one.done() for one in waiting)
        hanging.goes_on.set()
        texts = {one.result().json()["choices"][0]["text"] for one in waiting}
        assert texts == {before[MODEL][0]["text"]}
        until(lambda: all(one.num_running == one.num_waiting == 0 for one in service.engine.all))


def test_the_server_ends_while_another_one_hangs():
    """Streams get an end at once."""
    with three_ensembles() as (service, hanging, url), ThreadPoolExecutor(1) as pool:
        assert ask(url).status_code == 200
        hanging.goes_on.clear()
        waiting = pool.submit(ask, url, stream=True, prompt="She was there")
        assert hanging.asked.wait(30)
        until(lambda: any(one.num_running for one in service.engine.all))
        service.engine.begin_to_stop()
        answer = waiting.result(timeout=60)
        assert '"shutting_down"' in answer.text
        service.engine.stop(1)


@pytest.mark.slow
def test_texts_of_members_behind_servers_are_those_of_members_here():
    """Their engine runs in turn with the other one."""
    with three_ensembles() as (_, _, url), ThreadPoolExecutor(6) as pool:
        asked = [(name, number) for number in (3, 9, 12) for name in (MODEL, LOCAL, OTHER)]
        answers = pool.map(lambda one: ask(url, model=one[0], max_tokens=one[1]), asked)
        made = [one.json()["choices"][0]["text"] for one in answers]
    assert made == [alone("She", {"max_new_tokens": number}).text for _, number in asked]
