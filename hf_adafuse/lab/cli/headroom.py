"""The command `hf-adafuse headroom`: what choosing among members' answers could gain, without labels."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from pathlib import Path

from ...cli.answers import check_output
from ...cli.arguments import member_names
from ...cli.few_shot import first_answers
from ...cli.job_settings import locked_folder
from .fit_arguments import add_asking_arguments, read_asked

_DESCRIPTION = """\
Ask every member alone each question once, and say how often they differ, what choosing among their answers could gain
at most, and whom to ask alone. Needs no answers in the data. Killed and started again, it goes on where it stopped."""

_DETAILS = """\
examples:
  hf-adafuse headroom --data questions.jsonl --few-shot examples.jsonl --model A --assistant B --max-new-tokens 32

A line of the data is {"question": ...}. Where every line has an "answer", too, it says what choosing could gain by
these. What the members answer is kept in FILE.answers/: `hf-adafuse fit`, called in the same way, goes on from there.
Intervals are Clopper and Pearson's, of 95 %."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command, put on a parser of the caller's."""
    parser.description = _DESCRIPTION
    parser.epilog = _DETAILS
    add_asking_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    from ..evaluation.headroom import Headroom
    from .fit_answers import PanelJobs, said_by, sames_of, score_of
    from .fit_report import show_headroom

    check_output(Path(args.output))
    questions, template = read_asked(args, with_answers=False)
    num_members = 1 + (len(args.assistant) if args.model is not None else 1)
    with closing(locked_folder(Path(f"{args.output}.answers"))):
        jobs = PanelJobs(args, questions, template)
        said = said_by(jobs.members(), questions, num_members)
        names = member_names(jobs.paths())
    found = Headroom.of([one.texts for one in said], [one.beliefs for one in said], sames_of(said, args.metric))
    scores = None
    if len(first_answers(questions)) == len(questions):
        right = [[score_of(one.question, text, args.metric) for text in one.texts] for one in said]
        scores = [list(of_member) for of_member in zip(*right, strict=True)]
    sys.stdout.write("\n".join(show_headroom(found, names, scores)) + "\n")
    return 0
