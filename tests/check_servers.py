"""Members behind a real server beside the same members here. Run by hand; nothing of it is collected by pytest.

    python tests/check_servers.py --url http://localhost:8000 --model FOLDER --other FOLDER --data QUESTIONS.jsonl

FOLDER: of the model that is served, and of another one. The server must run in float32 for texts to be equal (vLLM:
`vllm serve FOLDER --dtype float32`). Three arrangements, each against all members here: the served model as assistant,
as main model, and as both. Prints how many texts are equal, and of those that are not by how little the round in which
they part was decided; requests per round; seconds; what share of the sent tokens the server had read before (vLLM).
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import itertools
import json
import re
import time

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_adafuse import AdaFuseEnsemble, ServedModel


def prompts_of(path, count, shots):
    """Questions, each after so many worked examples: what they share is what a server's cache is for."""
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line, _ in zip(file, range(count + shots), strict=False)]
    worked = "".join(f"Question: {one['question']}\nAnswer: {answer_of(one)}\n\n" for one in lines[:shots])
    return [f"{worked}Question: {one['question']}\nAnswer:" for one in lines[shots:]]


def answer_of(line):
    answer = line["answer"]
    return answer[0] if isinstance(answer, list) else answer


def run(ensemble, prompts, batch, **settings):
    start, rounds, stats = time.perf_counter(), [], []
    for first in range(0, len(prompts), batch):
        output = ensemble.generate(prompts[first : first + batch], return_dict_in_generate=True, **settings)
        rounds += list(output.rounds)
        stats.append(output.stats["members"])
    return rounds, time.perf_counter() - start, stats


def decided_by(rounds, others):
    """Nats between the best two candidates of the first round that differs."""
    for one, other in zip(rounds, others, strict=False):
        if one.text != other.text:
            scores = sorted(candidate.score for candidate in one.candidates)
            margins = [value for of_member in one.margins for value in of_member]
            gaps = [b - a for a, b in itertools.pairwise(scores)]
            return min([*gaps[:1], *(abs(m - 0.7) for m in margins), *margins])
    return float("nan")


def cache_counters(url):
    """Tokens looked up in vLLM's prefix cache, and found there."""
    try:
        text = httpx.get(f"{url}/metrics", timeout=10).text
    except httpx.HTTPError:
        return 0.0, 0.0
    lines = [rf"^vllm:prefix_cache_{name}_total\{{.*\}} (\S+)" for name in ("queries", "hits")]
    found = [re.search(line, text, re.MULTILINE) for line in lines]
    return tuple(float(one.group(1)) if one else 0.0 for one in found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", default="vllm")
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--other", required=True)
    parser.add_argument("--data", required=True, help="JSONL with a question in each line")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--shots", type=int, default=0)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--settings", default="1x1,1x8,3x1,3x8", help="branches x batch")
    args = parser.parse_args()
    tokenizer, other_tokenizer = (AutoTokenizer.from_pretrained(name) for name in (args.model, args.other))
    names = (args.model, args.other)
    here, other = (AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval() for name in names)
    served = ServedModel(args.url, args.kind, tokenizer=tokenizer, num_steps=args.steps)
    small, large = (here, tokenizer), (other, other_tokenizer)
    away = (served, tokenizer)
    arrangements = {"assistant served": ([large, small], [large, away]), "main served": ([small, large], [away, large]),
                    "both served": ([small, small], [away, away])}  # fmt: skip
    print("arrangement | B | batch | equal | parted, decided by | requests/round | seconds here, served | cached")
    for setting in args.settings.split(","):
        branches, batch = map(int, setting.split("x"))
        for name, (all_here, with_served) in arrangements.items():
            prompts = prompts_of(args.data, args.prompts, args.shots)
            config = {"num_branches": branches}
            limits = {"max_new_tokens": args.new_tokens, "do_sample": False}
            expected, seconds, _ = run(AdaFuseEnsemble(all_here, config), prompts, batch, **limits)
            before = cache_counters(args.url)
            found, other_seconds, stats = run(AdaFuseEnsemble(with_served, config), prompts, batch, **limits)
            looked_up, hits = (b - a for a, b in zip(before, cache_counters(args.url), strict=True))
            texts, others = ([[one.text for one in of_prompt] for of_prompt in every] for every in (expected, found))
            pairs = list(zip(expected, found, texts, others, strict=True))
            parted = [decided_by(a, b) for a, b, one, two in pairs if one != two]
            requests = sum(m["forward_passes"] for of_batch in stats for m in of_batch if "://" in m["name"])
            if name != "assistant served":
                requests += sum(of_batch[0]["forward_passes"] for of_batch in stats)
            num_rounds = sum(map(len, found))
            equal, why = f"{len(pairs) - len(parted)} of {len(pairs)}", ", ".join(f"{value:.1e}" for value in parted)
            cached = hits / looked_up if looked_up else float("nan")
            print(
                f"{name} | {branches} | {batch} | {equal} | {why or '-'} | {requests / num_rounds:.2f} | "
                f"{seconds:.0f}, {other_seconds:.0f} | {cached:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
