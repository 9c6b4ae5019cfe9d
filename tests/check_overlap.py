"""How much of the time of two servers passes side by side. Run by hand, on a quiet machine; pytest collects none of it.

    python tests/check_overlap.py

Two stand-ins for vLLM, each of which sleeps 50 ms in every request beside the real work of a tiny model, answer for
both members of an ensemble, for batches of 8 prompts. Prints the seconds that calls take over those of their requests
one after another (1: nothing overlaps).
"""

# ruff: noqa: T201
from __future__ import annotations

import threading
import time

from cases import PROMPTS
from stand_in import StandIn, serving
from tiny import TOKENIZERS, tiny_model

from hf_adafuse import AdaFuseEnsemble, ServedModel

SECONDS = 0.05


class Timed(StandIn):
    """Adds up how long its requests take."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.busy, self.count, self._adding = 0.0, 0, threading.Lock()

    def answer(self, path, body, headers):
        start = time.perf_counter()
        try:
            return super().answer(path, body, headers)
        finally:
            with self._adding:
                self.busy += time.perf_counter() - start
                self.count += 1


def main():
    prompts = [*PROMPTS, "a big cat sat"]
    pairs = [(tiny_model("llama", "sentencepiece", 0), TOKENIZERS["sentencepiece"]()),
             (tiny_model("gpt_neox", "byte_level", 1), TOKENIZERS["byte_level"]())]  # fmt: skip
    stand_ins = [Timed(*pair, seconds=SECONDS) for pair in pairs]
    with serving(stand_ins[0]) as first, serving(stand_ins[1]) as second:
        members = [
            (ServedModel(url, tokenizer=pair[1], eos_token_id=pair[1].eos_token_id), pair[1])
            for url, pair in zip((first, second), pairs, strict=True)
        ]
        print("B | seconds | of requests one after another | ratio | requests of each")
        for branches in (1, 2, 3):
            ensemble = AdaFuseEnsemble(members, {"num_branches": branches})
            for one in stand_ins:
                one.busy, one.count = 0.0, 0
            start = time.perf_counter()
            ensemble.texts(prompts, max_new_tokens=24)
            seconds, busy = time.perf_counter() - start, sum(one.busy for one in stand_ins)
            counts = ", ".join(str(one.count) for one in stand_ins)
            print(f"{branches} | {seconds:.2f} | {busy:.2f} | {seconds / busy:.2f} | {counts}", flush=True)


if __name__ == "__main__":
    main()
