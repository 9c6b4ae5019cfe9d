"""How much of the work of two servers passes side by side. Run by hand, on a quiet machine; pytest collects none of it.

    python tests/check_overlap.py

Two stand-ins for vLLM, each in a process of its own, sleep 50 ms in every request beside the real work of a tiny
model, and answer for both members of an ensemble, for batches of 8 prompts. Prints the seconds of calls, over those of
the same calls with servers that work one after another.
"""

# ruff: noqa: T201
from __future__ import annotations

import multiprocessing
import time
from contextlib import contextmanager

from cases import PROMPTS
from stand_in import StandIn, serving
from tiny import TOKENIZERS, tiny_model

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


def serve(architecture, name, seed, lock, is_alone, pipe):
    model, tokenizer = tiny_model(architecture, name, seed), TOKENIZERS[name]()
    with serving(OneAfterAnother(lock, is_alone, model, tokenizer, seconds=SECONDS)) as url:
        pipe.send(url)
        pipe.recv()


@contextmanager
def served(lock, is_alone):
    """The two members, each behind a server."""
    context, pipes, members = multiprocessing.get_context("spawn"), [], []
    for architecture, name, seed in MEMBERS:
        pipe, other = context.Pipe()
        context.Process(target=serve, args=(architecture, name, seed, lock, is_alone, other), daemon=True).start()
        pipes.append(pipe)
    for pipe, (_, name, _) in zip(pipes, MEMBERS, strict=True):
        tokenizer = TOKENIZERS[name]()
        members.append((ServedModel(pipe.recv(), tokenizer=tokenizer, eos_token_id=tokenizer.eos_token_id), tokenizer))
    try:
        yield members
    finally:
        for pipe in pipes:
            pipe.send(None)


def main():
    prompts = [*PROMPTS, "a big cat sat"][:BATCH]
    context = multiprocessing.get_context("spawn")
    is_alone = context.Value("b", 0)
    print("B | seconds side by side | one after another | ratio | requests side by side, one after another")
    with served(context.Lock(), is_alone) as members:
        for branches in (1, 2, 3):
            ensemble = AdaFuseEnsemble(members, {"num_branches": branches})
            ensemble.texts(prompts, max_new_tokens=NEW_TOKENS)  # what the servers remember is no part of it
            seconds, counts = [], []
            for alone in (0, 1):
                is_alone.value = alone
                before = sum(member.api.traffic.num_requests for member, _ in members)
                start = time.perf_counter()
                ensemble.texts(prompts, max_new_tokens=NEW_TOKENS)
                seconds.append(time.perf_counter() - start)
                counts.append(sum(member.api.traffic.num_requests for member, _ in members) - before)
            is_alone.value = 0
            ratio, requests = seconds[0] / seconds[1], ", ".join(map(str, counts))
            print(f"{branches} | {seconds[0]:.2f} | {seconds[1]:.2f} | {ratio:.2f} | {requests}", flush=True)


if __name__ == "__main__":
    main()
