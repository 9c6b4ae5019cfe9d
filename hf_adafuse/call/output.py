"""Makes what `generate()` returns: the sequences, or an [`AdaFuseOutput`] with rounds, stats and cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..decoding.progress import Prompt
from ..decoding.strategies.registry import make_strategy
from ..members.member import Member
from ..outputs import AdaFuseOutput, count_words
from ..rounds.round_lists import AdaFuseRounds, AdaFuseRoundsBatch
from ..transformers_compat import CACHE_NAME, prepared_pad_id
from .continuation import final_cache
from .plan import CallPlan


def pad_right(rows: list[list[int]], generation_config: Any, like: torch.Tensor) -> torch.Tensor:
    """Rows of ids as one tensor of the dtype and device of `like`."""
    filler = prepared_pad_id(generation_config) or 0
    width = max(map(len, rows))
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows], dtype=like.dtype, device=like.device)


def finished_rounds(prompt: Prompt, plan: CallPlan) -> AdaFuseRounds:
    """The rounds of a prompt that is finished."""
    settings = plan.config
    branches = "margin_threshold" in make_strategy(settings).uses
    has_margins = branches and settings.commitment == "adaptive" and plan.warpers is None
    threshold = settings.margin_threshold if has_margins else None
    names = [member.handle.shown_name for member in plan.members]
    return AdaFuseRounds(prompt.rounds, names, threshold, prompt.finish_reason)


def make_output(
    sequences: torch.Tensor, plan: CallPlan, members: list[Member], prompts: list[Prompt], raters: Sequence[Member] = ()
) -> AdaFuseOutput:
    """The output with `return_dict_in_generate=True`. Where members rate, `raters` are the members as such."""
    config = plan.call.generation_config
    of_prompts = [finished_rounds(prompt, plan) for prompt in prompts]
    rounds = AdaFuseRoundsBatch(of_prompts, of_prompts[0].names, of_prompts[0].threshold)
    of_method = make_strategy(plan.config).counts([one for of_prompt in rounds for one in of_prompt])
    new_tokens = sequences.shape[1] - plan.call.input_ids.shape[1]
    return AdaFuseOutput(
        sequences=sequences,
        scores=_stack([prompt.scores for prompt in prompts], new_tokens) if config.output_scores else None,
        logits=_stack([prompt.logits for prompt in prompts], new_tokens) if config.output_logits else None,
        rounds=rounds,
        stats={**count_words(rounds), **of_method, "members": _stats(members, raters)},
        confidence=[of_prompt.confidence for of_prompt in rounds],
        # A cache does not know its images: a later call could take their tokens for words.
        **{CACHE_NAME: final_cache(sequences, members, prompts) if plan.returns_cache else None},
    )


def _stats(members: Sequence[Member], raters: Sequence[Member]) -> list[dict[str, Any]]:
    """Per member; what it has read to rate answers counts too."""
    backends = [[member.backend] for member in members]
    for of_member, rater in zip(backends, raters, strict=False):
        of_member.append(rater.backend)
    return [
        {
            "name": member.name,
            "forward_passes": sum(backend.num_forwards for backend in of_member),
            "tokens_run": sum(backend.num_tokens for backend in of_member),
            "proposals": member.num_proposals,
            "wins": member.num_wins,
        }
        for member, of_member in zip(members, backends, strict=True)
    ]


def _stack(rows: list[list[torch.Tensor]], num_steps: int) -> tuple[torch.Tensor, ...] | None:
    """One `(batch_size, vocab_size)` per new token; zeros where a prompt had finished."""
    if num_steps == 0:
        return None
    blank = torch.zeros_like(next(row[0] for row in rows if row))
    return tuple(torch.stack([row[step] if step < len(row) else blank for row in rows]) for step in range(num_steps))
