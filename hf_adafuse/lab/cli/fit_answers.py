"""Asks the questions of `hf-adafuse fit`, `headroom` and `confidence`, and keeps the answers in files.

Three jobs share a folder. Each writes one record per question, like `hf-adafuse run`, and loses none by a kill.
`members.jsonl` has every member's own answer with the features by which `select` judges it. `fusion.jsonl` has the
answers of the recommended preset, and `samples-K.jsonl` answers that member K samples. `headroom` and `confidence` ask
only for the first, and `fit` goes on from what they have asked.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...cli.answers import Record, check_output, read_records
from ...cli.batches import Processes
from ...cli.file_jobs import Ask, FileJob, recording
from ...cli.job_settings import locked_folder
from ...cli.member_flags import member_loading, member_names, member_settings
from ...cli.questions import Question, Template, answers_of
from ...confidence.answer_text import cut_at
from ...confidence.features import feature_names
from ...rounds.plain_json import with_nulls
from ..evaluation.headroom import Same, same_by
from ..evaluation.metrics import METRICS
from .fit_arguments import read_asked

# The temperature of the answers that one member samples, as in self-consistency (arXiv 2203.11171, section 3.1).
TEMPERATURE = 0.7
_SEED = 0


@dataclass(frozen=True)
class Said:
    """
    What the members answer to a question.

    Attributes:
        question (`Question`): what was asked.
        texts (`list[str]`): each member's answer, up to a stop text; `None` where it has none.
        rows (`list[list[float]]`): for each member, the features of its answer; `None` where it has none.
        nlls (`list[float]`): for each member, the mean of the known NLLs of its answer over the members, in nats per
            token. Infinite where none is known.
    """

    question: Question
    texts: list[str | None]
    rows: list[list[float | None] | None]
    nlls: list[float]

    @property
    def beliefs(self) -> list[float | None]:
        """For each member, the mean log-probability that the others give its answer, in nats per byte."""
        at = feature_names(len(self.rows)).index("log-probability per byte, others")
        return [None if row is None else row[at] for row in self.rows]


class MemberJobs:
    """
    The three jobs of a folder.

    Args:
        args (`Namespace`): the arguments of the command.
        questions (`list[Question]`), template (`Template`): what [`read_asked`] returns.

    Attributes:
        seconds_a_question (`dict[str, float]`): how long a job's last batch took per question, by the job's name.
    """

    def __init__(self, args: argparse.Namespace, questions: Sequence[Question], template: Template) -> None:
        self._args = args
        self._questions = questions
        self._folder = Path(f"{args.output}.answers")
        names = ("chat", "stop", "max_new_tokens", "few_shot", "with_ratings")
        self._settings = member_settings(args) | {name: getattr(args, name) for name in names}
        self._settings["template"] = template.text
        self._loaded: list[Any] | None = None
        self._begun: set[str] = set()
        self.seconds_a_question: dict[str, float] = {}

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return self._folder

    def loaded(self) -> list[Any]:
        """Each member's model and tokenizer. They are loaded when this is first called."""
        from ...cli.members import load_members

        if self._loaded is None:
            args = self._args
            self._loaded = load_members(args.model, args.assistant, **member_loading(args))
        return self._loaded

    def paths(self) -> list[str]:
        """The names by which the members are loaded."""
        args = self._args
        return [args.model, *args.assistant] if args.model else [model.name_or_path for model, _ in self.loaded()]

    def members(self, number: int | None = None) -> list[Record]:
        """
        The records of every member's own answers.

        Args:
            number (`int`, *optional*): how many of the questions are asked, from the first. By default all.

        Raises:
            ValueError: the members have failed on all questions, or the file is of a version with other features.
        """
        if "members" not in self._begun and not self._args.overwrite:
            self._check_features()
        config = {"method": "select", "with_features": True, "with_ratings": self._args.with_ratings}
        records = self._run("members", "members' answers", self.loaded, config, {}, _candidates, number)
        if number is None and all("error" in record for record in records):
            (self._folder / "members.jsonl").unlink()  # so that a new run asks all again
            raise ValueError(
                f"The members must answer some of the questions, but all {len(records)} failed; the first, line "
                f"{records[0]['line']}: {records[0]['error'].removesuffix('.')}. Mend that, and start again."
            )
        return records

    def _check_features(self) -> None:
        path = self._folder / "members.jsonl"
        # That `--with-ratings` differs is told with the other settings.
        own, rated = (len(feature_names(num_members_of(self._args), with_ratings)) for with_ratings in (False, True))
        kept = (answer["features"] for record in read_records(path, 0)[0] for answer in record.get("answers", []))
        if others := {len(features) for features in kept if features} - {own, rated}:
            raise ValueError(
                f"The answers in {str(path)!r} must have the {own} features of this version of hf_adafuse, but have "
                f"{max(others)}. Use another --output, or start over with --overwrite."
            )

    def fusion(self, number: int | None = None) -> list[Record]:
        """The records of the recommended fusion's answers to the first `number` questions, by default to all."""
        return self._run("fusion", "fused answers", self.loaded, "robust", {}, _text, number)

    def samples(self, member: int, each: int) -> list[Record]:
        """The records of answers that a member samples: `each` answers to every question."""
        config = {"method": "majority", "num_samples": each}
        drawn = {"do_sample": True, "temperature": TEMPERATURE}
        name = f"samples-{member + 1}"
        return self._run(name, "drawn answers", lambda: [self.loaded()[member]], config, drawn, _candidates, None)

    def _run(
        self,
        name: str,
        kept: str,
        members: Callable[[], list[Any]],
        config: Any,
        drawn: dict[str, Any],
        shown: Callable[[Any, Sequence[str]], dict[str, Any]],
        number: int | None,
    ) -> list[Record]:
        """
        Ask the questions of one job that are still to be asked. Returns all its records.

        Args:
            name (`str`): the name of the job, and of its file.
            kept (`str`): what messages call its answers.
            members (`Callable`): returns the members, each a model and its tokenizer.
            config: the settings of the ensemble.
            drawn (`dict`): the arguments of `generate()` for sampling.
            shown (`Callable`): what a record holds of a question's rounds, given the stop texts.
            number (`int`, *optional*): how many questions are asked, from the first.
        """
        args = self._args
        path = self._folder / f"{name}.jsonl"
        overwrite = args.overwrite and name not in self._begun
        if number is not None and not overwrite and len(known := read_records(path, 0)[0]) >= number:
            return known
        job = FileJob(
            source=args.data,
            path=path,
            questions=self._questions[:number],
            settings=self._settings,
            load=lambda: self._load(name, members(), config, drawn, shown),
            failed={},
            batch_size=args.batch_size,
            stops=False,
            overwrite=overwrite,
            progress=args.progress,
            kept=kept if number is None else f"first {kept}",
            unit="answers",
            size_of=lambda record: len(record.get("answers", "1")),
        )
        self._begun.add(name)
        job.run(Processes())
        return read_records(path, 0)[0]

    def _load(
        self,
        name: str,
        members: list[Any],
        config: Any,
        drawn: dict[str, Any],
        shown: Callable[[Any, Sequence[str]], dict[str, Any]],
    ) -> Ask:
        import torch

        from ...ensemble import AdaFuseEnsemble

        args = self._args
        stops = args.stop or []
        ensemble = AdaFuseEnsemble(members, config)
        if args.chat:
            ensemble.encode(["?"], chat=True)  # a missing template is found before the first prompt

        def answer(questions: Sequence[Question], tell: Callable[[int, Any], None]) -> None:
            torch.manual_seed(_SEED)
            ensemble.rounds(
                [question.prompt or "" for question in questions],
                chat=args.chat,
                **({"do_sample": False} | drawn),
                max_new_tokens=args.max_new_tokens,
                stop_strings=args.stop,
                max_batch_size=args.batch_size,
                on_answer=tell,
            )

        ask_all = recording(answer, lambda rounds: with_nulls(shown(rounds, stops)))

        def ask(questions: Sequence[Question], on_record: Callable[[Record], bool]) -> bool:
            start = time.monotonic()
            is_over = ask_all(questions, on_record)
            self.seconds_a_question[name] = (time.monotonic() - start) / len(questions)
            return is_over

        return ask


