"""Carries out a plan: makes the members, has them read the prompts, runs the decoder, returns the output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import StopStringCriteria

from ..decoding.decoder import Decoder
from ..decoding.progress import AdaFuseDecodingError, Prompt, Sampling
from ..decoding.reviews import Reviews
from ..decoding.strategies.registry import make_strategy
from ..decoding.strategies.strategy import Strategy
from ..members.member import Member
from ..members.node_logprobs import draw_token
from ..members.prompt_content import PromptEvidence
from ..members.rating_prompts import RatingPrompts, asked_text, question_of
from ..outputs import AdaFuseOutput
from ..trees.backend import ForwardError
from ..trees.shared_prefix import prefix_caching
from .output import finished_rounds, make_output, pad_right
from .plan import CallPlan, MemberInputs
from .planning import record_if_only_planning
from .sampling import Warper


def run_call(plan: CallPlan) -> AdaFuseOutput | torch.Tensor:
    """
    Decode the prompts of a plan.

    Raises:
        AdaFuseDecodingError: a member failed; carries the text committed so far.
    """
    call = plan.call
    if record_if_only_planning(plan):
        return call.input_ids
    prompts = make_prompts(plan)
    try:
        members = make_members(plan)
        strategies = make_strategies(plan)
        reviews = make_reviews(plan, strategies)
        with sharing_prefixes(plan):
            _make_decoder(plan, members, prompts, strategies, reviews).run()
    finally:
        if call.streamer is not None:
            call.streamer.end()  # also after an error: who waits for the text gets what there is
    sequences = pad_right([prompt.ids for prompt in prompts], call.generation_config, call.input_ids)
    raters = [] if reviews is None else reviews.raters
    return make_output(sequences, plan, members, prompts, raters) if call.returns_dict else sequences


def sharing_prefixes(plan: CallPlan) -> AbstractContextManager[Any]:
    """Within this context a prefix that all prompts share is read once, also by prompts that wait for a slot."""
    has_later = plan.max_batch_size is not None and plan.max_batch_size < len(plan.inputs.prompts)
    return prefix_caching() if has_later else nullcontext()


def make_prompts(plan: CallPlan, first_index: int = 0) -> list[Prompt]:
    """The prompts of a plan, numbered from `first_index` on."""
    samplings = _samplings(plan)
    return [
        Prompt(
            first_index + row,
            list(ids),
            continues_earlier_call=plan.inputs.continues_earlier_call[row],
            max_length=plan.call.generation_config.max_length,
            keeps_logits=plan.keeps_logits,
            is_strict=plan.has_grammar,
            sampling=samplings[row],
        )
        for row, ids in enumerate(plan.inputs.padded)
    ]


def make_members(plan: CallPlan) -> list[Member]:
    """The members with their prompts, which they have not read yet."""
    members = [one.handle.make_member(one.backend, one.eos_ids, one.prompts) for one in plan.members]
    num_top = max(2, plan.config.num_branches)
    weighting = _weighting(plan)
    with_facts = make_strategy(plan.config).needs_prompt_facts
    for member, planned in zip(members, plan.members, strict=True):
        cache = planned.cache if planned.images is None else _read_images(plan, planned)
        member.start(planned.prompts, planned.processors, num_top, cache, weighting, planned.can_share, with_facts)
    return members


def _read_images(plan: CallPlan, planned: MemberInputs) -> Any:
    """The keys and values of a member's prompts and images, but for each prompt's last token."""
    assert planned.images is not None
    ids, mask = plan.call.input_ids, plan.call.model_kwargs.get("attention_mask")
    num_padding = ids.shape[1] - max(map(len, planned.prompts))
    try:
        layers = planned.images.prefill(planned.handle.model, ids, mask)
    except ForwardError as error:
        rows = ids.tolist()
        raise AdaFuseDecodingError(planned.handle.name, str(error), 0, [""] * len(rows), rows) from error.__cause__
    return [(keys[:, :, num_padding:], values[:, :, num_padding:]) for keys, values in layers]


def _weighting(plan: CallPlan) -> str | None:
    """By what of a prompt the members are weighted: the value of `model_weights` for which they note what it says."""
    weighting = plan.config.model_weights
    if not isinstance(weighting, str) or len(plan.members) == 1:
        return None
    is_told = all(member.handle.is_local for member in plan.members)  # else all count alike without examples
    return "examples" if weighting == "examples_or_content" and not is_told else weighting


def prompt_evidence(plan: CallPlan, members: Sequence[Member]) -> list[list[PromptEvidence]]:
    """Per member, what each prompt says about it. The lists grow as prompts are read."""
    return [] if _weighting(plan) is None else [member.prompt_evidence for member in members]


def _make_decoder(
    plan: CallPlan, members: list[Member], prompts: list[Prompt], strategies: list[Strategy], reviews: Reviews | None
) -> Decoder:
    return Decoder(
        members=members,
        prompts=prompts,
        config=plan.config,
        strategies=strategies,
        should_stop=plan.stop_check,
        on_commit=_make_on_commit(plan.call.streamer),
        keep_cache=plan.returns_cache,
        prompt_evidence=prompt_evidence(plan, members),
        max_batch_size=plan.max_batch_size,
        on_answer=_make_on_answer(plan, prompts),
        reviews=reviews,
    )


def _make_on_answer(plan: CallPlan, prompts: list[Prompt]) -> Callable[[int], None] | None:
    """A function that tells the caller the rounds of a finished prompt; `None` without the caller's `on_answer`."""
    on_answer = plan.on_answer
    return None if on_answer is None else lambda index: on_answer(index, finished_rounds(prompts[index], plan))


