"""What goes wrong around the server: a member's own server dies, clients go, bodies are broken. It goes on."""

from __future__ import annotations

import httpx
import pytest
from servers_of_tests import MODEL, behind_a_server, running
from support.waiting import until

from hf_adafuse.call.running_batch import RunningBatch

BODY = {"model": MODEL, "prompt": "She", "max_tokens": 6}
STATUS = {"away": 503, "refuses": 502, "nonsense": 502}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("when", ["before", "amid"])
@pytest.mark.parametrize("fault", STATUS)
def test_the_server_of_a_member_dies(fault, when, is_streamed, monkeypatch):
    """Before a request, or while its text is decoded: no address, path or key is told. Then it lives again."""
    with behind_a_server(monkeypatch) as (service, dying), running(service) as (_, client):
        url = f"{client.base_url}completions"
        before = httpx.post(url, json=BODY, timeout=60).json()["choices"]
        step = RunningBatch.step
        with monkeypatch.context() as patched:
            if when == "amid":
                patched.setattr(RunningBatch, "step", lambda batch: (setattr(dying, "fault", fault), step(batch))[1])
            else:
                dying.fault = fault
            answer = httpx.post(url, json={**BODY, "stream": is_streamed}, timeout=60)
            assert dying.asked.is_set()
        if is_streamed and answer.status_code == 200:  # it had begun
            assert answer.text.endswith("data: [DONE]\n\n")
        else:
            assert answer.status_code == STATUS[fault]
        assert ('"member_away"' if fault == "away" else '"member_failed"') in answer.text
        assert all(word not in answer.text for word in ("secret", "/srv", "127.0.0.1", "http"))
        alone = {**BODY, "model": service.served[MODEL].members[0]}
        assert httpx.post(url, json=alone, timeout=60).status_code == 200
        dying.fault = None
        assert httpx.post(url, json=BODY, timeout=60).json()["choices"] == before
        until(lambda: service.engine.num_running == service.engine.num_waiting == 0)
