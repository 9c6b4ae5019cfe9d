"""One AdaFuse call, between `generate()`'s prepared arguments and the decoder: prompts in, output out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .config import AdaFuseConfig
from .continuation import final_cache, resume
from .decoding import Decoder
from .ensemble import Participant
from .kv_cache import AdaFuseCache, adopt_cache, num_cached
from .member import Member, MemberError
from .outputs import AdaFuseOutput, count_words
from .processors import ProcessorRequest, assistant_processors, main_processors
from .progress import AdaFuseDecodingError, Prompt
from .prompts import assistant_prompts, check_prompts, unpadded_rows, warn_of_lost_templates
from .rounds import AdaFuseRoundsBatch

# What `generate()` hands over that AdaFuse makes itself or has no use for.
_EXPECTED = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "cache_params",
    "cache_position",
    "logits_to_keep",
    "use_cache",
    "tokenizer",
    "token_type_ids",
    "assistant_tokenizer",
}


class Session:
    """
    A call of `generate()` whose participants and settings are checked.

    Args:
        participants (`list[Participant]`): the main model first.
        config (`AdaFuseConfig`)
        assistant_inputs (`list`, *optional*): per assistant, its own prompts.
    """

    def __init__(self, participants: list[Participant], config: AdaFuseConfig, assistant_inputs: Sequence[Any] | None):
        self.participants, self.config, self.assistant_inputs = participants, config, assistant_inputs

    def run(
        self,
        input_ids: torch.Tensor,
        request: ProcessorRequest,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any,
        model_kwargs: dict[str, Any],
    ) -> AdaFuseOutput | torch.Tensor:
        """Decode a left-padded batch `input_ids` of shape `(batch_size, sequence_length)`."""
        _check_inputs(input_ids, model_kwargs, streamer)
        main_ids = unpadded_rows(input_ids, model_kwargs.get("attention_mask"), "input_ids")
        _check_positions(input_ids, model_kwargs)
        prompts = [Prompt(index, list(ids)) for index, ids in enumerate(input_ids.tolist())]
        past = model_kwargs.get("past_key_values", model_kwargs.get("cache_params"))
        rows, caches = self._plan_prompts(input_ids, main_ids, past)
        for participant, ids in zip(self.participants, rows, strict=True):
            check_prompts(participant, ids)
        members = self._members(generation_config, rows, caches[0])
        returns_dict = bool(generation_config.return_dict_in_generate)
        gives_scores = returns_dict and bool(generation_config.output_scores)
        decoder = Decoder(
            members=members,
            prompts=prompts,
            config=self.config,
            should_stop=_stop_check(stopping_criteria, input_ids.device, gives_scores),
            on_commit=(lambda ids: streamer.put(torch.tensor(ids))) if streamer is not None else (lambda ids: None),
            max_length=generation_config.max_length,
            keep_logits=gives_scores or (returns_dict and bool(generation_config.output_logits)),
            keep_cache=returns_dict,
        )
        try:
            self._prefill(members, rows, caches, prompts, request)
            decoder.run()
        except MemberError as error:
            raise AdaFuseDecodingError.of(error, 0, prompts) from error.__cause__
        finally:
            if streamer is not None:
                streamer.end()  # also after an error: who waits for the text gets what there is
        sequences = _pad_right([prompt.ids for prompt in prompts], generation_config, input_ids)
        if not returns_dict:
            return sequences
        threshold = self.config.margin_threshold if self.config.commitment == "adaptive" else None
        rounds = AdaFuseRoundsBatch([p.rounds for p in prompts], [member.name for member in members], threshold)
        return _output(sequences, members, prompts, rounds, generation_config, input_ids.shape[1])

    def _members(self, generation_config: Any, rows: list[list[list[int]]], cache: Any) -> list[Member]:
        eos = generation_config._eos_token_tensor
        main_eos = [] if eos is None else eos.flatten().tolist()
        all_eos = [main_eos, *(assistant.own_eos_ids() for assistant in self.participants[1:])]
        members = [p.member(ids, prompts) for p, ids, prompts in zip(self.participants, all_eos, rows, strict=True)]
        if cache is not None and not members[0].tree.keeps_keys:
            raise ValueError(
                f"`past_key_values` must be left out where the main model runs without keys and values, but is given "
                f"for a {type(self.participants[0].model).__name__}. Pass all ids alone."
            )
        return members

    def _plan_prompts(
        self, input_ids: torch.Tensor, main_ids: list[list[int]], past: Any
    ) -> tuple[list[list[list[int]]], list[Any]]:
        """Each member's ids of the prompts, and the cache of their beginning where there is one."""
        cache, num_columns = None, 0
        if num_cached(past) > 0:
            num_columns = num_cached(past)
            cache = adopt_cache(past, num_columns)
            if len(past.layers[0].keys) != len(input_ids):
                raise ValueError(
                    f"`past_key_values` must be of the batch size of `input_ids`, {len(input_ids)}, but is of "
                    f"{len(past.layers[0].keys)}. Pass the cache of the same prompts."
                )
        if num_columns >= input_ids.shape[1]:
            raise ValueError(
                f"`past_key_values` must hold fewer tokens than `input_ids`, but holds {num_columns} of "
                f"{input_ids.shape[1]}. Pass all ids, the last one not in the cache."
            )
        if cache is not None:  # without the columns that are padding in every row
            num_padding = input_ids.shape[1] - max(map(len, main_ids))
            rest = [(keys[:, :, num_padding:], values[:, :, num_padding:]) for keys, values in cache]
            cache = rest if num_columns > num_padding else None
        rows = [main_ids, *assistant_prompts(self.participants, main_ids, self.assistant_inputs)]
        caches = [cache, *[None] * (len(rows) - 1)]
        if isinstance(past, AdaFuseCache) and self.assistant_inputs is None and past.belongs_to(input_ids):
            for k, participant in enumerate(self.participants[1:], start=1):
                states = past.states_of(participant.model, participant.vocabulary.fingerprint)
                if states is not None:
                    rows[k], caches[k] = resume(states)
        given = self.assistant_inputs or [None] * len(self.participants)
        unread = [k for k in range(1, len(rows)) if caches[k] is None and given[k - 1] is None]
        warn_of_lost_templates(self.participants, main_ids, unread)
        return rows, [_usable(*of_member) for of_member in zip(self.participants, rows, caches, strict=True)]

    def _prefill(
        self,
        members: list[Member],
        rows: list[list[list[int]]],
        caches: list[Any],
        prompts: list[Prompt],
        request: ProcessorRequest,
    ) -> None:
        helper = self.participants[0].model  # any model with `generate()` builds processors alike
        main, *assistants = members
        processors = [main_processors(helper, request, [prompt.ids for prompt in prompts], rows[0], main.device)]
        for member, ids in zip(assistants, rows[1:], strict=True):
            processors.append(assistant_processors(helper, request, member.eos_ids, ids, member.device))
        for member, ids, made, cache in zip(members, rows, processors, caches, strict=True):
            member.start(self.config, ids, made, cache)


