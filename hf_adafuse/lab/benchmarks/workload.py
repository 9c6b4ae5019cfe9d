"""Makes what a benchmark measures: members of the wanted sizes, prompts of the wanted lengths, and combinations."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .contenders import Ensemble
from .enlarge import enlarge
from .measuring import BenchJob

Members = list[tuple[Any, Any]]  # each member's model and tokenizer, the main model's first
DEFAULT_PARAMETERS = (80_000_000,)
# How many batches of the largest size are read at most, so that all batch sizes read the same prompts.
_MOST_BATCHES = 4


class Combination(NamedTuple):
    """
    The settings of one job.

    Attributes:
        parameters (`tuple[int]`): the number of parameters of all members, or one number for each member. Empty: the
            models keep their sizes.
        prompt_tokens (`int`): the length of a prompt, in tokens of the main model.
        batch (`int`): how many prompts are decoded at a time.
        branches (`int`): the number of branches B.
        against (`tuple[str]`): the names of the contenders that ours is compared with.
        num_prompts (`int`, defaults to 1): the least number of prompts. They are decoded in as many batches as that
            takes. Batches of different sizes can be compared only over the same prompts.
    """

    parameters: tuple[int, ...]
    prompt_tokens: int
    batch: int
    branches: int
    against: tuple[str, ...]
    num_prompts: int = 1


class Workload:
    """
    Makes jobs of combinations. Members of the same sizes are made once.

    Args:
        members (`list[tuple]`, *optional*): each member's model and tokenizer, the main model's first. They are not
            changed. By default the pair that ships with the package.
        prompt_text (`str`, *optional*): the text that prompts are cut from. By default the built-in prose.
        device (`str`), dtype (`str`): the device and the dtype of the models.
        compiled (`bool`): whether the forward passes go through `torch.compile`.
        new_tokens (`int`): how many tokens of the main model are written.
        num_texts (`int`): how many times as many prompts as a combination asks for.
    """

    def __init__(
        self,
        members: Members | None = None,
        prompt_text: str | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        compiled: bool = False,
        new_tokens: int = 64,
        num_texts: int = 1,
    ) -> None:
        self.members = default_members() if members is None else members
        self.prompt_text = prompt_text
        self.device = device
        self.dtype = dtype
        self.compiled = compiled
        self.new_tokens = new_tokens
        self.num_texts = num_texts
        self._ensembles: dict[tuple[int, ...], Ensemble] = {}

    def job(self, combination: Combination) -> BenchJob:
        """The combination, ready to be measured."""
        ensemble = self._ensemble(combination.parameters)
        tokens = combination.prompt_tokens
        batch = combination.batch
        cut = self._cutter(ensemble.tokenizer)
        num_batches = self.num_texts * math.ceil(combination.num_prompts / batch)
        texts = [[cut(tokens, text * batch + row) for row in range(batch)] for text in range(num_batches)]
        result = ensemble.measurement(tokens, batch, combination.branches, self.new_tokens)
        return BenchJob(ensemble, result, texts, combination.against)

    def _ensemble(self, parameters: tuple[int, ...]) -> Ensemble:
        if parameters not in self._ensembles:
            if len(parameters) not in (0, 1, len(self.members)):
                raise ValueError(
                    f"`--parameters` must be one size, or one for each of the {len(self.members)} members, but is "
                    f"{len(parameters)} sizes. Give one."
                )
            sizes = parameters * len(self.members) if len(parameters) == 1 else parameters
            members = [
                (self._prepare(model, size), tokenizer)
                for (model, tokenizer), size in itertools.zip_longest(self.members, sizes)
            ]
            self._ensembles[parameters] = Ensemble(members)
        return self._ensembles[parameters]

    def _prepare(self, model: Any, size: int | None) -> Any:
        """The model on the wanted device, in the wanted dtype and size, and compiled where that is wanted; a copy of it
        where something must be changed."""
        dtype = getattr(torch, self.dtype)
        if str(model.device.type) != self.device or model.dtype != dtype:
            model = copy.deepcopy(model).to(device=self.device, dtype=dtype)
        if size is not None:
            model = enlarge(model, size)
        if self.compiled:
            model = copy.copy(model)
            # On CUDA this mode makes CUDA graphs.
            model.forward = torch.compile(model.forward, mode="reduce-overhead" if self.device == "cuda" else None)
        return model

    def _cutter(self, tokenizer: Any) -> Callable[[int, int], str]:
        """A function that returns the prompt of a length and a number."""
        if self.prompt_text is None:
            from .members import prompt

            return lambda num_tokens, index: str(prompt(num_tokens, tokenizer, index))
        ids = tokenizer(self.prompt_text, add_special_tokens=False, verbose=False)["input_ids"]
        return lambda num_tokens, index: cut_prompt(ids, num_tokens, index, tokenizer)


def check_device(device: str) -> None:
    """Raises `ValueError` where the device is a GPU that is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("`--device` must be cpu, but is cuda: torch sees no GPU here. Leave it out.")


def default_members() -> Members:
    """The benchmark's pair, which ships with the package."""
    from .members import load_pair

    return list(load_pair())


def cut_prompt(ids: Sequence[int], num_tokens: int, index: int, tokenizer: Any) -> str:
    """
    The `index`-th piece of `num_tokens` tokens of a text. Where the text is used up, pieces begin again near its start.

    Args:
        ids (`list[int]`): the ids of the text.
        num_tokens (`int`): the length of a piece.
        index (`int`): the number of the piece, from 0.
        tokenizer (`PreTrainedTokenizerBase`): the tokenizer of the ids.

    Raises:
        ValueError: the text is shorter than one piece.
    """
    if len(ids) < num_tokens:
        raise ValueError(
            f"`--prompt-file` must hold at least {num_tokens} tokens, but holds {len(ids)}. Give a longer text, or ask "
            "for shorter prompts."
        )
    times_used_up, piece = divmod(index, len(ids) // num_tokens)
    start = (piece * num_tokens + 37 * times_used_up) % (len(ids) - num_tokens + 1)
    return str(tokenizer.decode(ids[start : start + num_tokens], clean_up_tokenization_spaces=False))


def read_prompt_file(path: str) -> str:
    """The text of the file of `--prompt-file`, which is in UTF-8."""
    return Path(path).read_text(encoding="utf-8")


def grid(
    parameters: tuple[int, ...],
    prompt_tokens: Sequence[int],
    batches: Sequence[int],
    branches: Sequence[int],
    against: tuple[str, ...],
) -> list[Combination]:
    """Every combination of these lengths, batch sizes and numbers of branches. All batch sizes read the same prompts:
    as many as all of them divide. Raises `ValueError` where that is many times the largest."""
    num_prompts = math.lcm(*batches)
    if num_prompts > _MOST_BATCHES * max(batches):
        raise ValueError(
            f"`--batch` must be sizes that divide {_MOST_BATCHES} times the largest or less, so that all read the same "
            f"prompts, but {','.join(map(str, batches))} take {num_prompts}. Ask for 1,2,4,8, say."
        )
    shapes = itertools.product(prompt_tokens, batches, branches)
    return [Combination(parameters, tokens, batch, b, against, num_prompts) for tokens, batch, b in shapes]
