"""`PaperJob`: makes a table or figure of the paper, from the questions to the files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ... import __version__
from ...demo.job_progress import Progress
from ...rounds.plain_json import with_nulls
from ..evaluation.candidates import Contestant
from ..evaluation.responses import Responses
from ..paper.clock import Clock, summarize
from ..paper.plots import save_parting, save_scores, save_times
from ..paper.report import Report, table, time_rows, times_json
from ..paper.rounds import find_disagreements
from ..paper.runs import PaperRun, Questions
from ..paper.scores import Scores, read_scores
from ..paper.values import Experiment, has_spans


class PaperJob:
    """
    Makes tables and figures of the same members, questions and folder.

    Args:
        members (`list[tuple]`): each member's model and tokenizer, the main model's first.
        names (`list[str]`): the members' names in tables.
        output (`Path`): the folder of the files.
        settings (`dict`): how the questions are asked, which the files record.
        batch_size (`int`): how many questions are asked at a time.
        progress (`bool`, *optional*): whether to show a bar, as of [`Progress`].
    """

    def __init__(
        self,
        members: Sequence[tuple[Any, Any]],
        names: Sequence[str],
        output: Path,
        settings: Mapping[str, Any],
        batch_size: int,
        progress: bool | None,
    ) -> None:
        self._members = members
        self._names = names
        self._output = output
        self._settings = settings
        self._batch_size = batch_size
        self._progress = progress

    def make(
        self, experiment: Experiment, questions: Questions, left_out: Mapping[str, str], most: int, has_plot: bool
    ) -> str:
        """
        Ask the questions, and write `NAME.md`, `NAME.json` and `NAME.png`.

        Args:
            experiment (`Experiment`): the table or figure.
            questions (`Questions`): the questions of its tasks.
            left_out (`dict[str, str]`): why a peer is left out, by its name.
            most (`int`): the most questions that figure 3 shows.
            has_plot (`bool`): whether to draw a picture.

        Returns:
            `str`: the text of `NAME.md`.
        """
        left_out = {**left_out, **questions.left_out}
        if experiment.name == "fig5":
            return self._times(experiment, questions, left_out, has_plot)
        bar = Progress(0, "answers", wanted=self._progress)
        run = PaperRun(self._members, questions, self._output / "answers", self._batch_size, bar.add)
        cells = experiment.cells(list(questions.tasks))
        bar.expect(sum(len(questions.prompts[task]) for task, _ in cells))
        report = self._report(experiment, list(questions.tasks), {}, left_out)
        scores: dict[tuple[str, Contestant], Scores] = {}
        try:
            for task, candidate in cells:
                bar.note(f"{experiment.name}: {report.label(candidate)}, {task}")
                samples = run.ask(task, candidate)
                scores[task, candidate] = read_scores(task, samples, has_spans(candidate), self._settings.get("metric"))
        finally:
            bar.close()
        report = replace(report, scores=scores)
        if has_plot:
            save_scores(report, self._path(experiment, "png"))
        if experiment.name == "fig3":
            return self._partings(report, run, most, has_plot)
        return self._write(experiment, report.markdown(), report.json())

    def _partings(self, report: Report, run: PaperRun, most: int, has_plot: bool) -> str:
        """Figure 3: the questions on which two candidates part, round by round."""
        first, second = report.experiment.candidates
        labels = ("one-word rounds", "adaptive rounds")
        blocks = []
        shown = {}
        pictured = []
        for task in report.tasks:
            files = [self._output / "answers" / run.samples_file(task, one) for one in (first, second)]
            found = find_disagreements(files[0], files[1], most)
            shown[task] = [one.json() for one in found.shown]
            blocks.append(f"## {task}\n\n```text\n{found.text(labels)}\n```")
            pictured += found.shown[:1]
        if has_plot and pictured:  # otherwise the picture of the scores stays
            save_parting(report.experiment.title, labels, pictured[0], self._path(report.experiment, "png"))
        text = report.markdown("\n\n".join(blocks))
        return self._write(report.experiment, text, report.json() | {"partings": shown})

    def _times(self, experiment: Experiment, questions: Questions, left_out: Mapping[str, str], has_plot: bool) -> str:
        """Figure 5: the time of each candidate."""
        prompts = [prompt for of_task in questions.prompts.values() for prompt in of_task]
        bar = Progress(len(prompts), "prompts", wanted=self._progress)
        bar.note(f"{experiment.name}: prompts by {len(experiment.candidates)} methods")
        members = self._members[: len(experiment.candidates[-1].members)]
        try:
            known = Responses(self._output / "answers" / "seconds.jsonl")
            taken = Clock(members, experiment.candidates, known, bar.add).time(prompts)
        finally:
            bar.close()
        timings = summarize(taken, experiment.candidates)
        report = self._report(experiment, list(questions.tasks), {}, left_out)
        labels = {candidate: report.label(candidate) for candidate in timings}
        if has_plot:
            save_times(experiment.title, labels, timings, self._path(experiment, "png"))
        text = report.text(f"{len(prompts)} prompts, mean ± standard error.", table(time_rows(labels, timings)))
        return self._write(experiment, text, report.json() | {"times": times_json(labels, timings), "taken": taken})

    def _report(
        self,
        experiment: Experiment,
        tasks: Sequence[str],
        scores: Mapping[tuple[str, Contestant], Scores],
        left_out: Mapping[str, str],
    ) -> Report:
        names = self._names[: 1 + max(member for one in experiment.candidates for member in one.members)]
        return Report(experiment, names, tasks, scores, left_out, self._settings)

    def _path(self, experiment: Experiment, suffix: str) -> Path:
        return self._output / f"{experiment.name}.{suffix}"

    def _write(self, experiment: Experiment, text: str, values: Mapping[str, Any]) -> str:
        found = json.dumps(with_nulls({"hf_adafuse": __version__, **values}), indent=1, ensure_ascii=False)
        self._path(experiment, "json").write_text(found + "\n", encoding="utf-8")
        self._path(experiment, "md").write_text(text, encoding="utf-8")
        return text
