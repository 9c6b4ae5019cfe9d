"""What whole-answer methods cost beside their members: prints one line per method.

Run by hand, on a quiet machine; pytest does not collect it:

    PYTHONPATH=. python tests/measure_answers.py A B C --data triviaqa_dev.jsonl --methods rerank,peer-review

The members' own: each one's `generate()` over the same batch, then plain forward passes that score every answer behind
the keys and values of the prompts, which `generate()` has left: for each member one pass per answer of a prompt, over
the whole batch. For `peer-review` also a pass over what the rating prompts of a question begin with, and one over the
rest for each order of the answers and each answer that is rated. Both are run in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_adafuse import AdaFuseEnsemble
from hf_adafuse.members.rating_prompts import RatingPrompts, Rubric, orders_of, question_of
from hf_adafuse.members.vocabulary import vocabulary_of
from hf_adafuse.transformers_compat import CACHE_NAME


def read_prompts(file, number, shots):
    """Few-shot prompts in the form of `hf-adafuse eval`: the first lines are the examples."""
    rows = [json.loads(line) for line in Path(file).read_text("utf-8").splitlines()]
    answers = [row["answer"] if isinstance(row["answer"], str) else row["answer"][0] for row in rows]
    asked = [f"Question: {row['question']}\nAnswer:" for row in rows]
    head = "".join(f"{ask} {answer}\n\n" for ask, answer in zip(asked[:shots], answers, strict=False))
    return [head + ask for ask in asked[shots : shots + number]]


def padded(rows, left):
    width = max(map(len, rows))
    fill = [[0] * (width - len(row)) for row in rows]
    pairs = list(zip(rows, fill, strict=True))
    ids = torch.tensor([pad + row if left else row + pad for row, pad in pairs])
    mask = torch.tensor([[0] * len(pad) + [1] * len(row) if left else [1] * len(row) + [0] * len(pad)
                         for row, pad in pairs])  # fmt: skip
    return ids, mask


class Alone:
    """One member without the package."""

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer, self.vocabulary = model, tokenizer, vocabulary_of(tokenizer)
        self.form = RatingPrompts(tokenizer, self.vocabulary, Rubric())
        self.passes = 0

    @contextlib.contextmanager
    def counted(self):
        """Passes are counted. The hook goes away again: models with hooks are not run by the package's kernel."""
        hook = self.model.register_forward_pre_hook(lambda *_: setattr(self, "passes", self.passes + 1))
        try:
            yield
        finally:
            hook.remove()

    def answers(self, prompts, max_new_tokens):
        ids, self.mask = padded([self.tokenizer(prompt).input_ids for prompt in prompts], left=True)
        output = self.model.generate(
            input_ids=ids, attention_mask=self.mask, max_new_tokens=max_new_tokens, do_sample=False,
            stop_strings=["\n"], tokenizer=self.tokenizer, return_dict_in_generate=True, pad_token_id=0,
        )  # fmt: skip
        self.cache, self.last = getattr(output, CACHE_NAME), ids[:, -1:]
        rows = output.sequences[:, ids.shape[1] :].tolist()
        texts = [self.tokenizer.decode(row, skip_special_tokens=True) for row in rows]
        return [text.partition("\n")[0] + "\n" * ("\n" in text) for text in texts]

    def behind(self, cache, mask, rows):
        """The logits after each token of these rows behind a cache, which stays as it is."""
        start = mask.shape[1]
        ids, own = padded(rows, left=False)
        whole = torch.cat([mask, own], dim=1)
        positions = (whole.cumsum(-1) - 1).clamp(min=0)[:, start:]
        logits = self.model(ids, attention_mask=whole, position_ids=positions, **{CACHE_NAME: cache}).logits
        cache.crop(-ids.shape[1])
        return ids, logits

    @torch.no_grad()
    def score(self, answers):
        """The log-probability of each answer, of which `answers` has those of one writer per prompt."""
        num_read = self.cache.get_seq_length() - (self.mask.shape[1] - 1)
        if num_read:
            self.cache.crop(-num_read)
        rows = [[int(last), *self.vocabulary.encode(text).ids] for last, text in zip(self.last, answers, strict=True)]
        ids, logits = self.behind(self.cache, self.mask[:, :-1], rows)
        values = logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        return [sum(of_row[: len(row) - 1]) for of_row, row in zip(values.tolist(), rows, strict=True)]

    @torch.no_grad()
    def rate(self, questions, answers):
        """The probabilities of the digits for each answer in each order."""
        ids, mask = padded([self.form.prefix(question) for question in questions], left=True)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = getattr(self.model(ids, attention_mask=mask, position_ids=positions, logits_to_keep=1), CACHE_NAME)
        digits = [ids[0] for of_score in self.form.replies for ids in of_score]
        for order in orders_of(len(answers)):
            for place in range(len(order)):
                shown = [[answers[k][row].strip() for k in order] for row in range(len(questions))]
                rows = [self.form.suffix(texts, place) for texts in shown]
                _, logits = self.behind(cache, mask, rows)
                for row, of_row in enumerate(logits):
                    of_row[len(rows[row]) - 1].float().softmax(-1)[digits].tolist()


def own(members, prompts, questions, method, max_new_tokens):
    with contextlib.ExitStack() as stack:
        for member in members:
            member.passes = 0
            stack.enter_context(member.counted())
        answers = [member.answers(prompts, max_new_tokens) for member in members]
        for member in members:
            for of_writer in answers:
                member.score(of_writer)
        if method == "peer-review":
            for member in members:
                member.rate(questions, answers)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+")
    parser.add_argument("--data", required=True)
    parser.add_argument("--methods", default="rerank,majority,select,peer-review")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--shots", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--no-warm-up", dest="warm_up", action="store_false", help="where the first run is long enough")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    loaded = [
        (AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval(), AutoTokenizer.from_pretrained(name))
        for name in args.models
    ]
    members = [Alone(*one) for one in loaded]
    ensemble = AdaFuseEnsemble(loaded)
    prompts = read_prompts(args.data, args.questions, args.shots)
    main_vocabulary = members[0].vocabulary
    questions = [question_of(loaded[0][1], main_vocabulary, prompt) for prompt in prompts]
    settings = dict(max_new_tokens=args.max_new_tokens, stop_strings=["\n"], do_sample=False)

    def run(name, method):
        if name == "own":
            own(members, prompts, questions, method, args.max_new_tokens)
            return None
        return ensemble.output(prompts, adafuse_config={"method": method}, **settings)

    for method in args.methods.split(","):
        clocks = {"wall": time.perf_counter, "processor": time.process_time}
        ratios, seconds = {clock: [] for clock in clocks}, []
        if args.warm_up:  # of all prompts: the kernel tries its ways for products of as many rows
            for name in ("own", "ours"):
                run(name, method)
        for _ in range(args.repeats):
            spent = {}
            for name in ("own", "ours"):
                start = {clock: read() for clock, read in clocks.items()}
                output = run(name, method)
                spent[name] = {clock: read() - start[clock] for clock, read in clocks.items()}
            seconds.append(spent["own"]["wall"])
            for clock, found in ratios.items():
                found.append(spent["ours"][clock] / spent["own"][clock])
        ours = [one["forward_passes"] for one in output.stats["members"]]
        shown = ", ".join(
            f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f}) by the {clock} clock"
            for clock, found in ratios.items()
        )
        sys.stdout.write(
            f"{method}: {shown}, of the members' own {statistics.median(seconds):.1f} s; passes {ours} / "
            f"{[member.passes for member in members]}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
