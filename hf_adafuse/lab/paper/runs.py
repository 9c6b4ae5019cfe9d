"""`PaperRun`: asks every candidate the questions of a table or figure of the paper, once, also over kills.

The answers go into a folder. It has for every candidate `responses.jsonl` with what it has answered so far, and
`samples_TASK.jsonl`, which `hf-adafuse compare` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..evaluation import harness
from ..evaluation.candidates import Contestant, check_config
from ..evaluation.language_model import AdaFuseLM
from ..evaluation.local_data import DEMO, find_files
from ..evaluation.responses import Responses
from .values import SHOTS, TASKS, slug

HarnessSample = dict[str, Any]  # a question with its answer and scores, as the harness makes it


@dataclass(frozen=True)
class Questions:
    """
    The questions of some tasks.

    Attributes:
        tasks (`dict[str, tuple[Tasks, Plan]]`): each task by its name, as the harness takes it.
        prompts (`dict[str, list[str]]`): the prompts of each task.
        left_out (`dict[str, str]`): why a task has no questions, by its name.
    """

    tasks: dict[str, tuple[harness.Tasks, harness.Plan]]
    prompts: dict[str, list[str]]
    left_out: dict[str, str]

    def only(self, names: Sequence[str], most: int | None = None) -> Questions:
        """The questions of these tasks alone, with at most `most` prompts of each."""
        return Questions(
            {name: self.tasks[name] for name in names if name in self.tasks},
            {name: self.prompts[name][:most] for name in names if name in self.prompts},
            {name: self.left_out[name] for name in names if name in self.left_out},
        )


def load_questions(
    names: Sequence[str], data: str | None, plan: harness.Plan, must_be_there: bool = False
) -> Questions:
    """
    The questions of these tasks.

    Args:
        names (`list[str]`): names of tasks, from `TASKS`.
        data (`str`, *optional*): the folder with the files of questions. By default they are loaded from the Hub.
        plan (`Plan`): how they are asked. Where it has no number of worked examples, the paper's number is
            taken.
        must_be_there (`bool`, *optional*, defaults to `False`): whether a task without questions is an error.

    Raises:
        ValueError: a file does not have the right form, no task has questions, or one has none that must have some.
    """
    tasks: dict[str, tuple[harness.Tasks, harness.Plan]] = {}
    prompts: dict[str, list[str]] = {}
    left_out: dict[str, str] = {}
    for name in names:
        if data is not None and name != DEMO and not must_be_there and not find_files(data, name):
            left_out[name] = f"no file {name}*.jsonl in {data}"
            continue
        shots = SHOTS.get(name) if plan.num_fewshot is None else plan.num_fewshot
        own = harness.Plan(shots, plan.limit, plan.chat, plan.max_new_tokens)
        try:
            tasks[name] = harness.load_tasks([name], data, shots), own
        except ValueError as error:
            if data is not None or must_be_there:
                raise
            left_out[name] = str(error)
            continue
        prompts |= harness.prompts(*tasks[name])
    if not tasks:
        where = "the Hub has" if data is None else f"{data!r} has"
        raise ValueError(
            f"`--data` must hold questions of {' or '.join(names)}, but {where} none ({'; '.join(left_out.values())}). "
            f"Give a folder with such files, or name another --task of {', '.join(TASKS)}."
        )
    return Questions(tasks, prompts, left_out)


def refused(members: Sequence[tuple[Any, Any]], candidates: Sequence[Contestant]) -> dict[Contestant, str]:
    """The candidates whose settings these members cannot honour, and why. So are beams and methods over tokens with a
    member behind a server. `members`: each member's model and tokenizer."""
    reasons = {}
    for candidate in dict.fromkeys(candidates):
        try:
            if candidate.config is not None:
                check_config([members[member] for member in candidate.members], candidate.config)
        except (ValueError, ImportError) as error:
            reasons[candidate] = str(error)
    return reasons


class PaperRun:
    """
    Members that answer.

    Args:
        members (`list[tuple]`): each member's model and tokenizer.
        questions (`Questions`): the questions.
        folder (`Path`): the folder of the answers.
        batch_size (`int`, *optional*, defaults to 8): how many questions are asked at a time.
        on_answers (`Callable`): told how many answers came, and whether they were known.
    """

    def __init__(
        self,
        members: Sequence[tuple[Any, Any]],
        questions: Questions,
        folder: Path,
        batch_size: int = 8,
        on_answers: Callable[[int, bool], None] = lambda number, known: None,
    ) -> None:
        self._members = list(members)
        self._questions = questions
        self._folder = folder
        self._batch_size = batch_size
        self._on_answers = on_answers

    def ask(self, task: str, candidate: Contestant) -> list[HarnessSample]:
        """The samples of a candidate's answers to a task, as the harness makes them."""
        tasks, plan = self._questions.tasks[task]
        folder = self._folder / slug(candidate)
        folder.mkdir(parents=True, exist_ok=True)
        responses = _Counted(folder / "responses.jsonl", self._on_answers)
        samples = harness.ask(self._language_model(candidate, responses), tasks, plan)
        self._on_answers(len(self._questions.prompts[task]) - responses.num_new, True)
        harness.write_samples(folder, {"samples": samples})
        return list(samples[task])

    def samples_file(self, task: str, candidate: Contestant) -> Path:
        """The file of these samples, as a path below the folder."""
        return Path(slug(candidate)) / f"samples_{task}.jsonl"

    def _language_model(self, candidate: Contestant, responses: Responses) -> AdaFuseLM:
        (main, tokenizer), *others = [self._members[member] for member in candidate.members]
        return AdaFuseLM(
            main,
            [model for model, _ in others],
            tokenizer,
            [other for _, other in others],
            adafuse_config=False if candidate.is_alone else candidate.config,
            batch_size=self._batch_size,
            responses=responses,
            progress=False,
        )


class _Counted(Responses):
    """Responses that tell `on_answers` when a new one comes."""

    def __init__(self, path: Path, on_answers: Callable[[int, bool], None]) -> None:
        super().__init__(path)
        self.num_new = 0
        self._on_answers = on_answers

    def add(self, kind: str, arguments: Sequence[Any], response: Any) -> None:
        super().add(kind, arguments, response)
        self.num_new += 1
        self._on_answers(1, False)
