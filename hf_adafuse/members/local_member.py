"""`LocalMember`: a member whose model runs in this process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..trees.backend import ForwardError
from ..trees.kv_cache_backend import most_rows_of_logits
from ..trees.model_call import ModelCall
from ..trees.next_token import next_token_logits
from ..trees.nodes import Node
from .logits_reader import LogitsReader
from .member import Member, MemberError
from .processors import PromptProcessors
from .prompt_content import content_bytes, content_divergence, ids_without_content


class LocalMember(Member):
    """A [`Member`] whose model runs in this process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Of the last shortened prompt only: all chats of a member have the same one.
        self._logits_after: dict[tuple[int, ...], torch.Tensor] = {}

    @property
    def device_key(self) -> str:
        # Autocast holds in one thread only.
        return "this thread" if torch.is_autocast_enabled(self.device.type) else str(self.device)

    def _count_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def _content_divergences(self, prompt_indices: Sequence[int]) -> list[tuple[float, int]]:
        prompts = [self._prompts[index] for index in prompt_indices]
        shortened = [ids_without_content(self.vocabulary, self.chat_endings, ids) for ids in prompts]
        limit = math.inf if self.max_length is None else self.max_length
        read = [ids if ids is not None and len(ids) <= limit else None for ids in shortened]
        after = self._logits_after
        unread = [ids for ids in read if ids is not None and tuple(ids) not in after]
        # The prompts have been read, so that the model is set up.
        call = ModelCall(self.model, is_set_up=True)
        try:
            for rows, logits in next_token_logits(call, self.device, unread):
                if not bool(torch.isfinite(logits.amax(-1)).all()):
                    raise ForwardError("its logits are NaN or infinite")
                after |= {ids: row.clone() for ids, row in zip(rows, logits, strict=True)}
                self.backend.num_forwards += 1
                self.backend.num_tokens += sum(map(len, rows))
        except ForwardError as error:
            raise MemberError(self, str(error)) from (error.__cause__ or error)
        found = []
        for index, prompt, ids in zip(prompt_indices, prompts, read, strict=True):
            own = self.root(index).logits  # as the model gave them: no processor has been here
            assert own is not None
            if ids is None:
                found.append((math.nan, 0))
            else:
                divergence = content_divergence(own, after[tuple(ids)])
                found.append((divergence, content_bytes(self.vocabulary, prompt, ids)))
        last_used = [tuple(ids) for ids in read if ids is not None][-1:]
        self._logits_after = {ids: after[ids] for ids in last_used or after}
        return found

    def _most_unread(self, num_prompts: int) -> int | None:
        # Where prompts have rows of the cache of their own, all rows are filled up to the longest.
        num_rows = len(self.backend.active) if self.backend.is_padded else num_prompts
        return most_rows_of_logits(self.model, self.backend.policy, num_rows)

    def _make_reader(self, processors: list[PromptProcessors], num_top: int) -> Any:
        def ids_to(node: Node) -> list[int]:
            return self.backend.trees[node.prompt_index].ids_to(node)

        return LogitsReader(processors, num_top, ids_to, self.eos_ids)
