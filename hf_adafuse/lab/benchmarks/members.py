"""The benchmark's own pair: two small trained models that write long texts, and prompts of any length for them."""

from __future__ import annotations

from typing import Any

from ...demo import load_from
from . import prose

NAMES = ("llama", "gpt_neox")
_CHARS_PER_TOKEN = 8  # more than any tokenizer of use gives


def load_pair(folder: Any = None) -> list[tuple[Any, Any]]:
    """
    The pair, on CPU in float32.

    Args:
        folder (`str` or `Path`, *optional*): where it is; the package's own by default.

    Returns:
        `list[tuple[PreTrainedModel, PreTrainedTokenizerBase]]`: the main model first.
    """
    return load_from(__package__, NAMES, folder)


def prompt(num_tokens: int, tokenizer: Any, index: int = 0) -> str:
    """
    The beginning of a document that no member was trained on, to be gone on with.

    Args:
        num_tokens (`int`): about how many tokens, at least 1: no more, and as many less as the last word asks.
        tokenizer (`PreTrainedTokenizerBase`): whose tokens.
        index (`int`, *optional*, defaults to 0): another one, another text.

    Returns:
        `str`: ends at the end of a word (and holds one word at least).

    Raises:
        ValueError: fewer than one token.
    """
    if num_tokens < 1:
        raise ValueError(f"`num_tokens` must be at least 1, but is {num_tokens}. Ask for more.")
    text = prose.document(f"prompt {index}", _CHARS_PER_TOKEN * num_tokens)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    beginning = tokenizer.decode(ids[: num_tokens + 1])
    head, _, _ = beginning.rpartition(" ")
    return head.rstrip() or text.split()[0]
