"""Has one method of the demo's table answer a list of questions, and counts what that cost.

A method has a name, members, and either an `AdaFuseConfig` or `"greedy"` for a member alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..config import AdaFuseConfig
from ..decoding.strategies.registry import has_adaptive_spans
from ..ensemble import AdaFuseEnsemble
from .data import DemoQuestion
from .paired import Mean, mean, paired

ModelPair = tuple[Any, Any]  # a model and its tokenizer
MAX_NEW_TOKENS = 24
# How many questions are asked once more, one by one, to count the passes.
NUM_ALONE = 10


@dataclass(frozen=True)
class Method:
    """
    One line of the table.

    Attributes:
        name (`str`): what the line is called.
        members (`tuple[int, ...]`): the indices of the members, the main model's first.
        how (`AdaFuseConfig` or `str`): the settings, or `"greedy"` for a member alone.
    """

    name: str
    members: tuple[int, ...]
    how: AdaFuseConfig | str


@dataclass(frozen=True)
class Result:
    """
    What a method gave on a set of questions.

    Attributes:
        method (`str`), members (`list[int]`): the name and the members of the [`Method`].
        words_per_round (`float`, *optional*), shares (`dict`, *optional*): the mean number of words in a round, and the
            share of rounds of 1, 2 and 3 words. The end of the text counts as a word. `None` for a member alone, and
            for methods whose rounds have no length of their own.
        passes_per_word (`float`, *optional*): the forward passes of all members per word, on `NUM_ALONE` of the
            questions, asked one by one. In a batch several questions would share passes. `None` where none was asked.
        seconds (`float`): the time for all questions in batches.
        answers (`list[str]`): the answer to each question.
        right (`list[bool]`): whether each answer is right.
    """

    method: str
    members: list[int]
    words_per_round: float | None
    shares: dict[int, float] | None
    passes_per_word: float | None
    seconds: float
    answers: list[str]
    right: list[bool]

    @property
    def accuracy(self) -> Mean:
        """The share of right answers, from 0 to 1."""
        return mean([float(is_right) for is_right in self.right])

    def to_dict(self) -> dict[str, Any]:
        """The fields, and `accuracy` with its `standard_error` in per cent."""
        accuracy = self.accuracy
        return {**asdict(self), "accuracy": 100 * accuracy.value, "standard_error": 100 * accuracy.error}


@dataclass
class _Tally:
    """What the batches of a method add up to: forward passes, words, and the number of words of each round."""

    passes: int = 0
    words: int = 0
    rounds: list[int] = field(default_factory=list)


def methods(num_members: int) -> list[Method]:
    """The lines of the table for the first 2 or 3 members, in order."""
    pair = (0, 1)
    lines = [Method(f"member {index + 1} alone", (index,), "greedy") for index in range(num_members)]
    lines.append(Method("best answer afterwards", pair, AdaFuseConfig(method="rerank")))
    lines += [Method(f"fixed {n}-word rounds", pair, AdaFuseConfig(commitment="fixed", max_words=n)) for n in (1, 2, 3)]
    for members in (pair, (0, 1, 2))[: num_members - 1]:
        lines += [Method(f"paper, B={b}", members, AdaFuseConfig(num_branches=b)) for b in (1, 3)]
        lines.append(Method("recommended", members, AdaFuseConfig.robust()))
    return lines


def answer(
    method: Method,
    members: list[ModelPair],
    questions: list[DemoQuestion],
    batch_size: int = 64,
    num_alone: int = NUM_ALONE,
    on_batch: Callable[[int], None] = lambda number: None,
) -> Result:
    """
    Answer all questions by one method, and `num_alone` of them once more, one by one, to count the passes.

    Args:
        method (`Method`): the method.
        members (`list[ModelPair]`): all members, of which the method takes its own.
        questions (`list[DemoQuestion]`): the questions.
        batch_size (`int`, *optional*, defaults to 64): how many questions are asked at a time.
        num_alone (`int`, *optional*, defaults to 10): how many questions are asked once more; 0: no pass is counted.
        on_batch (`Callable`, *optional*): told how many questions each batch has answered.

    Returns:
        `Result`: the answers, and what they cost.
    """
    tally = _Tally()
    answers: list[str] = []
    begun = time.perf_counter()
    for start in range(0, len(questions), batch_size):
        prompts = [question.prompt for question in questions[start : start + batch_size]]
        answers += _answers(method, members, prompts, tally)
        on_batch(len(prompts))
    seconds = time.perf_counter() - begun
    alone = _Tally()
    for question in questions[:: max(len(questions) // num_alone, 1)][:num_alone] if num_alone else ():
        _answers(method, members, [question.prompt], alone)
    sizes = tally.rounds
    return Result(
        method=method.name,
        members=list(method.members),
        words_per_round=sum(sizes) / len(sizes) if sizes else None,
        shares={size: sizes.count(size) / len(sizes) for size in (1, 2, 3)} if sizes else None,
        passes_per_word=alone.passes / alone.words if alone.words else None,
        seconds=seconds,
        answers=answers,
        right=[is_right(text, question) for text, question in zip(answers, questions, strict=True)],
    )


def is_right(text: str, question: DemoQuestion) -> bool:
    """Whether a text is the answer to a question, but for spaces around it."""
    return text.strip() == question.answer


def _answers(method: Method, members: list[ModelPair], prompts: list[str], tally: _Tally) -> list[str]:
    taking = [members[index] for index in method.members]
    if isinstance(method.how, AdaFuseConfig):
        return _fused(taking, prompts, method.how, tally)
    return _greedy(taking[0], prompts, tally)


def difference(one: Result, other: Result, rows: Sequence[int]) -> Mean:
    """How much more often `one` is right than `other` on the questions of these rows: the difference of the shares."""
    return paired([float(one.right[row]) for row in rows], [float(other.right[row]) for row in rows]).difference


def _greedy(member: ModelPair, prompts: list[str], tally: _Tally) -> list[str]:
    """The answers of a member alone."""
    model, tokenizer = member
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    sequences = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    new = sequences[:, inputs["input_ids"].shape[1] :]
    answers: list[str] = tokenizer.batch_decode(new, skip_special_tokens=True)
    tally.passes += int((new != tokenizer.pad_token_id).sum())
    tally.words += sum(len(text.split()) for text in answers) + int((new == tokenizer.eos_token_id).sum())
    return answers


def _fused(members: list[ModelPair], prompts: list[str], config: AdaFuseConfig, tally: _Tally) -> list[str]:
    output = fuse(members, prompts, config)
    sizes = [[len(committed.words) + committed.ends for committed in rounds] for rounds in output.rounds]
    if has_adaptive_spans(config.method):
        tally.rounds += [size for row in sizes for size in row]
    tally.words += sum(map(sum, sizes))
    tally.passes += sum(member["forward_passes"] for member in output.stats["members"])
    return ["".join(committed.text for committed in rounds) for rounds in output.rounds]


def fuse(members: list[ModelPair], prompts: list[str], config: AdaFuseConfig) -> Any:
    """What `generate()` returns for a batch of prompts, as an `AdaFuseOutput`."""
    return AdaFuseEnsemble(members, config).output(prompts, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
