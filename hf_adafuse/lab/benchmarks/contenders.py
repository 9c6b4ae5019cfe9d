"""`Ensemble`: runs the contenders of a benchmark on the same prompts.

The contenders are the ensemble, each member alone, other methods, our own code without one of its ideas, and the naive
implementation.
`measuring` times them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from transformers import StaticCache

from ...call.arguments import EnsembleArguments, resolve_handles
from ...config import AdaFuseConfig
from ...ensemble import AdaFuseEnsemble
from ...generation import disable_adafuse
from ...members.model_handle import ModelHandle
from ...members.prompt_inputs import pad_left
from ...members.prompts import assistant_prompts
from ...transformers_compat import CACHE_NAME, takes_keys
from ...trees.model_call import ModelCall
from ...trees.pass_policy import policy_for
from ...trees.static_shapes import static_size, uncompiled
from . import instruments
from .naive import NaiveMember, naive_decode
from .results import Measurement
from .variants import VARIANTS, with_costs

Prompts = list[list[list[int]]]  # per member, its own ids of each prompt of a batch


class Ensemble:
    """
    The members as the benchmark runs them: copies that share the weights and report to one meter.

    Args:
        members (`list[tuple]`): each member's model and tokenizer, the main model's first. They are not changed.

    Attributes:
        handles (`list[ModelHandle]`): the members as they were given.
        models (`list[PreTrainedModel]`): the measured copies.
        meter (`Meter`): counts the passes of the copies.
        device (`torch.device`): the main model's device.
        bandwidth (`float`): how many bytes per second a large copy on that device reads and writes.
    """

    def __init__(self, members: Sequence[tuple[Any, Any]]) -> None:
        (main, tokenizer), *assistants = members
        arguments = EnsembleArguments([m for m, _ in assistants], [t for _, t in assistants], None, tokenizer)
        self.handles = resolve_handles(main, arguments)
        self.meter = instruments.Meter(len(members))
        self.models = [
            disable_adafuse(instruments.measured_copy(handle.model, self.meter, index))
            for index, handle in enumerate(self.handles)
        ]
        tokenizers = [handle.tokenizer for handle in self.handles]
        self._ensemble = AdaFuseEnsemble(list(zip(self.models, tokenizers, strict=True)))
        self.main = self._ensemble.model
        self.device = self.handles[0].device
        self._static_caches: dict[tuple[int, int, int], StaticCache] = {}
        self._costs: dict[str, weakref.WeakKeyDictionary[Any, Any]] = {}  # of the variants' passes
        self.bandwidth = instruments.copy_bandwidth(self.device)

    @property
    def tokenizer(self) -> Any:
        return self.handles[0].tokenizer

    def prompts(self, texts: list[str]) -> Prompts:
        """Each member's own ids of these texts."""
        main = [self.handles[0].vocabulary.encode_prompt(text) for text in texts]
        return [main, *assistant_prompts(self.handles, main, None)]  # as `generate()` makes them

    def measurement(self, prompt_tokens: int, batch: int, branches: int, new_tokens: int) -> Measurement:
        """
        A [`Measurement`] of this ensemble with no samples yet.

        Args:
            prompt_tokens (`int`), new_tokens (`int`): the length of a prompt and of its text, in the main model's
                tokens.
            batch (`int`): the number of prompts.
            branches (`int`): the number of branches B.
        """
        sizes = [model.num_parameters() for model in self.models]
        weights = [instruments.weight_bytes(model) for model in self.models]
        return Measurement(sizes, prompt_tokens, batch, branches, new_tokens, weights, self.bandwidth)

    def generate(self, prompts: Prompts, config: AdaFuseConfig, new_tokens: int, **options: Any) -> Any:
        """What the ensemble's `generate()` returns."""
        settings: dict[str, Any] = {"adafuse_config": config, "max_new_tokens": new_tokens, "do_sample": False}
        return self._ensemble.generate(self._batch(0, prompts[0]), **settings, **options)

    def run(self, prompts: Prompts, config: AdaFuseConfig, new_tokens: int) -> list[list[int]]:
        """For each prompt, the new ids of the main model that the ensemble writes."""
        return self.new_ids(self.generate(prompts, config, new_tokens), prompts)

    def run_variant(self, name: str, prompts: Prompts, config: AdaFuseConfig, new_tokens: int) -> list[list[int]]:
        """What `run` returns, with our own code changed as the variant of this name says. The variant plans its passes
        by their own times."""
        with VARIANTS[name](), with_costs(self._costs.setdefault(name, weakref.WeakKeyDictionary())):
            return self.run(prompts, config, new_tokens)

    def run_alone(self, k: int, rows: list[list[int]], num_tokens: int) -> None:
        """Have member k alone write exactly `num_tokens` tokens by its ordinary greedy `generate()`."""
        inputs = self._batch(k, rows)
        call = ModelCall(self.models[k])
        if call.is_compiled and takes_keys(call.cache_argument):
            inputs |= {
                CACHE_NAME: self._static_cache(k, inputs["input_ids"], num_tokens),
                "disable_compile": True,
            }
        self.models[k].generate(
            **inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, num_beams=1
        )

    def _static_cache(self, k: int, ids: torch.Tensor, num_tokens: int) -> StaticCache:
        """An empty cache for member k, which is compiled. There are few shapes, and each has one cache at one address,
        so that the model is compiled few times."""
        least = policy_for(ids.device).least_static_columns
        shape = (k, len(ids), static_size(ids.shape[1] + num_tokens, least))
        if shape not in self._static_caches:
            cache = StaticCache(self.models[k].config, max_cache_len=shape[-1])
            # The first pass makes the cache's tensors. In a compiled pass they would not be marked as staying in place.
            with uncompiled, torch.no_grad():
                self.models[k](input_ids=ids[:, :1], **{CACHE_NAME: cache})
            self._static_caches[shape] = cache
        self._static_caches[shape].reset()
        return self._static_caches[shape]

    def run_naively(self, prompts: Prompts, config: AdaFuseConfig, new_tokens: int) -> list[list[int]]:
        """For each prompt, the new ids that the naive implementation writes. It takes one prompt after another."""
        members = []
        for k, (handle, model) in enumerate(zip(self.handles, self.models, strict=True)):
            eos = self._main_eos() if k == 0 else handle.own_eos_ids()
            members.append(NaiveMember(ModelHandle(handle.name, model, handle.tokenizer), eos, config))
        rows = [list(row) for row in zip(*prompts, strict=True)]
        return [naive_decode(members, row, config, new_tokens) for row in rows]

    def new_ids(self, sequences: Any, prompts: Prompts) -> list[list[int]]:
        """For each prompt, the new ids in `sequences` (ids of shape `(batch, length)`), without the padding behind
        them."""
        width = max(map(len, prompts[0]))
        rows = sequences[:, width:].tolist()
        eos = set(self._main_eos())
        ends = [next((at for at, token in enumerate(row, start=1) if token in eos), len(row)) for row in rows]
        return [row[:end] for row, end in zip(rows, ends, strict=True)]

    def check_room(self, batches: list[Prompts], new_tokens: int) -> None:
        """Raises `ValueError` where prompts leave no room for the new tokens in a member's context."""
        for k, handle in enumerate(self.handles):
            longest = max(len(row) for prompts in batches for row in prompts[k])
            room = handle.max_length
            if room is not None and longest + new_tokens > room:
                raise ValueError(
                    f"`prompt_tokens` and `new_tokens` must fit into the context of {handle.name}, {room} tokens, "
                    f"but the prompt is {longest} of its tokens and {new_tokens} are to come. Ask for fewer."
                )

    def _main_eos(self) -> list[int]:
        eos = self.main.generation_config.eos_token_id
        return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)

    def _batch(self, k: int, rows: list[list[int]]) -> dict[str, Any]:
        """A left-padded batch for member k."""
        handle = self.handles[k]
        inputs = pad_left(rows, handle.tokenizer).to(handle.device)
        return {**inputs, "pad_token_id": handle.tokenizer.pad_token_id or 0}
