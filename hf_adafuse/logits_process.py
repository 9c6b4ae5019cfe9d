"""Branch forcing for an ordinary `generate()`: which token a row begins with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor

from .members.node_logprobs import best_tokens


def _is_count(value: Any) -> bool:
    """Whether `value` is an integer of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_prompt_length(prompt_length: int) -> int:
    """`prompt_length`, or a `ValueError` that says where to take it from."""
    if not _is_count(prompt_length):
        raise ValueError(
            f"`prompt_length` must be an integer of at least 0, but is {prompt_length!r}. Use the width of the ids "
            "given to generate(), padding included: `input_ids.shape[1]`."
        )
    return prompt_length


class BranchLogitsProcessor(LogitsProcessor):
    r"""
    [`LogitsProcessor`] that makes each row begin with the token of one rank: the branches of an uncertain word
    (AdaFuse, arXiv 2601.06022, section 3.3), one per row of the batch.

    At the first new token, row i may only take its `branches[i]`-th most likely token; later tokens are left alone, so
    that greedy search extends every branch by itself. Equal scores rank in the order of their ids. Where fewer tokens
    than that are possible (the others are forbidden, at minus infinity), the least likely possible one is taken. With
    the scores `[0.1, 2.0, -inf, 2.0]`:

    - branch 0 takes token 1
    - branch 1 takes token 3 (as likely as token 1, but a higher id)
    - branch 2 takes token 0
    - branch 3 takes token 0 too: token 2 is forbidden

    It says what a branch is, not which branch is best: pass it last, after the processors that change scores. It is for
    greedy search or sampling; with beams the rows of a batch are not those of `branches`.

    Args:
        prompt_length (`int`):
            Tokens in each row before the first new one, padding included: `input_ids.shape[1]`.
        branches (`list[int]`):
            Per row of the batch, the rank of its first new token; 0 is the most likely one.

    Raises:
        ValueError: `prompt_length` or a branch is not an integer of at least 0, or, when called, the batch does not
            have one row per branch.

    Examples:

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from hf_adafuse import BranchLogitsProcessor

    >>> tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B-Base")
    >>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B-Base")
    >>> inputs = tokenizer(["The capital of France"] * 3, return_tensors="pt")
    >>> prompt_length = inputs.input_ids.shape[1]

    >>> # three continuations that differ from their first token on
    >>> branches = BranchLogitsProcessor(prompt_length, [0, 1, 2])
    >>> ids = model.generate(**inputs, logits_processor=[branches], do_sample=False, max_new_tokens=5)
    >>> texts = tokenizer.batch_decode(ids[:, prompt_length:])
    ```
    """

    supports_continuous_batching = False  # `branches` names the rows of one batch
    is_function_of_ids = True

    def __init__(self, prompt_length: int, branches: Sequence[int]) -> None:
        self.prompt_length = check_prompt_length(prompt_length)
        self.branches = tuple(branches)
        if not all(_is_count(branch) for branch in self.branches):
            raise ValueError(
                f"`branches` must be integers of at least 0, but is {list(self.branches)!r}. Use 0 for the most likely "
                "token."
            )

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`): the prompts and what came after.
            scores (`torch.FloatTensor` of shape `(batch_size, vocab_size)`): logits or log-probabilities; not changed.

        Returns:
            `torch.FloatTensor` of shape `(batch_size, vocab_size)`: at the first new token, minus infinity but for one
            token per row, which keeps its score; at any other, `scores`.
        """
        if input_ids.shape[1] != self.prompt_length:
            return scores
        if len(self.branches) != scores.shape[0]:
            raise ValueError(
                f"`branches` must be one per row of the batch, but is {len(self.branches)} for {scores.shape[0]} rows. "
                "Repeat each prompt once per branch."
            )
        values, ids = best_tokens(scores, max(self.branches, default=0) + 1)  # (batch_size, num_branches)
        num_possible = (values > -math.inf).sum(dim=-1).clamp(min=1)
        ranks = torch.minimum(torch.tensor(self.branches, device=scores.device), num_possible - 1)
        chosen = ids.gather(1, ranks[:, None])  # (batch_size, 1)
        forced = torch.full_like(scores, -math.inf)
        return forced.scatter(1, chosen, scores.gather(1, chosen))
