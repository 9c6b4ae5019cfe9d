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
        prefixes: list[tuple[int, int]],
        width: int,
        positions: list[list[int]],
        seen: list[list[list[tuple[int, int]]]],
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """
        Args:
            prefixes (`list[tuple[int, int]]`): per row, the first slot of its prefix and the one after its last.
            width (`int`): the number of slots.
            positions (`list[list[int]]`): per row, of the tokens of this pass; as many in every row.
            seen (`list`): per row, per query, the slots it sees below the prefix, its own among them, with their
                positions.
        """
        slots = torch.arange(width, device=self.device)
        first, after = torch.tensor(prefixes, device=self.device).T[:, :, None, None]
        prefix = ((slots >= first) & (slots < after)).expand(-1, len(positions[0]), -1)
        full = self._with(prefix.clone(), seen)
        if self.window is None:
            return self._as_given(full, full)
        at = torch.tensor(positions, device=self.device)[:, :, None]
        near = [
            [[pair for pair in pairs if at_row[q] - pair[1] < self.window] for q, pairs in enumerate(queries)]
            for at_row, queries in zip(positions, seen, strict=True)
        ]
        window = prefix & (at - (slots - first) < self.window)
        return self._as_given(full, self._with(window, near))

    def _with(self, visible: torch.Tensor, seen: list[list[list[tuple[int, int]]]]) -> torch.Tensor:
        at = [(b, q, slot) for b, row in enumerate(seen) for q, pairs in enumerate(row) for slot, _ in pairs]
        rows, queries, slots = torch.tensor(at, device=self.device).unbind(1)
        visible[rows, queries, slots] = True
        return visible

    def _as_given(self, full: torch.Tensor, sliding: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        if self.kinds is None:
            return self._additive(sliding)
        return {kind: self._additive(sliding if kind == "sliding_attention" else full) for kind in self.kinds}

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        hidden = torch.full((), torch.finfo(self.dtype).min, dtype=self.dtype, device=self.device)
        return torch.where(visible[:, None], torch.zeros_like(hidden), hidden)
