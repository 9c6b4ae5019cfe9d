"""How much of the work of two servers passes side by side. Run by hand, on a quiet machine; pytest collects none of it.

    python tests/check_overlap.py

Two stand-ins for servers, each in a process of its own, sleep 50 ms in every request beside the real work of a tiny
model, and answer for both members of an ensemble, for batches of 8 prompts. Prints the seconds of calls, over those of
the same calls where one request is under way at a time, of whichever server. vLLM takes no requests for named tokens
and for the likeliest ones at the same time, which others do.
"""

# ruff: noqa: T201
from __future__ import annotations

import multiprocessing
import time
from contextlib import contextmanager

from support.cases import PROMPTS
from support.stand_in import StandIn, serving
from support.tiny import TOKENIZERS, tiny_model

from hf_adafuse import AdaFuseEnsemble, ServedModel

SECONDS, BATCH, NEW_TOKENS = 0.05, 8, 24
MEMBERS = [("llama", "sentencepiece", 0), ("gpt_neox", "byte_level", 1)]


class OneAfterAnother(StandIn):
    """Works only while no other one does, where that is asked for."""

    def __init__(self, lock, is_alone, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lock, self.is_alone = lock, is_alone

    def answer(self, path, body, headers):
        if not self.is_alone.value:
            return super().answer(path, body, headers)
        with self.lock:
            return super().answer(path, body, headers)


def serve(kind, architecture, name, seed, lock, is_alone, pipe):
    model, tokenizer = tiny_model(architecture, name, seed), TOKENIZERS[name]()
    with serving(OneAfterAnother(lock, is_alone, model, tokenizer, kind, seconds=SECONDS)) as url:
        pipe.send(url)
        pipe.recv()


@contextmanager
def served(kind, lock, is_alone):
    """The two members, each behind a server."""
    context, pipes, members = multiprocessing.get_context("spawn"), [], []
    for architecture, name, seed in MEMBERS:
        pipe, other = context.Pipe()
        arguments = (kind, architecture, name, seed, lock, is_alone, other)
        context.Process(target=serve, args=arguments, daemon=True).start()
        pipes.append(pipe)
    for pipe, (_, name, _) in zip(pipes, MEMBERS, strict=True):
        tokenizer = TOKENIZERS[name]()
        options = {"tokenizer": tokenizer, "eos_token_id": tokenizer.eos_token_id}
        members.append((ServedModel(pipe.recv(), kind, **options), tokenizer))
    try:
        yield members
    finally:
        for pipe in pipes:
            pipe.send(None)


def timed(ensemble, members):
    """Seconds and requests of a call."""
    prompts = [*PROMPTS, "a big cat sat"][:BATCH]
    before = sum(member.api.traffic.num_requests for member, _ in members)
    start = time.perf_counter()
    texts = ensemble.texts(prompts, max_new_tokens=NEW_TOKENS)
    seconds = time.perf_counter() - start
    return seconds, sum(member.api.traffic.num_requests for member, _ in members) - before, texts


def main():
    context = multiprocessing.get_context("spawn")
    print("server, B | seconds side by side | one after another | ratio | requests side by side, one after another")
    for kind in ("sglang", "vllm"):
        is_alone = context.Value("b", 0)
        with served(kind, context.Lock(), is_alone) as members:
            for branches in (1, 2, 3):
                ensemble = AdaFuseEnsemble(members, {"num_branches": branches})
                timed(ensemble, members)  # what the servers remember is no part of it
                beside, num_beside, texts = timed(ensemble, members)
                is_alone.value = 1
                apart, num_apart, same = timed(ensemble, members)
                is_alone.value = 0
                assert same == texts
                figures = f"{beside:.2f} | {apart:.2f} | {beside / apart:.2f} | {num_beside}, {num_apart}"
                print(f"{kind}, {branches} | {figures}", flush=True)


if __name__ == "__main__":
    main()