def make_strategies(plan: CallPlan) -> list[Strategy]:
    """One strategy per prompt, prepared with the prompt's text and the texts at which the call stops."""
    main = plan.members[0].handle
    criteria = [one for one in plan.call.stopping_criteria if isinstance(one, StopStringCriteria)]
    stops = [text for one in criteria for text in one.stop_strings]
    strategies = []
    for ids in plan.inputs.prompts:
        strategy = make_strategy(plan.config)
        strategy.prompt_text = asked_text(main.tokenizer, main.vocabulary, ids)
        strategy.stop_texts = stops
        strategy.prepare(main.device)
        strategies.append(strategy)
    return strategies


def make_reviews(plan: CallPlan, strategies: Sequence[Strategy]) -> Reviews | None:
    """The members again, as raters of answers; `None` where the method rates nothing."""
    rubric = strategies[0].rated_by
    if rubric is None:
        return None
    raters, rating_prompts = [], []
    for member in plan.members:
        rating_prompts.append(RatingPrompts(member.handle.tokenizer, member.handle.vocabulary, rubric))
        raters.append(member.handle.make_member(member.backend, [], member.prompts))
    reviews = Reviews(raters, rating_prompts)
    reviews.start([question_asked(plan, strategy) for strategy in strategies])
    return reviews


def question_asked(plan: CallPlan, strategy: Strategy) -> str:
    """The question in a prompt, without the main model's chat template."""
    main = plan.members[0].handle
    return question_of(main.tokenizer, main.vocabulary, strategy.prompt_text)


def _samplings(plan: CallPlan) -> list[Sampling | None]:
    """Per prompt, how its text is drawn, where the call samples."""
    if plan.warpers is None:
        return [None] * len(plan.inputs.prompts)
    draws = [_draw(warper) for warper in plan.warpers]
    is_greedy = all(warper.is_greedy for warper in plan.warpers)
    return [Sampling(draws, numbers, is_greedy) for numbers in plan.streams]


def _draw(warper: Warper) -> Callable[..., int]:
    """How a member draws a token, as of [`WordSampler`]."""

    def draw(node: Any, numbers: Iterator[float], allow: Any) -> int:
        return draw_token(node.logprobs, None if warper.is_greedy else warper, numbers, allow)

    return draw


def _make_on_commit(streamer: Any) -> Callable[[Prompt, list[int]], None]:
    """A function that puts the ids of each round into the streamer, where the call has one."""
    if streamer is None:
        return lambda prompt, ids: None
    return lambda prompt, ids: streamer.put(torch.tensor(ids, device="cpu"))
