"""What requests begin with alike is read once, and what is kept for it stays within its memory: counted in bytes."""

from __future__ import annotations

import itertools
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from servers_of_tests import MODEL, alone, running, service_of
from support.chats import CONFIG, members

from hf_adafuse.serve.engine import Engine
from hf_adafuse.serve.ensembles import serve_members
from hf_adafuse.serve.service import Service
from hf_adafuse.trees.pass_policy import Policy
from hf_adafuse.trees.shared_prefix import KeptPrefixes

SHOTS = "Question: what is the capital? Answer: a big tree.\n\n" * 2


def gauges(client):
    text = httpx.get(str(client.base_url).replace("/v1/", "/metrics")).text
    return {name: int(value) for name, value in re.findall(r"^adafuse_prefix_cache_(\w+) (\d+)$", text, re.MULTILINE)}


def test_of_a_conversation_only_what_is_new_is_read():
    """Also where others are decoded at the same time, so that the batch is never empty."""
    with running(service_of(max_batch_size=2)) as (service, client), ThreadPoolExecutor(1) as pool:
        messages, read = [{"role": "user", "content": SHOTS * 2}], []
        other = pool.submit(client.completions.create, model=MODEL, prompt="She", max_tokens=80)
        for _ in range(3):
            before = gauges(client)["used_tokens_total"]
            answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
            assert answer.choices[0].message.content == alone(messages, {"max_new_tokens": 8}).text
            read.append((answer.usage.prompt_tokens, gauges(client)["used_tokens_total"] - before))
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
            messages += [{"role": "user", "content": "she was there"}]
        other.result()
    assert read[0][1] == 0
    # The main model's earlier prompt, and something of the assistant's.
    assert all(used > number for (number, _), (_, used) in itertools.pairwise(read))


@pytest.mark.parametrize("max_bytes", [0, 60_000, 10**9])
def test_memory_is_bounded_and_texts_are_the_same(max_bytes, monkeypatch):
    monkeypatch.setattr(Policy, "least_shared_tokens", 8)
    sizes, keep = [], KeptPrefixes._set

    def watched(self, kept):
        keep(self, kept)
        sizes.append(self.num_bytes)

    monkeypatch.setattr(KeptPrefixes, "_set", watched)
    service = Service(serve_members(MODEL, members(), CONFIG), Engine(3, 64, max_bytes), 16)
    prompts = [SHOTS[: 20 + 13 * number] + "She" for number in range(5)] * 2
    with running(service) as (_, client), ThreadPoolExecutor(4) as pool:
        ask = lambda prompt: client.completions.create(model=MODEL, prompt=prompt, max_tokens=6).choices[0].text  # noqa: E731
        texts = list(pool.map(ask, prompts))
        said = gauges(client)
    assert texts == [alone(prompt, {"max_new_tokens": 6}).text for prompt in prompts]
    assert said["limit_bytes"] == max_bytes and said["bytes"] == service.engine.prefixes.num_bytes
    assert max(sizes, default=0) <= max_bytes
    assert bool(said["used_tokens_total"]) == bool(sizes) == (max_bytes > 0)
    if max_bytes == 60_000:
        assert any(after < before for before, after in itertools.pairwise(sizes))
