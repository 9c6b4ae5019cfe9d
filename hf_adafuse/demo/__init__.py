"""The demo: three small trained members that ship with the package, and questions to ask them.

`hf-adafuse demo` shows them. The examples and the commands that name no model use the first two, except `bench`, which
has a pair of its own, and `paper table2`, which takes all three. torch and transformers are imported only when a member
is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data import DemoQuestion

__all__ = ["load_member", "load_members", "load_pair", "test_questions"]

NAMES = ("llama", "gpt_neox", "qwen3")


def load_members(num_members: int = 3, folder: Any = None) -> list[tuple[Any, Any]]:
    """
    The demo's members, on CPU in float32.

    Args:
        num_members (`int`, *optional*, defaults to 3): how many members are loaded, from 1 to 3.
        folder (`str` or `Path`, *optional*): the folder that holds the members. By default the package's own.

    Returns:
        `list[tuple[PreTrainedModel, PreTrainedTokenizerBase]]`: each member's model and tokenizer, the main model's
        first.

    Raises:
        ValueError: `num_members` is not 1, 2 or 3.
    """
    if num_members not in (1, 2, 3):
        raise ValueError(f"`num_members` must be 1, 2 or 3, but is {num_members!r}. The package holds three members.")
    return load_from(__name__, NAMES[:num_members], folder)


def load_pair() -> list[tuple[Any, Any]]:
    """The first two members, each a model and its tokenizer, the main one first."""
    return load_members(2)


def test_questions(num_questions: int | None = None) -> list[DemoQuestion]:  # noqa: PT028
    """The test set: questions in phrasings that no member was trained on. `num_questions`: how many of the 974 are
    returned, from the first; by default all."""
    from . import data

    return data.held_out(num_questions)


def load_from(package: str, names: Sequence[str], folder: Any = None) -> list[tuple[Any, Any]]:
    """Load the members of these names from `folder`, or from the folder `models` of the package `package`. Returns each
    as [`load_member`] does."""
    if folder is not None:
        return [load_member(f"{folder}/{name}") for name in names]
    with as_file(files(package) / "models") as path:
        return [load_member(str(path / name)) for name in names]


def load_member(path: str) -> tuple[Any, Any]:
    """The model and tokenizer in a folder, on CPU in float32, without a progress bar."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    had_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    finally:
        if had_bar:
            logging.enable_progress_bar()
    return model, AutoTokenizer.from_pretrained(path)
