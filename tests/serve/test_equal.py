"""Requests of mixed settings, at random times, streamed and not, share running batches: each gets the text that
it gets alone by `generate()`. `HF_ADAFUSE_REQUESTS=2000` asks for more of them, `HF_ADAFUSE_SEED=7` for others.
"""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers_of_tests import MODEL, alone, running, service_of
from support.chats import CONFIG, LONGER, PROMPTS, QUESTION

from hf_adafuse.confidence.answer_text import cut_at
from hf_adafuse.serve.service import seed_of

NUMBER = int(os.environ.get("HF_ADAFUSE_REQUESTS", "200"))
SEED = int(os.environ.get("HF_ADAFUSE_SEED", "5"))
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
SETTINGS = [
    {"num_branches": 1},
    {"margin_threshold": 0.3, "max_words": 2},
    {"model_weights": [3, 1]},
    {"preset": "robust"},
    {"method": "unite", "top_k": 4},
    {"method": "majority"},
]


def config_of(settings):
    if "preset" in settings:
        return settings["preset"]
    return CONFIG.changed(settings)


class Asked:
    """A request by lot, and the same for `generate()`."""

    def __init__(self, rng):
        self.is_chat, self.is_streamed, self.wait = rng.random() < 0.7, rng.random() < 0.5, rng.random()
        word = [{"role": "user", "content": f"was {rng.randrange(9)} a cat"}]
        self.prompt = rng.choice([QUESTION, LONGER, word]) if self.is_chat else rng.choice(PROMPTS)
        number, self.seed, self.number = rng.randint(1, 12), rng.randrange(1000), rng.choice([1, 1, 1, 2])
        self.body = {"max_tokens": number, "seed": self.seed, "n": self.number}
        self.call = {"max_new_tokens": number}
        self.adafuse = {}
        if rng.random() < 0.3:
            self.body["stop"] = self.call["stop_strings"] = rng.choice([["e"], ["a", "th"], ["."]])
        kind = rng.choice(["plain", "drawn", "regex", "schema", "settings", "settings"])
        if kind == "drawn":
            drawn = {"temperature": rng.choice([0.7, 1.2]), "top_p": rng.choice([0.9, 1.0])}
            self.body |= drawn
            self.call |= {**drawn, "do_sample": True}
        elif kind == "regex":
            self.adafuse["regex"] = rng.choice(["[a-z ]{3,9}", "(yes|no)( [a-z]+)*"])
            self.call["structured"] = {"regex": self.adafuse["regex"]}
        elif kind == "schema":
            self.body["response_format"] = FORM
            self.call["structured"] = {"json_schema": SCHEMA}
        elif kind == "settings":
            self.adafuse |= rng.choice(SETTINGS)
            self.call["adafuse_config"] = config_of(self.adafuse)

    def ask(self, client):
        """The texts of all choices."""
        time.sleep(self.wait * NUMBER / 80)
        if self.is_chat:
            create, given = client.chat.completions.create, {"messages": self.prompt}
        else:
            create, given = client.completions.create, {"prompt": self.prompt}
        extra = {**self.body, "adafuse": self.adafuse}
        made = create(model=MODEL, **given, stream=self.is_streamed, extra_body=extra)
        texts = [""] * self.number
        for part in made if self.is_streamed else [made]:
            for one in part.choices:
                if self.is_chat:
                    texts[one.index] += (one.delta if self.is_streamed else one.message).content or ""
                else:
                    texts[one.index] += one.text
        return texts

    @property
    def expected(self):
        made = []
        for k in range(self.number):
            if made and "do_sample" not in self.call:
                made.append(made[0])
                continue
            text = alone(self.prompt, {**self.call, "seed": seed_of(self.seed, k)}).text
            made.append(cut_at(text, self.body.get("stop")))
        return made


@pytest.mark.slow
def test_each_of_many_requests_gets_what_it_gets_alone():
    rng = random.Random(SEED)
    requests = [Asked(rng) for _ in range(NUMBER)]
    with running(service_of(max_batch_size=8, max_waiting=400)) as (service, client), ThreadPoolExecutor(24) as pool:
        texts = list(pool.map(lambda one: one.ask(client), requests))
    wrong = [one for one, made in zip(requests, texts, strict=True) if made != one.expected]
    assert [vars(one) for one in wrong] == []
    assert len(set(map(str, texts))) > NUMBER / 3  # they are not all alike
    assert service.engine.num_running == service.engine.num_waiting == 0
