"""The peak memory of an ensemble beside that of its members' own `generate()`, each in a process of its own.

Run by hand; pytest does not collect it:

    PYTHONPATH=. python tests/measure_memory.py A B --data triviaqa_dev.jsonl --dtype bfloat16 --method adafuse

Prints mebibytes (MiB): the resident memory with the members loaded and one token generated, the keys and values of all
tokens at the end, and the peak over both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

MIB = 2**20


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+")
    parser.add_argument("--data", required=True, help="a JSONL file of questions, of which the prompts are made")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--method", default="own,adafuse", help="names of methods; own: the members one after the other"
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=900)
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--here", action="store_true", help="in this process; what is called for each method")
    args = parser.parse_args()
    if args.here:
        measure(args)
        return
    for method in args.method.split(","):
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--method", method, "--here"], check=True)


def measure(args):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_adafuse import AdaFuseEnsemble
    from hf_adafuse.lab.benchmarks.instruments import kv_bytes, peak_memory, reset_peak_memory

    dtype, device = getattr(torch, args.dtype), torch.device("cpu")
    members = [
        (AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval(), AutoTokenizer.from_pretrained(name))
        for name in args.models
    ]
    lines = [json.loads(line)["question"] for line in Path(args.data).read_text("utf-8").splitlines()]
    texts = [" ".join(lines[row :: args.batch]) for row in range(args.batch)]
    cut = [members[0][1](text, add_special_tokens=False).input_ids[: args.prompt_tokens] for text in texts]
    prompts = [members[0][1].decode(ids) for ids in cut]
    ensemble = AdaFuseEnsemble(members)

    def run(prompts, num_new):
        length = dict(max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False)
        if args.method != "own":
            ensemble.output(prompts, adafuse_config={"method": args.method}, **length)
            return
        for model, tokenizer in members:
            tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
            model.generate(**tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left"), **length)

    run([prompt[:40] for prompt in prompts[:1]], 1)
    reset_peak_memory(device)
    before = peak_memory(device)
    run(prompts, args.new_tokens)
    widths = [max(map(len, tokenizer(prompts).input_ids)) for _, tokenizer in members]
    caches = [
        args.batch * kv_bytes(model, width + args.new_tokens) for (model, _), width in zip(members, widths, strict=True)
    ]
    # One after the other, the members hold one cache at a time.
    held = max(caches) if args.method == "own" else sum(caches)
    peak = peak_memory(device)
    sys.stdout.write(
        f"{args.method} {args.dtype}: loaded {before / MIB:.0f}, caches {held / MIB:.0f}, peak {peak / MIB:.0f}, over "
        f"both {(peak - before - held) / MIB:.0f}\n"
    )


if __name__ == "__main__":
    main()
