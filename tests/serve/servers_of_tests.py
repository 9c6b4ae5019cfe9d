"""Servers for tests: small members with chat templates, and what an ensemble of them gives without a server."""

from __future__ import annotations

import contextlib

import openai
import torch
from chats import CONFIG, members

from hf_adafuse import AdaFuseEnsemble
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


def client_of(url, key="none", kind=openai.OpenAI):
    return kind(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def alone(prompt, call, config=CONFIG, pair=None):
    """What an ensemble gives for one prompt without a server: its rounds."""
    ensemble = AdaFuseEnsemble(pair or members(), config)
    call = {"do_sample": False, "max_new_tokens": 16, **call}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(call.pop("seed", 0))
        return ensemble.rounds([prompt], chat=not isinstance(prompt, str), **call)[0]
