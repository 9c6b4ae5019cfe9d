"""The command `hf-adafuse demo`: three small models decode together, and a table says what that gains."""

from __future__ import annotations

import argparse

from ..demo.data import DEFAULT_QUESTIONS
from .flag_types import count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Put the arguments of the command on a parser."""
    parser.add_argument(
        "--questions",
        type=count,
        default=DEFAULT_QUESTIONS,
        metavar="N",
        help=f"ask the first N of the 974 questions of the test set (default: {DEFAULT_QUESTIONS})",
    )
    parser.add_argument("--folder", help="members of your own training (hf_adafuse/lab/training/demo_members.py)")
    parser.add_argument("--json", action="store_true", help="write one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code."""
    from ..demo.run import run_demo

    run_demo(questions=args.questions, json=args.json, folder=args.folder)
    return 0
