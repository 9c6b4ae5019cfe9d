"""Calls lm-evaluation-harness: loads tasks, evaluates a method on them, and writes its scores and samples."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ...cli.job_settings import write_whole
from ...demo.paired import ratio_error
from ...settings.spelling import did_you_mean
from .local_data import KEYS

TASKS = Path(__file__).parent / "tasks"
_BOOTSTRAPS = 1000
_CORPUS_METRICS = ("chrf", "bleu", "spbleu")
# By metric, the score of a whole set, as a function of the mean log-likelihood (nats) per word or byte.
_LIKELIHOODS: dict[str, Callable[[float], float]] = {
    "word_perplexity": lambda mean: math.exp(-mean),
    "byte_perplexity": lambda mean: math.exp(-mean),
    "bits_per_byte": lambda mean: -mean / math.log(2),
}


@dataclass(frozen=True)
class Tasks:
    """Loaded tasks as `simple_evaluate` takes them, and the manager that has loaded them."""

    objects: list[Any]
    manager: Any


@dataclass(frozen=True)
class Plan:
    """
    How tasks are evaluated.

    Attributes:
        num_fewshot (`int`, *optional*): the number of worked examples. By default as the task says.
        limit (`int`, *optional*): how many questions of each task are asked, from the first. By default all.
        chat (`bool`): whether prompts are chats, by each member's template.
        max_new_tokens (`int`, *optional*): the most new tokens of an answer. By default as the task says.
        seed (`int`): the seed of torch.
    """

    num_fewshot: int | None = None
    limit: int | None = None
    chat: bool = False
    max_new_tokens: int | None = None
    seed: int = 1234


def check_installed() -> None:
    """Raises `ImportError` where lm-evaluation-harness is not installed."""
    try:
        import_module("lm_eval")
    except ImportError as error:
        raise ImportError(
            'Evaluation needs the package lm_eval. Install it with `pip install "hf_adafuse[eval]"`.'
        ) from error


def load_tasks(
    names: Sequence[str], data: str | None = None, num_fewshot: int | None = None, include_path: str | None = None
) -> Tasks:
    """
    Load tasks and their data.

    Args:
        names (`list[str]`): the names of this package's tasks or of the harness's, or files of tasks.
        data (`str`, *optional*): the folder with the questions of this package's tasks. By default they are loaded from
            the Hub.
        num_fewshot (`int`, *optional*): the number of worked examples in a prompt.
        include_path (`str`, *optional*): a folder with further tasks.

    Raises:
        ValueError: there is no such task, or its data does not load.
    """
    check_installed()
    from lm_eval.tasks import TaskManager

    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"`--include-path` must be a folder, but {include_path!r} is none. Check the name.")
    folders = [str(TASKS), *([include_path] if include_path else [])]
    metadata = {"data": data, "shots": num_fewshot}
    with _quiet():
        manager = TaskManager(include_path=folders, include_defaults=False, metadata=metadata)
        if any(name not in manager.all_tasks and not Path(name).is_file() for name in names):
            # The harness's own tasks, thousands of files, are read only where one is named.
            manager = TaskManager(include_path=folders, metadata=metadata)
        return Tasks([task for name in names for task in _load(manager, name)], manager)


def _load(manager: Any, name: str) -> list[Any]:
    if name not in manager.all_tasks and not Path(name).is_file():
        hint = did_you_mean(name, {*KEYS, *manager.all_tasks}, f"This package's own are {', '.join(KEYS)}.", most=3)
        raise ValueError(f"`--tasks` must be names of tasks with commas between, but {name!r} is none. {hint}")
    try:
        found = manager.load([name])
    except ValueError:
        raise
    except Exception as error:  # whatever a task's own code or the download of its data raises
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ValueError(f"`--tasks` must be tasks that load, but {name} does not ({reason}). See its data.") from error
    group = found["groups"].get(name)
    return list(found["tasks"].values()) if group is None else [group]


def evaluate(lm: Any, tasks: Tasks, plan: Plan) -> dict[str, Any]:
    """What `simple_evaluate` returns, with the standard errors that it leaves out and the rounds of each sample. The
    only bar is that of `lm`."""
    from lm_eval import simple_evaluate

    with _quiet(), _without_noise(), contextlib.redirect_stdout(sys.stderr):
        results: dict[str, Any] = simple_evaluate(
            model=lm,
            tasks=tasks.objects,
            num_fewshot=plan.num_fewshot,
            limit=plan.limit,
            apply_chat_template=plan.chat,
            gen_kwargs=None if plan.max_new_tokens is None else {"max_gen_toks": plan.max_new_tokens},
            task_manager=tasks.manager,
            bootstrap_iters=_BOOTSTRAPS,
            torch_random_seed=plan.seed,
        )
    for name, samples in results["samples"].items():
        _add_standard_errors(results["results"][name], samples)
    _add_rounds(results["samples"], lm)
    likelihoods = [name for name, one in results["configs"].items() if one.get("output_type") == "loglikelihood"]
    greedy = [name for name in likelihoods if any(key.startswith("acc,") for key in results["results"][name])]
    if greedy and len(lm.handles) > 1:
        warnings.warn(
            f"`acc` of {', '.join(greedy)} counts what every member would write by itself: what an "
            "ensemble writes is known by decoding. Ask for texts (`output_type: generate_until`) to compare it.",
            UserWarning,
            stacklevel=2,
        )
    return results


def ask(lm: Any, tasks: Tasks, plan: Plan) -> dict[str, list[dict[str, Any]]]:
    """By task, the samples as in [`evaluate`]. The harness's own figures and its survey of the machine are left out:
    they take seconds each time. The only bar is that of `lm`."""
    from lm_eval.evaluator import evaluate as ask_all

    with _quiet(), _without_noise(), contextlib.redirect_stdout(sys.stderr):
        loaded = tasks.manager.load(tasks.objects)
        for task in loaded["tasks"].values():
            if plan.max_new_tokens is not None:
                task.set_config("generation_kwargs", {"max_gen_toks": plan.max_new_tokens}, update=True)
            shots = task.get_config("num_fewshot") if plan.num_fewshot is None else plan.num_fewshot
            task.set_config("num_fewshot", shots or 0)
        results: dict[str, Any] = ask_all(
            lm=lm, task_dict=loaded, limit=plan.limit, bootstrap_iters=0, apply_chat_template=plan.chat
        )
    _add_rounds(results["samples"], lm)
    return dict(results["samples"])


def prompts(tasks: Tasks, plan: Plan) -> dict[str, list[str]]:
    """By task, the prompts that the harness asks a model, in order. Chats are as `contexts` makes them."""
    from .prompt_reader import PromptReader

    reader = PromptReader()
    ask(reader, tasks, plan)
    return reader.prompts


def _add_rounds(samples: dict[str, list[dict[str, Any]]], lm: Any) -> None:
    for name, of_task in samples.items():
        for sample in of_task:
            rounds = lm.rounds.get((name, sample["doc_id"]))
            if rounds is not None:
                sample["rounds"] = rounds


def _add_standard_errors(scores: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    """Add the standard errors that the harness leaves out: those of scores of a whole set, like BLEU and perplexity."""
    from .translation import standard_error

    errors: dict[str, Callable[[Any], float]] = {name: partial(standard_error, name) for name in _CORPUS_METRICS}
    errors |= {name: partial(ratio_error, of_ratio=figure) for name, figure in _LIKELIHOODS.items()}
    for metric, error in errors.items():
        pairs = [sample.get(metric) for sample in samples]
        key = f"{metric}_stderr,none"
        if scores.get(key) == "N/A" and len(pairs) > 1 and all(isinstance(pair, tuple) for pair in pairs):
            scores[key] = error(pairs)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within this context the harness logs errors only, and computes its figures in this process: torch's threads do
    not survive a fork."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    environment = os.environ.get("DISABLE_MULTIPROC")
    logger.setLevel(logging.ERROR)
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        logger.setLevel(before)
        if environment is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = environment


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """Within this context the harness shows no bar while it makes prompts, which takes no time, and does not ask git
    for its version. Outside a repository git would write "fatal" to standard error."""
    replaced: list[tuple[str, str, Callable[..., Any]]] = [
        ("lm_eval.api.task", "tqdm", lambda rows, **_: rows),
        ("lm_eval.evaluator", "get_git_commit_hash", lambda: None),
    ]
    before = [getattr(import_module(module), name, None) for module, name, _ in replaced]
    for module, name, stand_in in replaced:
        setattr(import_module(module), name, stand_in)
    try:
        yield
    finally:
        for (module, name, _), value in zip(replaced, before, strict=True):
            setattr(import_module(module), name, value)


def write_samples(folder: Path, results: dict[str, Any]) -> None:
    """Write one file per task, `samples_TASK.jsonl`, in the harness's own form."""
    from lm_eval.utils import handle_non_serializable, sanitize_list

    folder.mkdir(parents=True, exist_ok=True)
    for name, samples in results["samples"].items():
        lines = []
        for sample in samples:
            arguments = {
                f"gen_args_{i}": {f"arg_{j}": argument for j, argument in enumerate(given)}
                for i, given in enumerate(sample["arguments"])
            }
            record = sample | {
                "resps": sanitize_list(sample["resps"]),
                "filtered_resps": sanitize_list(sample["filtered_resps"]),
                "arguments": arguments,
                "target": str(sample["target"]),
            }
            lines.append(json.dumps(record, default=handle_non_serializable, ensure_ascii=False) + "\n")
        write_whole(folder / f"samples_{name.replace('/', '_')}.jsonl", "".join(lines))


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write results as JSON, without the samples, which have files of their own."""
    from lm_eval.utils import handle_non_serializable

    write_whole(path, json.dumps(results, default=handle_non_serializable, ensure_ascii=False, indent=1) + "\n")
