"""From a plan to an output: makes the members, has them read the prompts, decodes. Checks nothing of the inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..decoding.decoder import Decoder
from ..decoding.progress import AdaFuseDecodingError, Prompt
from ..members.member import Member, MemberError
from ..outputs import AdaFuseOutput
from ..trees.self_test import BACKENDS
from .output import make_output, pad_right
from .plan import CallPlan, MemberPlan


def run_call(plan: CallPlan) -> AdaFuseOutput | torch.Tensor:
    """
    Decode the prompts of a plan.

    Raises:
        AdaFuseDecodingError: a member failed; carries the text committed so far.
    """
    call = plan.call
    prompts = [Prompt(index, list(ids)) for index, ids in enumerate(plan.inputs.padded)]
    members = [_make_member(member) for member in plan.members]
    decoder = Decoder(
        members=members,
        prompts=prompts,
        config=plan.config,
        should_stop=_stop_check(plan),
        on_commit=_streaming(call.streamer),
        max_length=call.generation_config.max_length,
        keep_logits=plan.keeps_logits,
        keep_cache=plan.returns_dict,
    )
    try:
        num_top = max(2, plan.config.num_branches)
        for member, planned in zip(members, plan.members, strict=True):
            member.start(planned.prompts, planned.processors, num_top, planned.cache)
        decoder.run()
    except MemberError as error:
        raise AdaFuseDecodingError.of(error, 0, prompts) from error.__cause__
    finally:
        if call.streamer is not None:
            call.streamer.end()  # also after an error: who waits for the text gets what there is
    sequences = pad_right([prompt.ids for prompt in prompts], call.generation_config, call.input_ids)
    return make_output(sequences, plan, members, prompts) if plan.returns_dict else sequences


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


def _stop_check(plan: CallPlan) -> Callable[[Prompt], bool]:
    criteria, device = plan.call.stopping_criteria, plan.call.input_ids.device

    def should_stop(prompt: Prompt) -> bool:
        ids = torch.tensor([prompt.ids], device=device)
        scores = tuple(row[None] for row in prompt.scores) if plan.gives_scores else None
        return bool(torch.as_tensor(criteria(ids, scores)).any())

    return should_stop


def _streaming(streamer: Any) -> Callable[[list[int]], None]:
    if streamer is None:
        return lambda ids: None
    return lambda ids: streamer.put(torch.tensor(ids))