def num_members_of(args: argparse.Namespace) -> int:
    """The number of members that the arguments name. Where they name none, the demo's two are asked."""
    return 1 + (len(args.assistant) if args.model is not None else 1)


def ask_members(args: argparse.Namespace, with_answers: bool) -> tuple[list[Question], list[Said], list[str]]:
    """
    Ask every member alone each question once. Questions whose answers are in the files are not asked again.

    Args:
        args (`Namespace`): the arguments of the command.
        with_answers (`bool`): whether every line of the data must have an answer.

    Returns:
        `tuple[list[Question], list[Said], list[str]]`: the questions, what the members say to those that did not fail,
        and the members' names.

    Raises:
        ValueError: as of [`read_asked`], or no question could be answered.
    """
    check_output(Path(args.output), args.data, args.few_shot)
    questions, template = read_asked(args, with_answers)
    jobs = MemberJobs(args, questions, template)
    with closing(locked_folder(jobs.folder)):
        records = jobs.members()
        failed = [record for record in records if "error" in record]
        if failed:
            sys.stderr.write(
                f"hf-adafuse: warning: {len(failed)} of {len(records)} questions are left out, because the members "
                f"failed on them. {first_failure(failed)}\n"
            )
        said = said_by(records, questions, num_members_of(args))
        return questions, said, member_names(jobs.paths())


