"""Reads files of answers, and scores each question: answers of `hf-adafuse run`, and lm-eval's `samples_*.jsonl`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...cli.questions import answers_of
from .metrics import METRICS

Record = dict[str, Any]
DEFAULT_METRIC = "exact_match"


@dataclass(frozen=True)
class Sample:
    """
    One answer.

    Attributes:
        number (`int`): the question's number: its line, or lm-eval's `doc_id`.
        question (`dict`): what was asked. Two files can be compared where this is the same.
        prompt (`str`), text (`str`): what a model read and wrote.
        answers (`list[str]`): the accepted answers.
        score (`float`): the score by the metric.
        rounds (`list[dict]`): the rounds, as `AdaFuseRound.to_dict()` makes them. Empty where the file has none.
    """

    number: int
    question: Record
    prompt: str
    text: str
    answers: list[str]
    score: float
    rounds: list[Record] = field(default_factory=list)


@dataclass(frozen=True)
class Results:
    """
    What a file holds.

    Attributes:
        path (`Path`): the file.
        metric (`str`): the name of the metric of the scores.
        samples (`dict[int, Sample]`): the answers by the numbers of their questions, in the file's order.
        filter (`str`, *optional*): the filter of lm-eval's samples whose scores are read. `None` for answers of `run`.
        failed (`list[int]`): the numbers of questions whose answer failed (`hf-adafuse run --on-error skip`).
        notes (`list[str]`): what the reader of a comparison should know, like the filter that was chosen.
    """

    path: Path
    metric: str
    samples: dict[int, Sample]
    filter: str | None = None
    failed: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_results(path: str | Path, metric: str | None = None, filter: str | None = None) -> Results:
    """
    Read a file of answers.

    Args:
        path (`str` or `Path`): the file.
        metric (`str`, *optional*): the name of the metric. By default `exact_match` for answers of `run`, and for
            lm-eval's samples the first that they have.
        filter (`str`, *optional*): the name of a filter, where lm-eval's samples have several. By default the first.

    Raises:
        ValueError: the file has another form or a question twice, there is no such metric, or a score is no number.
    """
    path = Path(path)
    records = _read(path)
    if "doc_id" in records[0]:
        return _of_lm_eval(path, records, metric, filter)
    if filter is not None:
        raise ValueError(
            f"`--filter` must be left out with answers of `hf-adafuse run`, but is {filter!r} for {str(path)!r}. Drop "
            "it, and give two files of one kind."
        )
    return _of_run(path, records, metric or DEFAULT_METRIC)


def _of_run(path: Path, records: list[Record], metric: str) -> Results:
    if metric not in METRICS:
        raise ValueError(f"`--metric` must be one of {list(METRICS)}, but is {metric!r}. Choose one of these.")
    samples: dict[int, Sample] = {}
    failed: list[int] = []
    for number, record in _numbered(path, records, "line"):
        question = record.get("input")
        if "error" in record:
            failed.append(number)
            continue
        if not isinstance(question, dict) or question.get("answer") is None:
            raise ValueError(
                f"The answers must have the accepted ones in `input` as `answer`, but line {number} of {str(path)!r} "
                "has none. Run questions that have the field `answer`."
            )
        text = str(record.get("text", ""))
        answers = answers_of(question["answer"])
        score = _number(path, number, metric, METRICS[metric](text, answers))
        samples[number] = Sample(
            number, question, str(record.get("prompt", "")), text, answers, score, record.get("rounds") or []
        )
    return Results(path, metric, samples, failed=failed)


def _of_lm_eval(path: Path, records: list[Record], metric: str | None, filter: str | None) -> Results:
    filters = list(dict.fromkeys(str(record.get("filter", "none")) for record in records))
    if filter is not None and filter not in filters:
        raise ValueError(f"`--filter` must be one of {filters}, but is {filter!r}. Choose one that {path.name} has.")
    chosen = filter or filters[0]
    notes = [f"{path.name} has the filters {', '.join(filters)}: {chosen} is read (--filter)."]
    records = [record for record in records if str(record.get("filter", "none")) == chosen]
    # What a sample holds as `perplexity` is a log-likelihood, from which the harness computes the figure of the set.
    named = [name for name in records[0].get("metrics") or [] if name != "perplexity"]
    names = [name for name in named if _as_number(records[0].get(name)) is not None]
    if not names or (metric is not None and metric not in names):
        given = "no metric that is a number" if not names else f"{metric!r}"
        raise ValueError(
            f"`--metric` must be one that {str(path)!r} has for each question (here {names}), but is {given}. "
            "Choose one of these, or run lm-eval with --log_samples on a task that has one."
        )
    metric = metric or names[0]
    samples = {}
    for number, record in _numbered(path, records, "doc_id"):
        doc = record.get("doc")
        samples[number] = Sample(
            number,
            doc if isinstance(doc, dict) else {"doc": doc},
            _prompt(record),
            _text(record),
            [str(record.get("target", ""))],
            _number(path, number, metric, record.get(metric)),
            record.get("rounds") or [],
        )
    return Results(path, metric, samples, chosen, notes=notes if len(filters) > 1 else [])


def _read(path: Path) -> list[Record]:
    """The lines of a file, at least one."""
    if not path.is_file():
        raise ValueError(f"The results must be a JSONL file, but {str(path)!r} is none. Check the name.")
    records = []
    for row, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"The results must be JSON, but row {row} of {str(path)!r} is not ({error}). Wait until it is written."
            ) from None
        if not isinstance(record, dict) or not ("doc_id" in record or "line" in record):
            raise ValueError(
                f"The results must be answers of `hf-adafuse run` or samples of lm-eval, but row {row} of "
                f"{str(path)!r} has neither `line` nor `doc_id`. Check the name."
            )
        records.append(record)
    if not records:
        raise ValueError(f"The results must not be empty, but {str(path)!r} is. Check the name.")
    return records


def _numbered(path: Path, records: Sequence[Record], key: str) -> list[tuple[int, Record]]:
    """The records with their numbers, which are in the field `key`. Each number may come once."""
    seen: set[int] = set()
    for record in records:
        number = record.get(key)
        if not isinstance(number, int) or number in seen:
            problem = f"{key} {number} twice" if isinstance(number, int) else f"`{key}` {number!r}"
            raise ValueError(
                f"The results must have the number of each question once, but {str(path)!r} has {problem}. "
                "Give a file that one run has written."
            )
        seen.add(number)
    return [(record[key], record) for record in records]


def _number(path: Path, number: int, metric: str, value: Any) -> float:
    found = _as_number(value)
    if found is None:
        raise ValueError(
            f"`{metric}` must be a number for each question, but is {value!r} for question {number} of {str(path)!r}. "
            "Choose another --metric."
        )
    return found


def _as_number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    return float(value) if is_number else None


def _prompt(record: Mapping[str, Any]) -> str:
    arguments = record.get("arguments")
    first = arguments.get("gen_args_0") if isinstance(arguments, dict) else None
    return str(first.get("arg_0", "")) if isinstance(first, dict) else ""


def _text(record: Mapping[str, Any]) -> str:
    """The text that was answered. In a multiple choice it is the most likely choice."""
    answers = record.get("filtered_resps") or record.get("resps") or [""]
    if len(answers) > 1 and all(isinstance(answer, list) and len(answer) == 2 for answer in answers):
        try:  # log-likelihoods of choices, each with whether it is the greedy text
            values = [float(value) for value, _ in answers]
            best = max(range(len(values)), key=values.__getitem__)
            return str(record["arguments"][f"gen_args_{best}"]["arg_1"])
        except (TypeError, ValueError, KeyError):
            pass
    first = answers[0]
    while isinstance(first, list):
        first = first[0] if first else ""
    return str(first)
