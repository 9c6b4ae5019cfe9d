"""Servers for tests: small members with chat templates, and what an ensemble of them gives without a server."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace

import openai
import torch
from support.chats import CONFIG, members
from support.stand_in import StandIn
from support.stand_in import serving as standing

from hf_adafuse import AdaFuseEnsemble, ServedModel
from hf_adafuse.call.running_batch import RunningBatch
from hf_adafuse.serve.engine import Engine
from hf_adafuse.serve.ensembles import serve_members
from hf_adafuse.serve.server import serving
from hf_adafuse.serve.service import Service

MODEL = "ensemble"


def service_of(max_batch_size=4, max_waiting=64, config=CONFIG, pair=None):
    return Service(serve_members(MODEL, pair or members(), config), Engine(max_batch_size, max_waiting), 16)


@contextlib.contextmanager
def running(service=None, **options):
    """A server, and a client of it that tries nothing twice."""
    service = service or service_of()
    with serving(service, **options) as url, client_of(url) as client:
        yield service, client


class Dying:
    """Before a stand-in for a server: what befalls it, by name; `None`: nothing. The member is patient with it, which a
    busy machine needs, but while it is away."""

    def __init__(self, behind):
        self.behind, self.connection, self.asked = behind, None, threading.Event()
        self._fault = None

    @property
    def fault(self):
        return self._fault

    @fault.setter
    def fault(self, fault):
        self._fault = fault
        self.connection.retry_policy = replace(self.connection.retry_policy, deadline=1 if fault == "away" else 60)

    def answer(self, path, body, headers):
        if self.fault is None:
            return self.behind.answer(path, body, headers)
        self.asked.set()
        said = {"error": f"no file /srv/secret/weights of {headers.get('Authorization')}"}
        return {"away": (503, said), "refuses": (400, said), "nonsense": (200, b"{}")}[self.fault]


@contextlib.contextmanager
def behind_a_server(monkeypatch):
    """A service whose assistant is behind a server, which is given beside it."""
    monkeypatch.setenv("HF_ADAFUSE_TEST_KEY", "sk-verysecret")
    main, (model, tokenizer) = members()
    dying = Dying(StandIn(model, tokenizer))
    with standing(dying) as url:
        given = {"tokenizer": tokenizer, "eos_token_id": tokenizer.eos_token_id, "api_key_env": "HF_ADAFUSE_TEST_KEY"}
        served = ServedModel(url, "vllm", **given, timeout=30, deadline=60, retries=1)
        dying.connection = served.api.connection
        yield service_of(pair=[main, (served, tokenizer)]), dying


def client_of(url, key="none", kind=openai.OpenAI):
    return kind(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def alone(prompt, call, config=CONFIG, pair=None):
    """What an ensemble gives for one prompt without a server: its rounds."""
    ensemble = AdaFuseEnsemble(pair or members(), config)
    call = {"do_sample": False, "max_new_tokens": 16, **call}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(call.pop("seed", 0))
        return ensemble.rounds([prompt], chat=not isinstance(prompt, str), **call)[0]


class Passes:
    """Lets a batch run pass by pass."""

    def __init__(self, monkeypatch):
        self.allowed, self.is_open, step = threading.Semaphore(0), False, RunningBatch.step

        def gated(batch):
            while not self.is_open and not self.allowed.acquire(timeout=0.05):
                pass
            return step(batch)

        monkeypatch.setattr(RunningBatch, "step", gated)

    def allow(self, number=1):
        for _ in range(number):
            self.allowed.release()
