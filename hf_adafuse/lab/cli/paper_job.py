"""`PaperJob`: makes a table or figure of the paper, from the questions to the files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ... import __version__
from ...cli.job_settings import write_whole
from ...demo.job_progress import Progress
from ...rounds.plain_json import with_nulls
from ..evaluation.candidates import Contestant
from ..evaluation.responses import Responses
from ..paper.clock import NEW_TOKENS, Clock, summarize
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
        num_shown (`int`): the most questions that figure 3 shows.
        has_plots (`bool`): whether to draw pictures.
        batch_size (`int`): how many questions are asked at a time.
        progress (`bool`, *optional*): whether to show a bar, as of [`Progress`].
    """

    def __init__(
        self,
        members: Sequence[tuple[Any, Any]],
        names: Sequence[str],
        output: Path,
        settings: Mapping[str, Any],
        num_shown: int,
        has_plots: bool,
        batch_size: int,
        progress: bool | None,
    ) -> None:
        self._members = members
        self._names = names
        self._output = output
        self._settings = settings
        self._num_shown = num_shown
        self._has_plots = has_plots
        self._batch_size = batch_size
        self._progress = progress

    def make(self, experiment: Experiment, questions: Questions, limit: int | None, left_out: Mapping[str, str]) -> str:
        """
        Ask the questions, and write `NAME.json`, `NAME.md` and `NAME.png`.

        Args:
            experiment (`Experiment`): the table or figure.
            questions (`Questions`): the questions of its tasks, of which there is at least one.
            limit (`int`, *optional*): the most questions of a task that were to be asked, which the file records.
            left_out (`dict[str, str]`): why a candidate is left out, by its name.

        Returns:
            `str`: the text of `NAME.md`.

        Raises:
            ValueError: a file of answers in the folder is broken, or the settings do not suit the members.
            AdaFuseDecodingError: a member failed.
        """
        settings = {**self._settings, "limit": limit, "batch_size": self._batch_size}
        names = self._names[: 1 + max(member for one in experiment.candidates for member in one.members)]
        report = Report(experiment, names, list(questions.tasks), {}, {**left_out, **questions.left_out}, settings)
        if experiment.name == "fig5":
            return self._times(report, questions)
        bar = Progress(0, "answers", wanted=self._progress)
        run = PaperRun(self._members, questions, self._output / "answers", self._batch_size, bar.add)
        cells = experiment.cells(list(questions.tasks))
        bar.expect(sum(len(questions.prompts[task]) for task, _ in cells))
        scores: dict[tuple[str, Contestant], Scores] = {}
        try:
            for task, candidate in cells:
                bar.note(f"{experiment.name}: {report.label(candidate)}, {task}")
                samples = run.ask(task, candidate)
                scores[task, candidate] = read_scores(task, samples, has_spans(candidate), self._settings.get("metric"))
        finally:
            bar.close()
        report = replace(report, scores=scores)
        if experiment.name == "fig3":
            return self._partings(report, run)
        return self._write(experiment, report.markdown(), report.json(), partial(save_scores, report))

    def _partings(self, report: Report, run: PaperRun) -> str:
        """Figure 3: the questions on which two candidates part, round by round."""
        first, second = report.experiment.candidates
        labels = ("one-word rounds", "adaptive rounds")
        blocks = []
        shown = {}
        pictured = []
        for task in report.tasks:
            files = [self._output / "answers" / run.samples_file(task, one) for one in (first, second)]
            metric = report.scores[task, first].question_metric
            found = find_disagreements(files[0], files[1], self._num_shown, metric)
            shown[task] = [one.json() for one in found.shown]
            blocks.append(f"## {task}\n\n```text\n{found.text(labels)}\n```")
            pictured += found.shown[:1]
        draw = partial(save_scores, report)
        if pictured:
            draw = partial(save_parting, report.experiment.title, labels, pictured[0])
        text = report.markdown("\n\n".join(blocks))
        return self._write(report.experiment, text, report.json() | {"partings": shown}, draw)

    def _times(self, report: Report, questions: Questions) -> str:
        """Figure 5: the time of each candidate. Prompts are timed one at a time."""
        experiment = report.experiment
        prompts = [prompt for of_task in questions.prompts.values() for prompt in of_task]
        bar = Progress(len(prompts), "prompts", wanted=self._progress)
        bar.note(f"{experiment.name}: prompts by {len(experiment.candidates)} methods")
        members = self._members[: len(experiment.candidates[-1].members)]
        try:
            known = Responses(self._output / "answers" / "seconds.jsonl")
            clock = Clock(members, experiment.candidates, known, bar.add)
            taken = clock.time(prompts)
        finally:
            bar.close()
        timings = summarize(taken, experiment.candidates)
        asked = {"batch_size": 1, "max_new_tokens": NEW_TOKENS, "conditions": clock.conditions}
        report = replace(report, settings={**report.settings, **asked})
        labels = {candidate: report.label(candidate) for candidate in timings}
        text = report.text(f"{len(prompts)} prompts, mean ± standard error.", table(time_rows(labels, timings)))
        values = report.json() | {"times": times_json(labels, timings), "taken": taken}
        return self._write(experiment, text, values, partial(save_times, experiment.title, labels, timings))

    def _path(self, experiment: Experiment, suffix: str) -> Path:
        return self._output / f"{experiment.name}.{suffix}"

    def _write(self, experiment: Experiment, text: str, values: Mapping[str, Any], draw: Callable[[Path], None]) -> str:
        """Write the files, the numbers first. `draw`: draws the picture into a file."""
        picture = self._path(experiment, "png")
        picture.unlink(missing_ok=True)  # it shows an earlier run's numbers
        found = json.dumps(with_nulls({"hf_adafuse": __version__, **values}), indent=1, ensure_ascii=False)
        write_whole(self._path(experiment, "json"), found + "\n")
        write_whole(self._path(experiment, "md"), text)
        if self._has_plots:
            draw(picture)
        return text
