"""`FitReport`: says what `hf-adafuse fit` has found, in words and as a file. `headroom` shows a part of it."""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import __version__
from ...call.arguments import distinct_names
from ...cli.flag_types import escaped
from ...cli.job_settings import write_whole
from ...cli.member_flags import loading_flags
from ...confidence.calibration import FEW_QUESTIONS
from ...confidence.features import feature_names
from ...config import AdaFuseConfig
from ...demo.paired import Paired, mean, paired
from ...rounds.plain_json import with_nulls
from ..evaluation.fitting import FUSION, MIN_GAIN, SELECT, AnswerSource, Judged, best_of
from ..evaluation.headroom import Headroom, clopper_pearson
from .fit_answers import first_failure

# The settings with which an ensemble commits the main model's own greedy words alone.
ALONE = {"certainty_gate": 1e-9}
# The fewest questions won, with none lost, that the sign test calls clear (p < 0.05).
_FEWEST_WINS = 6


@dataclass(frozen=True)
class Figures:
    """
    What is known of the answers. Scores are 1 for a right answer and 0 for a wrong one, question by question.

    Attributes:
        judged (`Judged`): the scores of members, fusion and selection, and the choice between them.
        headroom (`Headroom`): how often members differ.
        majority (`list[float]`): the scores of the answer that most members give.
        drawn (`list[float]`): the scores of the most frequent of the answers that the best member samples.
        failed (`list[dict]`): the records of questions that were not answered.
        metrics (`str`): the names of the metrics by which answers are right or wrong.
    """

    judged: Judged
    headroom: Headroom
    majority: list[float]
    drawn: list[float]
    failed: list[dict[str, Any]]
    metrics: str


