"""How much of the time of two servers passes side by side. Run by hand, on a quiet machine; pytest collects none of it.

    python tests/check_overlap.py

Two stand-ins for vLLM, each of which sleeps 50 ms in every request beside the real work of a tiny model, answer for
both members of an ensemble, for batches of 8 prompts. Prints the seconds that calls take over those in which the first
server was busy and those in which the second was (1: they were never busy at the same time, nor was anything done
beside).
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
    """Adds up the seconds in which it has a request."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.busy, self.count, self._inside, self._since = 0.0, 0, 0, 0.0
        self._counting = threading.Lock()

    def answer(self, path, body, headers):
        with self._counting:
            self._since = time.perf_counter() if self._inside == 0 else self._since
            self._inside += 1
        try:
            return super().answer(path, body, headers)
        finally:
            with self._counting:
                self._inside -= 1
                self.count += 1
                self.busy += time.perf_counter() - self._since if self._inside == 0 else 0.0


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
        print("B | seconds | busy, one after another | ratio | requests of each")
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
