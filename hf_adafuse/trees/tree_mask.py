"""The 4-D mask of tree attention: each node sees its prompt's prefix and its own ancestors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..transformers_compat import attention_of
from .backend import to_device

_MASKED_LAYERS = {"full_attention", "sliding_attention"}


def reason_against_branch_rows(model: Any) -> str | None:
    """
    Why neither branch rows nor tree attention may be tried on this model, because a self-test of a few tokens would not
    show that they go wrong. `None` where both may be tried.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _MASKED_LAYERS
    if kinds or getattr(config, "attention_chunk_size", None) is not None:
        return f"it has layers of the kinds {sorted(kinds) or ['chunked_attention']}"
    return None


def reason_against_tree_attention(model: Any) -> str | None:
    """Why tree attention may not be tried on this model, though branch rows may; `None` where it may."""
    attention = attention_of(model)
    if attention not in ("sdpa", "eager"):  # flex_attention with a 4-D mask aborts the interpreter
        return f"its attention is {attention!r}"
    if model.config.get_text_config().model_type == "gpt_neo":
        return "its attention has local windows by column"
    return None


class MaskMaker:
    """
    Masks in the form that `create_masks_for_generate` gives this model: one tensor, or one per kind of layer.

    Additive, of the model's dtype: the form that both sdpa and eager attention read correctly.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        config = model.config.get_text_config()
        self.dtype = model.dtype
        self.device = device
        self.window = getattr(config, "sliding_window", None)
        self.kinds = sorted(set(config.layer_types)) if hasattr(config, "layer_types") else None
        self._shown, self._hidden = torch.tensor([0, torch.finfo(self.dtype).min], dtype=self.dtype, device="cpu")
        self.forget()

    def forget(self) -> None:
        """Forget the layout: all columns were laid out anew."""
        self._row_of: dict[int, int] = {}  # by prompt, in the table below
        self._num_placed: list[int] = []
        # Per row, the position of each column that holds the prompt's prefix, -1 for the others; on CPU: few numbers.
        self._prefixes = torch.full((0, 0), -1, dtype=torch.int32, device="cpu")

    def place(self, prefixes: Mapping[int, list[int]], width: int) -> dict[int, int]:
        """The prefixes of prompts are in these of `width` columns, in this order; they only grow. Returns the number by
        which each prompt is known to `make`."""
        for prompt_index in prefixes:
            if prompt_index not in self._row_of:
                self._row_of[prompt_index] = len(self._row_of)
                self._num_placed.append(0)
        rows, room = self._prefixes.shape
        if len(self._row_of) > rows or width > room:
            more_columns = max(room, width + width // 4) - room
            more_rows = len(self._row_of) - rows
            self._prefixes = torch.nn.functional.pad(self._prefixes, (0, more_columns, 0, more_rows), value=-1)
        for prompt_index, columns in prefixes.items():
            row = self._row_of[prompt_index]
            number = len(columns)
            known = self._num_placed[row]
            if known < number:
                self._prefixes[row, columns[known:]] = torch.arange(known, number, dtype=torch.int32, device="cpu")
                self._num_placed[row] = number
        return self._row_of

    def make(
        self, prompts: torch.Tensor, positions: torch.Tensor, seen: list[tuple[int, int, int]], width: int
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """
        Args:
            prompts (`torch.LongTensor` of shape `(num_rows, num_queries)`): the number of each query's prompt, as of
                `place`; on CPU.
            positions (`torch.LongTensor` of shape `(num_rows, num_queries)`): the position of each query in its text;
                on CPU.
            seen (`list[tuple[int, int, int]]`): what queries see below the prefix, themselves among it: the query's
                number, over all rows, the column, and how far before the query it is.
            width (`int`): the number of columns.
        """
        if self.kinds is None:
            return self._mask(prompts, positions, seen, width, self.window)
        windows = {kind: self.window if kind == "sliding_attention" else None for kind in self.kinds}
        masks = {window: self._mask(prompts, positions, seen, width, window) for window in set(windows.values())}
        return {kind: masks[window] for kind, window in windows.items()}

    def _mask(
        self,
        prompts: torch.Tensor,
        positions: torch.Tensor,
        seen: list[tuple[int, int, int]],
        width: int,
        window: int | None,
    ) -> torch.Tensor:
        prefixes = self._prefixes[:, :width]
        if window is None:
            masks = torch.where(prefixes >= 0, self._shown, self._hidden)
            mask = masks.index_select(0, prompts.flatten()).view(*prompts.shape, width)
        else:
            prefixes = prefixes[prompts]
            is_near = (prefixes >= 0) & (prefixes > positions[:, :, None] - window)
            mask = torch.where(is_near, self._shown, self._hidden)
        below = [query * width + column for query, column, gap in seen if window is None or gap < window]
        mask.view(-1)[below] = 0
        return to_device(mask[:, None], self.device)