class FitReport:
    """
    What the command has found, in words and as a file.

    Args:
        figures (`Figures`): the figures.
        names (`list[str]`): the members' names in the report.
        paths (`list[str]`): the names by which the members are loaded.
        args (`Namespace`): the arguments of the command.
        template (`str`): the template of its prompts.
    """

    def __init__(
        self, figures: Figures, names: Sequence[str], paths: Sequence[str], args: argparse.Namespace, template: str
    ) -> None:
        self._figures = figures
        self._names = list(names)
        self._paths = list(paths)
        self._args = args
        self._template = template
        self._judged = figures.judged
        self._num = len(self._judged.fused)

    def text(self) -> str:
        """The report: the table, the headroom, the verdict, and what so few questions cannot tell."""
        lines = [
            f"{self._num} questions of {self._args.data}, {self._figures.metrics}, in points of 100 ± standard error;",
            f"differences to {self._best} alone, question by question:",
            "",
            *self._table(),
            *self._failures(),
            "",
            *show_headroom(self._figures.headroom, self._names, self._judged.members),
            "",
            *self._verdict(),
            *self._caveats(),
        ]
        return "\n".join(lines)

    @property
    def _best(self) -> str:
        return self._names[self._judged.best]

    def _rows(self) -> dict[str, list[float]]:
        """The scores of every way to answer, by its name in the table."""
        judged = self._judged
        number = len(self._names)
        ties = " (ties: lower NLL)" if number == 2 else ""  # where two members differ, each has one vote
        return {
            **{f"{name} alone": scores for name, scores in zip(self._names, judged.members, strict=True)},
            "recommended fusion": judged.fused,
            "select: the likeliest answer": judged.select,
            f"majority of the members{ties}": self._figures.majority,
            f"{number} drawn answers of {self._best}{ties}": self._figures.drawn,
            "what fit chooses by other questions": judged.nested,
            "any member right (the most for select)": judged.oracle,
        }

    def _table(self) -> list[str]:
        best = self._judged.members[self._judged.best]
        cells = [("", "right", "difference", "won, lost, tied")]
        for name, scores in self._rows().items():
            lead = paired(scores, best)
            is_best = name == f"{self._best} alone"
            counts = f"{lead.wins}, {lead.losses}, {lead.ties}" if _are_counts(scores) else "in part"
            shown = lead.difference.show(100, signed=True)
            cells.append((name, mean(scores).show(100), "(the best)" if is_best else shown, "" if is_best else counts))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return [
            f"  {name:<{widths[0]}}  {value:>{widths[1]}}  {lead:>{widths[2]}}  {counts:>{widths[3]}}".rstrip()
            for name, value, lead, counts in cells
        ]

    def _failures(self) -> list[str]:
        failed = self._figures.failed
        if not failed:
            return []
        return [
            "",
            f"Failed: {len(failed)} answers. A question that the members fail on is left out. A fused or drawn answer "
            f"that fails is wrong. {first_failure(failed)}",
        ]

    def _verdict(self) -> list[str]:
        judged = self._judged
        if isinstance(judged.choice, int):
            lines = [f"Use one member alone: {self._names[judged.choice]}."]
            for name, choice in (("Selection", SELECT), ("The recommended fusion", FUSION)):
                lines.append(f"{name} is {self._standing(judged.gain(choice))}.")
            return lines + self._equals()
        name = "select" if judged.choice == SELECT else "the recommended fusion"
        gain = judged.gain(judged.choice).difference
        worth = paired(judged.nested, judged.members[judged.best])
        lines = [
            f"Use {name}: {gain.show(100, signed=True)} points above {self._best} alone, for the passes of all "
            f"{len(self._names)} members.",
            f"Choosing it is worth {worth.difference.show(100, signed=True)} points, judged without the questions that "
            "it was chosen on.",
        ]
        if not worth.difference.value > worth.difference.error:
            lines.append(f"That is no clear gain: {self._best} alone may be as good. More questions would tell.")
        control = paired(judged.of(judged.choice), self._figures.drawn).difference
        if not control.value > control.error:
            lines.append(
                f"{len(self._names)} drawn answers of {self._best} do about as well: the gain may be one of further "
                f"answers, not of other members ({control.show(100, signed=True)} points above them)."
            )
        return lines

    def _standing(self, gain: Paired) -> str:
        """How an ensemble that was not chosen compares with the best member."""
        shown = f"{gain.difference.show(100, signed=True)} points"
        if gain.wins == gain.losses == 0:
            return f"right on the same questions as {self._best}, and costs more"
        if gain.difference.value <= 0:
            return f"not above {self._best} ({shown})"
        return f"not above {self._best} by more than {MIN_GAIN:g} standard error ({shown})"

    def _equals(self) -> list[str]:
        """A line that names the other members that are as good as the best one, within a standard error. Few questions
        tell so little that the line gives no advice."""
        judged = self._judged
        found = []
        for k, name in enumerate(self._names):
            lead = paired(judged.members[k], judged.members[judged.best]).difference
            if k != judged.best and not -lead.value > lead.error:
                found.append(f"{name} ({lead.show(100, signed=True)} points)")
        if not found:
            return []
        if self._num < FEW_QUESTIONS:
            return [f"{self._num} questions do not tell {self._best} from {', '.join(found)}."]
        return [f"As good on these questions, within a standard error: {', '.join(found)}. Take the cheaper one."]

    def _caveats(self) -> list[str]:
        number = self._num
        points = 100 * _FEWEST_WINS / number
        clear = f"differences below {points:.0f} points cannot" if points <= 100 else "no difference can"
        lines = ["", f"With {number} questions {clear} be told from luck (sign test, no question lost)."]
        if number < FEW_QUESTIONS:
            lines.append(
                f"{number} questions do not say what selection is worth, either: its calibration is fitted on even "
                f"fewer. Take {FEW_QUESTIONS} at least, better a hundred."
            )
        note = self._judged.calibration.note
        if note is not None and not note.startswith("fitted on"):
            lines.append(f"The calibration falls back: {note}.")
        return lines

    def command(self, path: Path) -> str:
        """The command that asks questions as those of the fit were asked: a calibration is of such answers."""
        args = self._args
        template = self._template.replace("\n", "\\n").replace("\t", "\\t")  # a backslash stays as it was typed
        words = ["hf-adafuse", "run", "QUESTIONS", "--output", "ANSWERS", "--adafuse", str(path)]
        words += [f"--template={template}", *(["--chat"] if args.chat else [])]
        words += [f"--stop={escaped(stop)}" for stop in args.stop or []]  # "=": a value may begin with a hyphen
        words += ["--max-new-tokens", str(args.max_new_tokens), *loading_flags(args)]
        if args.few_shot is None:
            return shlex.join(words)
        if not args.few_shot.isdecimal():
            return shlex.join([*words, "--few-shot", args.few_shot])
        examples = f"EXAMPLES has the first {args.few_shot} lines of {args.data}."
        return f"{shlex.join([*words, '--few-shot', 'EXAMPLES'])}\n{examples}"

    def write(self, path: Path) -> None:
        """Write the file. A kill leaves the old file or the new one, never a part."""
        content = json.dumps(with_nulls(self.to_dict()), indent=1, ensure_ascii=False, allow_nan=False)
        # Lists of numbers on one line.
        content = re.sub(r"\[[^\[\]{}\"]+\]", lambda numbers: " ".join(numbers[0].split()), content)
        write_whole(path, f"{content}\n")

    def to_dict(self) -> dict[str, Any]:
        """What the file holds: `members`, `adafuse_config`, and what speaks for them."""
        judged = self._judged
        names = distinct_names(self._paths)
        features = feature_names(len(names), self._args.with_ratings)
        calibration = {**judged.calibration.to_dict(), "members": names, "features": features}
        members = [self._paths[judged.choice]] if isinstance(judged.choice, int) else self._paths
        return {
            "hf_adafuse": __version__,
            "members": members,
            "adafuse_config": _config(judged.choice, calibration, self._args.with_ratings),
            "verdict": " ".join([*self._verdict(), *filter(None, self._caveats())]),
            "evidence": self._evidence(),
            # The calibration is of all members that were asked, also where one of them is to be used alone.
            **({} if judged.choice == SELECT else {"asked": self._paths, "calibration": calibration}),
        }

    def _evidence(self) -> dict[str, Any]:
        judged = self._judged
        args = self._args
        names = ("data", "few_shot", "chat", "stop", "max_new_tokens", "with_ratings")
        return {
            **{name: getattr(args, name) for name in names},
            "metric": self._figures.metrics,
            "template": self._template,
            "questions": self._num,
            "failed": [{"line": record["line"], "error": record["error"]} for record in self._figures.failed],
            "choice": self._names[judged.choice] if isinstance(judged.choice, int) else judged.choice,
            "best_member": self._best,
            "scores": {name: _figures(scores, judged.members[judged.best]) for name, scores in self._rows().items()},
            "members_differ": self._figures.headroom.differ,
        }


