"""Loads the benchmark's own pair, two small trained models that write long texts, and makes prompts for it."""

from __future__ import annotations

from typing import Any

from ...demo import load_from
from . import prose

NAMES = ("llama", "gpt_neox")
# More characters than a token of any useful tokenizer has on average.
_CHARS_PER_TOKEN = 8


def load_pair(folder: Any = None) -> list[tuple[Any, Any]]:
    """
    The pair, on CPU in float32.

    Args:
        folder (`str` or `Path`, *optional*): the folder that holds the pair. By default the package's own.

    Returns:
        `list[tuple[PreTrainedModel, PreTrainedTokenizerBase]]`: each member's model and tokenizer, the main model's
        first.
    """
    return load_from(__package__, NAMES, folder)


def prompt(num_tokens: int, tokenizer: Any, index: int = 0) -> str:
    """
    A prompt: the beginning of a document that no member was trained on.

    Args:
        num_tokens (`int`): the most tokens of the prompt, at least 1. It has fewer where it would end within a word.
        tokenizer (`PreTrainedTokenizerBase`): the tokenizer that counts the tokens.
        index (`int`, *optional*, defaults to 0): the number of the document. Each number gives another text.

    Returns:
        `str`: one whole word or more.

    Raises:
        ValueError: `num_tokens` is below 1.
    """
    if num_tokens < 1:
        raise ValueError(f"`num_tokens` must be at least 1, but is {num_tokens}. Ask for more.")
    text = prose.document(f"prompt {index}", _CHARS_PER_TOKEN * num_tokens)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    beginning = tokenizer.decode(ids[: num_tokens + 1])
    head, _, _ = beginning.rpartition(" ")
    return head.rstrip() or text.split()[0]
