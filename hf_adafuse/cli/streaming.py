"""Streamers that write generated text to standard output as it comes."""

from __future__ import annotations

import sys
from typing import Any

from transformers.generation.streamers import BaseStreamer

from ..members.vocabulary import vocabulary_of
from ..rounds.trace_text import bracketed

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextWriter(BaseStreamer):
    """
    A streamer that writes only the continuation, not the prompt. transformers' `TextStreamer` decodes new ids as the
    start of a text, which loses the first space with many tokenizers. This one decodes them as a continuation.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the main model's tokenizer.

    Attributes:
        text (`str`): what has been written so far.
    """

    holds_back = True  # whether the first bytes of a character wait for the rest

    def __init__(self, tokenizer: Any) -> None:
        self.text = ""
        self._vocabulary = vocabulary_of(tokenizer)
        self._ids: list[int] | None = None  # until the prompt has come
        self._is_open = False

    def put(self, value: Any) -> None:
        """Take ids: first those of the prompt, which are not written, then new ones."""
        if self._ids is None:
            self._ids = []
            return
        self._ids.extend(value.flatten().tolist())
        text = self._vocabulary.text(self._ids)
        self._write_up_to(text.rstrip(_INCOMPLETE) if self.holds_back else text)

    def end(self) -> None:
        """Write what was held back."""
        self._write_up_to(self._vocabulary.text(self._ids or []))
        self._is_open = True

    def close(self) -> None:
        """End the line, also where the text broke off. A second call does nothing."""
        if self._is_open:
            self._is_open = False
            sys.stdout.write("\n")
            sys.stdout.flush()

    def show(self, new: str, is_first: bool) -> None:
        """Write a new part of the text. `is_first`: whether it is the beginning."""
        sys.stdout.write(new)

    def _write_up_to(self, text: str) -> None:
        new = text[len(self.text) :]
        if new:
            self.show(new, is_first=not self.text)
            self.text = text
            self._is_open = True
            sys.stdout.flush()


class SpanWriter(TextWriter):
    """A `TextWriter` that shows each round's text in brackets: `[Singapore] [is generally a]`."""

    holds_back = False

    def show(self, new: str, is_first: bool) -> None:
        sys.stdout.write(bracketed(new) if is_first else f" {bracketed(new)}")