def show_headroom(
    headroom: Headroom, names: Sequence[str], members: Sequence[Sequence[float]] | None = None
) -> list[str]:
    """The lines that say how often members differ, what choosing could gain at most, and whom to ask alone. `members`:
    each member's scores, where the questions have answers."""
    n = headroom.num_questions
    differ = headroom.differ
    lines = [
        f"Headroom: the members differ on {differ} of {n} questions ({_percent(differ, n)}).",
        "On the others no choice among their answers changes anything.",
    ]
    if len(names) > 2:
        shown = [f"{names[a]} and {names[b]} on {number}" for (a, b), number in headroom.pairs.items()]
        lines.append(f"  {'; '.join(shown)}")
    if members is not None:
        best = best_of(members)
        saved = sum(max(scores) > scores[best] for scores in zip(*members, strict=True))
        return [
            *lines,
            f"{names[best]} is right most often ({mean(members[best]).show(100)} %). It is wrong and another member "
            f"right on {saved} of {n} questions:",
            f"so much can choosing gain at most ({_percent(saved, n)}).",
        ]
    lines.append(
        "So choosing gains that much at most over any member, and less, as members that differ may all be wrong."
    )
    if differ == 0:
        return [*lines, "Ask one member alone, the cheapest: they say the same."]
    width = max(map(len, names))
    lines += ["", f"  {'':<{width}}  others agree  others' log-probability of its answers, where they differ"]
    for name, agreement, belief in zip(names, headroom.agreement, headroom.belief, strict=True):
        lines.append(f"  {name:<{width}}  {100 * agreement:>10.1f} %  {_number(belief, '.2f')} nats per byte")
    reason = "most of the others say what it says" if len(names) > 2 else "the other finds its answers likelier"
    lines += [
        "",
        f"To ask one alone, ask {names[headroom.suggested]}: {reason}. That is a guess.",
        "`hf-adafuse fit` on a hundred questions with answers knows.",
    ]
    return lines


def _config(choice: AnswerSource, calibration: dict[str, Any], with_ratings: bool) -> dict[str, Any]:
    if isinstance(choice, int):
        return dict(ALONE)
    if choice == FUSION:
        return AdaFuseConfig.robust().to_dict()
    return {"method": "select", "calibration": calibration, **({"with_ratings": True} if with_ratings else {})}


def _figures(scores: Sequence[float], best: Sequence[float]) -> dict[str, Any]:
    """The mean of some scores, and their paired difference to the best member's. Where they are whole, also how many
    questions are won, lost and tied."""
    own = mean(scores)
    lead = paired(scores, best)
    counts = {"won": lead.wins, "lost": lead.losses, "tied": lead.ties, "p_value": lead.p_value}
    return {
        "right": own.value,
        "standard_error": own.error,
        "above_best": lead.difference.value,
        "above_best_standard_error": lead.difference.error,
        **(counts if _are_counts(scores) else {}),
    }


def _are_counts(scores: Sequence[float]) -> bool:
    """Whether each question is won or lost as a whole. Means over several partitions are won in part."""
    return {0.0, 1.0}.issuperset(scores)


def _percent(number: int, of: int) -> str:
    low, high = clopper_pearson(number, of)
    return f"{100 * number / of:.1f} %; 95 % interval: {100 * low:.1f} to {100 * high:.1f} %"


def _number(value: float, form: str = ".1f") -> str:
    return "?" if math.isnan(value) else format(value, form)
