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
        if self.kinds is None:
            return self._mask(prefixes, width, positions, seen, self.window)
        windows = {kind: self.window if kind == "sliding_attention" else None for kind in self.kinds}
        masks = {window: self._mask(prefixes, width, positions, seen, window) for window in set(windows.values())}
        return {kind: masks[window] for kind, window in windows.items()}

    def _mask(
        self,
        prefixes: list[tuple[int, int]],
        width: int,
        positions: list[list[int]],
        seen: list[list[list[tuple[int, int]]]],
        window: int | None,
    ) -> torch.Tensor:
        shape = (len(prefixes), 1, len(positions[0]), width)
        mask = torch.full(shape, torch.finfo(self.dtype).min, dtype=self.dtype)  # few numbers: on CPU, then moved
        visible = []
        for row, (first, after) in enumerate(prefixes):
            if window is None:
                mask[row, :, :, first:after] = 0
            else:
                for query, at in enumerate(positions[row]):
                    mask[row, :, query, max(first, first + at - window + 1) : after] = 0
            for query, (at, pairs) in enumerate(zip(positions[row], seen[row], strict=False)):  # fillers come last
                start = (row * shape[2] + query) * width
                visible += [start + slot for slot, above in pairs if window is None or at - above < window]
        mask.view(-1)[visible] = 0
        return mask.to(self.device)
