"""The demo: three small trained members that ship with the package, and questions to ask them.

`hf-adafuse demo` shows them. The examples and the commands that name no model use the first two, except `bench`, which
has a pair of its own, and `paper table2`, which takes all three. torch and transformers are imported only when a member
is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
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
        ValueError: `num_members` is not 1, 2 or 3, or `folder` does not hold these members.
    """
    if num_members not in (1, 2, 3):
        raise ValueError(f"`num_members` must be 1, 2 or 3, but is {num_members!r}. The package holds three members.")
    return load_from(__name__, NAMES[:num_members], folder)


def load_pair() -> list[tuple[Any, Any]]:
    """The first two members, each a model and its tokenizer, the main one first."""
    return load_members(2)


def test_questions(num_questions: int | None = None) -> list[DemoQuestion]:  # noqa: PT028
    """
    The test set: questions in phrasings that no member was trained on.

    Args:
        num_questions (`int`, *optional*): how many questions are returned, from the first on. By default all 974.

    Returns:
        `list[DemoQuestion]`: the questions, in the same order in every call.

    Raises:
        ValueError: `num_questions` is below 1 or above 974.
    """
    from . import data

    return data.held_out(num_questions)


def load_from(package: str, names: Sequence[str], folder: Any = None) -> list[tuple[Any, Any]]:
    """
    Load some members, each from a folder of its name.

    Args:
        package (`str`): the package whose folder `models` holds them.
        names (`list[str]`): the members' names.
        folder (`str` or `Path`, *optional*): the folder that holds them in place of the package's.

    Returns:
        `list[tuple[PreTrainedModel, PreTrainedTokenizerBase]]`: each member as [`load_member`] returns it.

    Raises:
        ValueError: there is no folder for a member, or it does not load.
    """
    if folder is not None:
        return [load_member(Path(folder, name)) for name in names]
    with as_file(files(package) / "models") as path:
        return [load_member(path / name) for name in names]


def load_member(folder: str | Path) -> tuple[Any, Any]:
    """
    Load one member, on CPU in float32, without a progress bar.

    Args:
        folder (`str` or `Path`): the folder that holds its model and tokenizer. No name is looked up on the Hub.

    Returns:
        `tuple[PreTrainedModel, PreTrainedTokenizerBase]`: the model and its tokenizer.

    Raises:
        ValueError: there is no such folder, or it does not load.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from ..hub.export import loading

    if not Path(folder).is_dir():
        raise ValueError(f"`folder` must be a folder with a model, but is {str(folder)!r}. Check the path.")
    had_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with loading(str(folder)):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            return model, AutoTokenizer.from_pretrained(folder)
    finally:
        if had_bar:
            logging.enable_progress_bar()