def _usable(participant: Participant, prompts: list[list[int]], cache: Any) -> Any:
    """A cache, or `None` where its keys are of other rotary frequencies than the prompts are read by now."""
    switch = participant.frequency_switch
    if cache and switch is not None and cache[0][0].shape[2] <= switch < max(map(len, prompts)):
        return None
    return cache


def _check_inputs(input_ids: torch.Tensor, model_kwargs: dict[str, Any], streamer: Any) -> None:
    if "inputs_embeds" in model_kwargs:
        raise ValueError("`inputs_embeds` must be left out with AdaFuse, but is given. Pass `input_ids`.")
    unexpected = sorted(
        name
        for name, value in model_kwargs.items()
        if name not in _EXPECTED and value is not None and value is not False
    )
    if unexpected:
        raise ValueError(
            f"The inputs must be `input_ids` and `attention_mask` with AdaFuse, but also hold {unexpected}. "
            "Leave them out."
        )
    if input_ids.shape[1] == 0:
        raise ValueError("`input_ids` must hold at least one token, but is empty. Pass a prompt.")
    if streamer is not None and len(input_ids) > 1:
        raise ValueError(
            f"`streamer` must be used with one prompt, but there are {len(input_ids)}. Leave it out, or call in turn."
        )


def _check_positions(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
    given = model_kwargs.get("position_ids")
    mask = model_kwargs.get("attention_mask")
    if given is not None:
        mask = torch.ones_like(input_ids) if mask is None else mask
        usual = (mask.long().cumsum(-1) - 1)[:, -given.shape[-1] :]
        if given.shape != usual.shape or not torch.equal(given.to(mask.device)[usual >= 0], usual[usual >= 0]):
            raise ValueError("`position_ids` must count the unpadded tokens from 0, but are others. Leave them out.")


def _stop_check(criteria: Any, device: torch.device, with_scores: bool) -> Any:
    def should_stop(prompt: Prompt) -> bool:
        ids = torch.tensor([prompt.ids], device=device)
        scores = tuple(row[None] for row in prompt.scores) if with_scores else None
        return bool(torch.as_tensor(criteria(ids, scores)).any())

    return should_stop


def _pad_right(rows: list[list[int]], generation_config: Any, like: torch.Tensor) -> torch.Tensor:
    pad = generation_config._pad_token_tensor
    filler = int(pad) if pad is not None else 0
    width = max(map(len, rows))
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows], dtype=like.dtype, device=like.device)


def _output(
    sequences: torch.Tensor,
    members: list[Member],
    prompts: list[Prompt],
    rounds: AdaFuseRoundsBatch,
    generation_config: Any,
    prompt_width: int,
) -> AdaFuseOutput:
    new_tokens = sequences.shape[1] - prompt_width
    stats = count_words(rounds)
    stats["members"] = [
        {
            "name": member.name,
            "forward_passes": member.tree.num_forwards,
            "tokens_run": member.tree.num_tokens,
            "proposals": member.num_proposals,
            "wins": member.num_wins,
        }
        for member in members
    ]
    return AdaFuseOutput(
        sequences=sequences,
        scores=_stack([p.scores for p in prompts], new_tokens) if generation_config.output_scores else None,
        logits=_stack([p.logits for p in prompts], new_tokens) if generation_config.output_logits else None,
        past_key_values=final_cache(sequences, members, prompts),
        rounds=rounds,
        stats=stats,
    )


def _stack(rows: list[list[torch.Tensor]], num_steps: int) -> tuple[torch.Tensor, ...] | None:
    """One `(batch_size, vocab_size)` per new token; zeros where a prompt had finished."""
    if num_steps == 0:
        return None
    blank = torch.zeros_like(next(row[0] for row in rows if row))
    return tuple(torch.stack([row[step] if step < len(row) else blank for row in rows]) for step in range(num_steps))
