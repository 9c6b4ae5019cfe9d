"""Trains the demo's three members from scratch: `python -m hf_adafuse.lab.training.demo_members`.

Each member reads 100,000 lines once (AdamW, cosine rate, loss on the answers), in a process of its own. The
models in `demo/models/` are from that command: 12.4 minutes on 2 shared cores, 10.5 minutes of processor time in all,
4.8 MB of float16 weights. With torch 2.13 and transformers 5.23, the whole test set
(`hf-adafuse demo --questions 974`) gives

    method                  members  accuracy      words/round  passes/word
    member 1 alone          1        47.9 ± 1.6 %            -         1.35
    member 2 alone          2        44.5 ± 1.6 %            -         1.10
    member 3 alone          3        53.1 ± 1.6 %            -         1.33
    best answer afterwards  1+2      75.4 ± 1.4 %            -         3.67
    fixed 1-word rounds     1+2      73.9 ± 1.4 %         1.00         2.67
    fixed 2-word rounds     1+2      74.6 ± 1.4 %         1.74         2.63
    fixed 3-word rounds     1+2      74.8 ± 1.4 %         2.38         2.60
    paper, B=1              1+2      76.2 ± 1.4 %         1.78         2.27
    paper, B=3              1+2      79.0 ± 1.3 %         1.77         2.50
    paper, B=1              1+2+3    84.7 ± 1.2 %         1.91         3.03
    paper, B=3              1+2+3    85.8 ± 1.1 %         1.89         3.45

Question by question, the paper's rule with B = 3 and two members is 31.0 ± 1.7 points above member 1, 4.1 ± 1.0 above
the best fixed length and 2.8 ± 0.9 above B = 1. What B = 3 gains, it gains where both members half-know the answer
("torn": 119 questions, 36.1 ± 4.6 above B = 1). On the other 855 it is 1.9 ± 0.6 points below B = 1 and level with the
fixed lengths (-0.1 ± 0.8): what branching is worth depends on how often members half-know. Facts that both read once
stay unknown to the pair.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from ...demo import data
from . import tokenizers

_CONTEXT = 256
NUM_LINES = 100_000
_HEADS = {"num_attention_heads": 4, "max_position_embeddings": _CONTEXT}
_GATED = {"hidden_size": 128, "intermediate_size": 352, "num_key_value_heads": 4, "tie_word_embeddings": True} | _HEADS

Line = tuple[list[int], int]  # the ids of a line, and how many of them are the prompt's


@dataclass(frozen=True)
class Recipe:
    """
    How one member is made.

    Attributes:
        name (`str`): the name of its folder.
        tokenizer (`Callable`): trains its tokenizer on texts, for a size of the vocabulary.
        vocab_size (`int`): that size.
        config (`dict`): the fields of the model's config, and `model_type`.
        lr (`float`): the highest learning rate.
        batch_size (`int`): how many lines a step reads.
    """

    name: str
    tokenizer: Any
    vocab_size: int
    config: dict[str, Any]
    lr: float = 2e-3
    batch_size: int = 64


RECIPES = (
    Recipe("llama", tokenizers.byte_level_bpe, 1600, _GATED | {"model_type": "llama", "num_hidden_layers": 3}),
    Recipe(
        "gpt_neox",
        tokenizers.unigram,
        1900,
        {
            "model_type": "gpt_neox",
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
            "rotary_pct": 1.0,
        }
        | _HEADS,
    ),
    Recipe(
        "qwen3",
        tokenizers.byte_fallback_bpe,
        1200,
        _GATED | {"model_type": "qwen3", "head_dim": 32, "num_hidden_layers": 3},
    ),
)


def build_model(recipe: Recipe, tokenizer: Any) -> Any:
    """The member's model with random weights."""
    settings = dict(recipe.config)
    config = AutoConfig.for_model(
        settings.pop("model_type"),
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        **settings,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def encode(lines: list[tuple[str, str]], tokenizer: Any) -> list[Line]:
    """The ids of each line, which end with the end of sequence, and the length of its prompt."""
    prompts = tokenizer([prompt for prompt, _ in lines], return_attention_mask=False)["input_ids"]
    texts = tokenizer([f"{prompt} {answer}" for prompt, answer in lines], return_attention_mask=False)["input_ids"]
    encoded = []
    for prompt, ids in zip(prompts, texts, strict=True):
        if ids[: len(prompt)] != prompt:
            raise ValueError(
                f"The answer's tokens must not merge with the prompt's, but do in {tokenizer.decode(ids)!r}. Choose "
                "another tokenizer."
            )
        encoded.append(([*ids, tokenizer.eos_token_id], len(prompt)))
    return encoded


def batches(encoded: list[Line], size: int) -> list[list[Line]]:
    """Batches of `size` lines in the order in which they are read. Within each stretch of 20 batches lines of similar
    length are together."""
    result = []
    for start in range(0, len(encoded), 20 * size):
        stretch = sorted(encoded[start : start + 20 * size], key=lambda item: len(item[0]))
        cut = [stretch[i : i + size] for i in range(0, len(stretch), size)]
        order = torch.randperm(len(cut)).tolist()
        result += [cut[i] for i in order]
    return result


def answer_loss(model: Any, batch: list[Line], pad: int) -> torch.Tensor:
    """The mean NLL of the answers' tokens, in nats per token. `pad`: the id of the padding."""
    width = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in batch])
    hidden = model.base_model(input_ids=ids[:, :-1]).last_hidden_state
    at = torch.arange(1, width)
    starts = torch.tensor([start for _, start in batch])[:, None]
    ends = torch.tensor([len(ids) for ids, _ in batch])[:, None]
    is_answer = (at >= starts) & (at < ends)
    logits = model.get_output_embeddings()(hidden[is_answer])
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:][is_answer])


