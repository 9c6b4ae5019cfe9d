"""The command `hf-adafuse demo`: its arguments and its call. Loads nothing heavy before it runs."""

from __future__ import annotations

import argparse

from .flag_types import count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command, put on a parser of the caller's."""
    parser.add_argument("--questions", type=count, metavar="N", help="ask the first N questions of the test set")
    parser.add_argument("--folder", help="members of your own training (hf_adafuse/lab/training/demo_members.py)")
    parser.add_argument("--json", action="store_true", help="write one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    from ..demo.run import DEFAULT_QUESTIONS, run_demo

    run_demo(
        questions=DEFAULT_QUESTIONS if args.questions is None else args.questions, json=args.json, folder=args.folder
    )
    return 0
