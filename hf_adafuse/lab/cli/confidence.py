"""The command `hf-adafuse confidence`: measures how well members' probabilities tell right answers from wrong ones."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence

from ...demo.paired import Mean
from ...demo.tables import aligned
from ..evaluation.answer_confidences import Confidences, held_out_confidences
from ..evaluation.confidence_figures import auroc, bins, bootstrapped, calibration_error, risk
from .fit_arguments import add_asking_arguments

_DESCRIPTION = """\
Ask every member alone each question once, and say how well the best member's own probabilities, and those of all
members together, tell its right answers from its wrong ones. Killed and started again, it goes on where it stopped."""

_DETAILS = """\
examples:
  hf-adafuse confidence --data dev.jsonl --few-shot 5 --model A --assistant B --max-new-tokens 32

A line of the data is {"question": ..., "answer": ...}. What the members answer is kept in FILE.answers/: `hf-adafuse
fit`, called in the same way, goes on from there. Calibrations are fitted on one half of the questions and judge the
other half. Standard errors are by the bootstrap over questions; those of differences are paired."""

_COVERAGES = (0.1, 0.25, 0.5, 0.75, 1.0)
# With fewer right answers, or fewer wrong ones, the report says that its figures say little.
_FEW = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Put the arguments of the command on a parser."""
    add_asking_arguments(parser, _DESCRIPTION, _DETAILS)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code."""
    from .fit_answers import ask_members, score_of

    _, said, names = ask_members(args, with_answers=True)
    right = [[score_of(one.question, text, args.metric) for text in one.texts] for one in said]
    found = held_out_confidences(right, [one.rows for one in said], [one.question.prompt for one in said])
    sys.stdout.write("\n".join(show(found, names)) + "\n")
    return 0


def show(found: Confidences, names: Sequence[str]) -> list[str]:
    """The lines of the report: which confidences tell right from wrong, risk by coverage, the reliability diagram, and
    how often the answer of the highest confidence is right. `names`: those of the members."""
    best = names[found.best]
    right = found.is_right
    number = len(right)
    num_right = round(sum(right))
    lines = [f"{number} answers of {best}, the best member alone: {num_right} are right."]
    if num_right in (0, number):
        return [*lines, "All are right, or all are wrong: there is nothing to tell apart."]
    known = {
        f"{best}: mean per token": found.per_token,
        f"{best}: whole answer": found.whole,
        f"{best}: calibrated": found.own_calibrated,
        "all members: score": found.score,
        "all members: calibrated": found.calibrated,
    }
    return [
        *lines,
        "",
        "How well each confidence tells the right ones from the wrong ones, in points of 100 ± standard error:",
        *aligned([("", "AUROC", "to the first", "ECE"), *_compared(known, right)]),
        "",
        "Wrong answers in per cent, where only the surest ones are given:",
        *aligned([("given", *(f"{100 * share:.0f} %" for share in _COVERAGES)), *_risks(known, right)]),
        "",
        "Reliability of the calibrated confidence of all members:",
        *aligned([("confidence", "answers", "mean", "right"), *_reliability(found.calibrated, right)]),
        "",
        f"The members' answers of the highest such confidence: {round(sum(found.chosen_right))} of {number} are right,",
        f"AUROC {_points(bootstrapped(auroc, found.chosen, found.chosen_right))}, "
        f"ECE {_points(bootstrapped(calibration_error, found.chosen, found.chosen_right))}.",
        *(
            ["", f"{min(num_right, number - num_right)} right, or wrong, answers are few: these figures say little."]
            if min(num_right, number - num_right) < _FEW
            else []
        ),
    ]


def _compared(known: Mapping[str, list[float]], right: list[float]) -> Iterator[tuple[str, ...]]:
    """Yields for each confidence its AUROC, the difference to the first one's, and its calibration error (ECE)."""
    first = next(iter(known.values()))
    for name, values in known.items():
        lead = "" if values is first else _points(bootstrapped(auroc, values, right, first), signed=True)
        error = bootstrapped(calibration_error, values, right)
        yield name, _points(bootstrapped(auroc, values, right)), lead, _points(error)


def _risks(known: Mapping[str, list[float]], right: list[float]) -> Iterator[tuple[str, ...]]:
    for name, values in known.items():
        yield name, *(f"{100 * risk(values, right, share):.0f}" for share in _COVERAGES)


def _reliability(confidences: list[float], right: list[float]) -> Iterator[tuple[str, ...]]:
    for one in bins(confidences, right):
        yield f"{one.low:.1f} to {one.high:.1f}", str(one.number), f"{one.confidence:.2f}", f"{one.right:.2f}"


def _points(value: Mean, signed: bool = False) -> str:
    return value.show(100, signed=signed)
