"""Servers for tests: small members with chat templates, and what an ensemble of them gives without a server."""

from __future__ import annotations

import contextlib
import random

import openai
import torch
from chats import CONFIG, LONGER, QUESTION, members

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


def random_request(rng: random.Random):
    """A chat with settings, and the same for `generate()`."""
    chat = rng.choice([QUESTION, LONGER, [{"role": "user", "content": f"was {rng.randrange(9)} a cat"}]])
    number, seed = rng.randint(1, 20), rng.randrange(1000)
    request, call = {"max_tokens": number, "seed": seed}, {"max_new_tokens": number, "seed": seed}
    kind = rng.randrange(5)
    if kind == 0:
        request["stop"] = call["stop_strings"] = rng.choice([["e"], ["a", "th"]])
    elif kind == 1:
        request |= {"temperature": 1.2, "top_p": 0.9}
        call |= {"temperature": 1.2, "top_p": 0.9, "do_sample": True}
    elif kind == 2:
        request["extra_body"] = {"adafuse": {"regex": "[a-z ]{3,9}"}}
        call["structured"] = {"regex": "[a-z ]{3,9}"}
    elif kind == 3:
        request["extra_body"] = {"adafuse": {"num_branches": 1}}
        call["adafuse_config"] = CONFIG.changed({"num_branches": 1})
    return chat, request, call