def first_failure(failed: Sequence[Record]) -> str:
    """A sentence that says which of these records is the first, and why it failed."""
    return f"The first, line {failed[0]['line']}: {' '.join(str(failed[0]['error']).split())}"


def said_by(records: Sequence[Record], questions: Sequence[Question], num_members: int) -> list[Said]:
    """What the members say, by the records of `members.jsonl`. Questions that failed are left out."""
    known = {question.line: question for question in questions}
    made = []
    for record in records:
        if "error" in record:
            continue
        texts: list[str | None] = [None] * num_members
        rows: list[list[float | None] | None] = [None] * num_members
        nlls = [math.inf] * num_members
        for answer in record["answers"]:
            for k in answer["members"]:
                texts[k] = answer["text"]
                rows[k] = answer["features"]
                nlls[k] = _fused(answer["nlls"])
        made.append(Said(known[record["line"]], texts, rows, nlls))
    return made


def metric_of(question: Question, metric: str) -> str:
    """The name of the metric that judges the answers to a question: the one in its line, else the command's."""
    return str((question.record or {}).get("metric", metric))


def metrics_of(said: Sequence[Said], metric: str) -> str:
    """The names of the metrics that judge the answers. Where there are several, each has its number of questions."""
    counts = Counter(metric_of(one.question, metric) for one in said)
    return ", ".join(counts if len(counts) == 1 else (f"{name} ({number})" for name, number in counts.most_common()))


def score_of(question: Question, text: str | None, metric: str) -> float:
    """1 where an answer to a question is right, else 0. No answer (`None`) is wrong."""
    if text is None:
        return 0.0
    return METRICS[metric_of(question, metric)](text, answers_of((question.record or {})["answer"]))


def sames_of(said: Sequence[Said], metric: str) -> list[Same]:
    """For each question, the function that tells whether two answers to it say the same."""
    return [same_by(metric_of(one.question, metric)) for one in said]


def drawn_answers(record: Record) -> tuple[list[str], list[float], list[float]]:
    """The texts that a member has sampled, the share of its samples that each has, and their NLLs (nats per token). The
    lists are empty where it has failed."""
    found = record.get("answers", [])
    return [one["text"] for one in found], [one["share"] for one in found], [_fused(one["nlls"]) for one in found]


def _text(rounds: Any, stops: Sequence[str]) -> dict[str, Any]:
    return {"text": cut_at(rounds.text, stops), "finish_reason": rounds.finish_reason or "stop"}


def _candidates(rounds: Any, stops: Sequence[str]) -> dict[str, Any]:
    """What a record holds of a method that chooses among whole answers. They are the candidates of its first round."""
    found = [one for one in rounds[0].candidates if one.dropped is None and one.score < math.inf]
    return {
        "answers": [
            {
                "text": cut_at(one.text, stops),
                "members": one.proposers,
                "share": one.decided_by[0] if one.decided_by else 0.0,
                "nlls": one.nlls,
                "features": one.features,
            }
            for one in found
        ]
    }


def _fused(nlls: Sequence[float | None]) -> float:
    """The mean of the NLLs that are known; infinite where none is."""
    known = [value for value in nlls if value is not None]
    return math.fsum(known) / len(known) if known else math.inf