def train_member(index: int, folder: Path, num_lines: int) -> float:
    """
    Train member `index` on `num_lines` lines and save it below `folder`. Returns the processor time in seconds. One
    thread computes, so that the result does not depend on the number of cores.
    """
    torch.set_num_threads(1)
    torch.manual_seed(data.SEED + index)
    logging.disable_progress_bar()
    recipe = RECIPES[index]
    lines = data.training_lines(index, num_lines)
    texts = (f"{prompt} {answer}" for prompt, answer in lines[:20_000])
    tokenizer = tokenizers.wrap(recipe.tokenizer(texts, recipe.vocab_size), _CONTEXT)
    model = build_model(recipe, tokenizer).train()
    steps = batches(encode(lines, tokenizer), recipe.batch_size)
    fit(model, recipe, index, steps, len(steps), lambda batch: answer_loss(model, batch, tokenizer.pad_token_id))
    save(model.eval(), tokenizer, folder / recipe.name)
    return time.process_time()


def fit(
    model: Any, recipe: Recipe, index: int, steps: Iterable[Any], num_steps: int, loss_of: Callable[[Any], torch.Tensor]
) -> None:
    """Train on each batch of `steps`, and show how far member `index` has come. `loss_of`: the loss on a batch."""
    optimizer, schedule = optimizer_and_schedule(model, recipe, num_steps)
    title = f"{recipe.name} ({model.num_parameters() / 1e6:.2f} M)"
    bar = tqdm(steps, f"{title:18}", num_steps, position=index, mininterval=1.0)
    mean = None
    for batch in bar:
        loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        bar.set_postfix(loss=f"{mean:.3f}", refresh=False)


def optimizer_and_schedule(model: Any, recipe: Recipe, num_steps: int) -> tuple[Any, Any]:
    """AdamW, and a schedule of its learning rate, which rises over the first 3 % of the steps and then falls as a
    cosine to 3 % of its highest value."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.98), fused=True)

    def rate(step: int) -> float:
        done = step / num_steps
        return min(done / 0.03, 1.0) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * done)))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the folder that `from_pretrained` loads, with the weights in float16."""
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def in_processes(jobs: list[tuple[Any, ...]]) -> None:
    """Run each job in a process of its own, and say how long all took. A job is a function, which returns its processor
    time in seconds, and its arguments."""
    begun = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    tqdm.set_lock(context.RLock())
    with ProcessPoolExecutor(len(jobs), context, tqdm.set_lock, (tqdm.get_lock(),)) as pool:
        busy = sum(done.result() for done in [pool.submit(*job) for job in jobs])
    minutes = (time.perf_counter() - begun) / 60
    sys.stderr.write(f"\nTrained in {minutes:.1f} minutes, with {busy / 60:.1f} minutes of processor time.\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train the demo's three members from scratch.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, default=Path("demo_models"), help="where to save")
    parser.add_argument("--members", type=int, nargs="+", choices=[0, 1, 2], default=[0, 1, 2], help="which")
    parser.add_argument("--lines", type=int, default=NUM_LINES, help="how many lines each member reads")
    args = parser.parse_args()
    if args.lines < 1000:
        parser.error(f"`--lines` must be at least 1000, but is {args.lines}. Read more.")
    args.folder.mkdir(parents=True, exist_ok=True)
    # Each once: two processes must not write one folder.
    in_processes([(train_member, index, args.folder, args.lines) for index in dict.fromkeys(args.members)])
    sys.stderr.write(f"Saved in {args.folder}: see what they do with `hf-adafuse demo --folder {args.folder}`.\n")


if __name__ == "__main__":
    main()
