"""Trains the benchmark's pair from scratch: `python -m hf_adafuse.lab.training.bench_pair`.

Each member reads 2.6 million tokens once (AdamW, cosine rate, loss on every token), in a process of its own. The pair
in `lab/benchmarks/models/` is from that command: 15.6 minutes of processor time in all, 3.3 MB of float16 weights. With
torch 2.13 and transformers 5.23, `hf-adafuse bench --parameters 4M --prompt-tokens 20,500,2000 --batch 1 --texts 3
--against greedy` (enlarged members write what the pair writes) gives, over its nine prompts,

          words/round  spans proposed by both  by one  uncertain word starts
    B=1   2.23         45 %                    55 %    30 %
    B=3   2.33         64 %                    36 %    29 %

The last column is the share of the `margins` below 0.7 in the rounds of the same prompts, which the command does not
print.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from ..benchmarks import prose
from . import demo_members as members
from . import tokenizers

_CONTEXT = 4096
_DOCUMENT_CHARS = 10_500  # the length of a document, which has more tokens than the longest window
_NUM_TOKENIZED = 100  # the number of documents that a tokenizer is trained on
RECIPES = tuple(
    replace(recipe, config=recipe.config | {"max_position_embeddings": _CONTEXT}, lr=3e-3)
    for recipe in members.RECIPES[:2]
)


class Phase(NamedTuple):
    """A stretch of training."""

    num_steps: int
    batch_size: int  # windows in a step
    num_tokens: int  # tokens in a window


# Most is learned on short windows, where attention is cheap. Then some steps follow at the distances of a long prompt.
PHASES = (Phase(1400, 4, 256), *[Phase(80, 4, 256), Phase(14, 1, 2304)] * 10)


def windows(texts: Iterator[str], tokenizer: Any, num_tokens: int) -> Iterator[list[int]]:
    """Yields windows of `num_tokens` ids. Each text is cut into whole windows from its beginning on."""
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        for start in range(0, len(ids) - num_tokens + 1, num_tokens):
            yield ids[start : start + num_tokens]


def batches(texts: Iterator[str], tokenizer: Any, phases: tuple[Phase, ...]) -> Iterator[torch.Tensor]:
    """Yields the ids of each step, of shape `(batch_size, num_tokens)`."""
    for phase in phases:
        # Windows of one document are alike, so those of many documents are shuffled.
        found = windows(texts, tokenizer, phase.num_tokens)
        ids = torch.tensor([next(found) for _ in range(phase.num_steps * phase.batch_size)])
        yield from ids[torch.randperm(len(ids))].view(phase.num_steps, phase.batch_size, phase.num_tokens)


def train_member(index: int, folder: Path, phases: tuple[Phase, ...]) -> float:
    """
    Train member `index` and save it below `folder`. Returns the processor time in seconds. One thread computes, so that
    the result does not depend on the number of cores.
    """
    torch.set_num_threads(1)
    torch.manual_seed(prose.SEED + index)
    logging.disable_progress_bar()
    recipe = RECIPES[index]
    texts = prose.training_documents(index, _DOCUMENT_CHARS)
    learned = (next(texts) for _ in range(_NUM_TOKENIZED))
    tokenizer = tokenizers.wrap(recipe.tokenizer(learned, recipe.vocab_size), _CONTEXT)
    model = members.build_model(recipe, tokenizer).train()
    num_steps = sum(phase.num_steps for phase in phases)
    steps = batches(texts, tokenizer, phases)
    members.fit(model, recipe, index, steps, num_steps, lambda ids: model(input_ids=ids, labels=ids).loss)
    members.save(model.eval(), tokenizer, folder / recipe.name)
    return time.process_time()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train the benchmark's pair from scratch.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=Path("benchmark_models"), help="where to save")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    members.in_processes([(train_member, index, args.output, PHASES) for index in range(len(RECIPES))])
    sys.stderr.write(f"Saved in {args.output}.\n")


if __name__ == "__main__":
    main()
