"""The 4-D mask with which one forward pass holds a batch of token trees. Knows positions and slots, not tokens."""

from __future__ import annotations

from typing import Any

import torch

_MASKED_LAYERS = {"full_attention", "sliding_attention"}


def hidden_limit(model: Any) -> str | None:
    """
    Why neither a packed tree nor padded rows may be tried on this model: what a self-test of a few tokens would not
    see. `None` where it would.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _MASKED_LAYERS
    if kinds or getattr(config, "attention_chunk_size", None) is not None:
        return f"it has layers of the kinds {sorted(kinds) or ['chunked_attention']}"
    return None


def hidden_mask_limit(model: Any) -> str | None:
    """Why a packed tree may not be tried on this model, where padded rows may."""
    config = model.config.get_text_config()
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager"):  # flex_attention with a 4-D mask aborts the interpreter
        return f"its attention is {attention!r}"
    if config.model_type == "gpt_neo":
        return "its attention has local windows by slot"
    return None


class MaskMaker:
    """
    Masks in the form that `create_masks_for_generate` gives this model: one tensor, or one per kind of layer.

    Additive, of the model's dtype: the form that both sdpa and eager attention read correctly.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        config = model.config.get_text_config()
        self.dtype, self.device = model.dtype, device
        self.window = getattr(config, "sliding_window", None)
        self.kinds = sorted(set(config.layer_types)) if hasattr(config, "layer_types") else None

    def make(
        self,
        committed: torch.Tensor,
        slot_positions: torch.Tensor,
        positions: torch.Tensor,
        seen: list[list[list[int]]],
        start: int,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """
        Args:
            committed (`torch.BoolTensor` of shape `(batch_size, num_slots)`): the slots of the prefix.
            slot_positions (`torch.LongTensor` of shape `(batch_size, num_slots)`): the position of each slot's token.
            positions (`torch.LongTensor` of shape `(batch_size, num_queries)`): of the tokens of this pass.
            seen (`list`): per row, per query, the slots it sees below the prefix, its own among them.
            start (`int`): the slot of the first query.
        """
        num_queries = positions.shape[1]
        visible = committed[:, None, :].repeat(1, num_queries, 1)
        own = torch.arange(num_queries, device=self.device)
        visible[:, own, start + own] = True  # also for the filler of short rows: no row of the softmax may be empty
        at = [(b, q, s) for b, queries in enumerate(seen) for q, slots in enumerate(queries) for s in slots]
        if at:
            rows, queries, slots = torch.tensor(at, device=self.device).unbind(1)
            visible[rows, queries, slots] = True
        if self.window is None:
            return self._as_given(visible, visible)
        near = positions[:, :, None] - slot_positions[:, None, :] < self.window
        return self._as_given(visible, visible & near)

    def _as_given(self, full: torch.Tensor, sliding: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        if self.kinds is None:
            return self._additive(sliding)
        return {kind: self._additive(sliding if kind == "sliding_attention" else full) for kind in self.kinds}

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        hidden = torch.full((), torch.finfo(self.dtype).min, dtype=self.dtype, device=self.device)
        return torch.where(visible[:, None], torch.zeros_like(hidden), hidden)
