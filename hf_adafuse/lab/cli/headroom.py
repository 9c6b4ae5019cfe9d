"""The command `hf-adafuse headroom`: says what choosing among members' answers could gain, without right ones."""

from __future__ import annotations

import argparse
import sys

from ...cli.few_shot import first_answers
from .fit_arguments import add_asking_arguments

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
    """Put the arguments of the command on a parser."""
    add_asking_arguments(parser, _DESCRIPTION, _DETAILS)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code."""
    from ..evaluation.headroom import Headroom
    from .fit_answers import ask_members, sames_of, score_of
    from .fit_report import show_headroom

    questions, said, names = ask_members(args, with_answers=False)
    found = Headroom.of([one.texts for one in said], [one.beliefs for one in said], sames_of(said, args.metric))
    scores = None
    if len(first_answers(questions)) == len(questions):
        right = [[score_of(one.question, text, args.metric) for text in one.texts] for one in said]
        scores = [list(of_member) for of_member in zip(*right, strict=True)]
    sys.stdout.write("\n".join(show_headroom(found, names, scores)) + "\n")
    return 0
