"""From a plan to an output: makes the members, has them read the prompts, decodes. Checks nothing of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from ..decoding.decoder import Decoder
from ..decoding.progress import Prompt
from ..decoding.strategies.registry import make_strategy
from ..decoding.strategies.strategy import Strategy
from ..members.member import Member
from ..members.readings import draw_token
from ..outputs import AdaFuseOutput
from ..trees.self_test import BACKENDS
from ..trees.shared_prefix import prefix_caching
from .output import make_output, pad_right, rounds_of
from .plan import CallPlan, MemberPlan
from .sampling import Warper, random_streams


def run_call(plan: CallPlan) -> AdaFuseOutput | torch.Tensor:
    """
    Decode the prompts of a plan.

    Raises:
        AdaFuseDecodingError: a member failed; carries the text committed so far.
    """
    call = plan.call
    rows = zip(plan.inputs.padded, plan.inputs.going_on, strict=True)
    prompts = [Prompt(index, list(ids), goes_on=is_same) for index, (ids, is_same) in enumerate(rows)]
    members = [_make_member(member) for member in plan.members]
    try:
        num_top = max(2, plan.config.num_branches)
        for member, planned in zip(members, plan.members, strict=True):
            weights = plan.config.model_weights
            weighting = weights if isinstance(weights, str) else None
            member.start(planned.prompts, planned.processors, num_top, planned.cache, weighting, planned.can_share)
        # Prompts that are read later need not read again what all begin with.
        has_later = plan.max_batch_size is not None and plan.max_batch_size < len(prompts)
        with prefix_caching() if has_later else nullcontext():
            _make_decoder(plan, members, prompts).run()
    finally:
        if call.streamer is not None:
            call.streamer.end()  # also after an error: who waits for the text gets what there is
    sequences = pad_right([prompt.ids for prompt in prompts], call.generation_config, call.input_ids)
    return make_output(sequences, plan, members, prompts) if call.returns_dict else sequences


def _make_decoder(plan: CallPlan, members: list[Member], prompts: list[Prompt]) -> Decoder:
    call = plan.call
    return Decoder(
        members=members,
        prompts=prompts,
        config=plan.config,
        strategies=_strategies(plan),
        should_stop=plan.stop_check,
        on_commit=_streaming(call.streamer),
        max_length=call.generation_config.max_length,
        keep_logits=plan.keeps_logits,
        keep_cache=call.returns_cache,
        prompt_nlls=[member.prompt_nlls for member in members] if isinstance(plan.config.model_weights, str) else [],
        is_strict=plan.has_grammar,
        max_batch_size=plan.max_batch_size,
        on_answer=_telling(plan, prompts),
        **_sampling(plan),
    )


def _telling(plan: CallPlan, prompts: list[Prompt]) -> Callable[[int], None] | None:
    """Tells the caller the rounds of a prompt that is finished, where the caller wants to be told."""
    on_answer = plan.on_answer
    return None if on_answer is None else lambda index: on_answer(index, rounds_of(prompts[index], plan))


def _strategies(plan: CallPlan) -> list[Strategy]:
    """The method of each prompt, told what the prompt says."""
    main, made = plan.members[0].participant, []
    for ids in plan.inputs.prompts:
        strategy = make_strategy(plan.config)
        strategy.prompt_text = main.vocabulary.prompt_text(ids)
        strategy.prepare(main.device)
        made.append(strategy)
    return made


def _make_member(plan: MemberPlan) -> Member:
    participant = plan.participant
    max_length, limit = participant.context(plan.prompts)
    return Member(
        name=participant.name,
        model=participant.model,
        vocabulary=participant.vocabulary,
        eos_ids=plan.eos_ids,
        max_length=max_length,
        limit=limit,
        device=participant.device,
        backend=BACKENDS[plan.backend](participant.model, participant.device),
    )


def _sampling(plan: CallPlan) -> dict[str, Any]:
    """What the decoder needs to sample words."""
    if plan.warpers is None:
        return {}
    return {
        "draws": [_draw(warper) for warper in plan.warpers],
        "streams": random_streams(plan.inputs.prompts),
        "is_greedy": all(warper.is_greedy for warper in plan.warpers),
    }


def _draw(warper: Warper) -> Callable[..., int]:
    def draw(node: Any, numbers: Iterator[float], allow: Any) -> int:
        return draw_token(node.reading, None if warper.is_greedy else warper, numbers, allow)

    return draw


def _streaming(streamer: Any) -> Callable[[list[int]], None]:
    if streamer is None:
        return lambda ids: None
    return lambda ids: streamer.put(torch.tensor(ids))
