"""The command `hf-adafuse compare`: compares two files of answers, question by question."""

from __future__ import annotations

import argparse
import sys

from ...cli.flag_types import whole_number

_DESCRIPTION = """\
How far the answers in B are above those in A: the difference question by question, with its standard error, and the
questions where they part, round by round where the files have rounds (`hf-adafuse run --rounds`)."""

_DETAILS = """\
examples:
  hf-adafuse compare alone.jsonl ensemble.jsonl --metric f1
  hf-adafuse compare alone/samples_gsm8k_*.jsonl ensemble/samples_gsm8k_*.jsonl --filter flexible-extract

The files are answers of `hf-adafuse run` to questions with a field `answer` (one, or a list of accepted
ones), or lm-eval's samples (`--log_samples`). Questions are paired by their line or `doc_id`, and must be the same in
both. One that only one file has, or whose answer failed, is left out and counted. p is that of the exact sign test; for
metrics of 0 or 1, McNemar's exact test. Shown are questions with other scores, the largest differences first, then
those where the texts alone part."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Put the arguments of the command on a parser."""
    parser.description = _DESCRIPTION
    parser.epilog = _DETAILS
    parser.add_argument("a", metavar="A.jsonl", help="the answers to compare with")
    parser.add_argument("b", metavar="B.jsonl", help="the answers whose gain is shown")
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="exact_match (default), f1, contains, last_number, marked_number, chrf or bleu; for lm-eval's samples one "
        "of theirs (default: the first)",
    )
    parser.add_argument("--filter", metavar="NAME", help="the filter of lm-eval's samples (default: A's first)")
    parser.add_argument(
        "--show",
        type=whole_number,
        default=5,
        metavar="N",
        help="how many questions are shown where they part (default: 5)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code."""
    from ..evaluation.disagreements import compare, show_disagreements, show_figures
    from ..evaluation.samples import read_results

    a = read_results(args.a, args.metric, args.filter)
    # Metric and filter are A's: B's own first ones may be others.
    comparison = compare(a, read_results(args.b, a.metric, a.filter or args.filter))
    sys.stdout.write(show_figures(comparison) + "\n")
    if args.show:
        sys.stdout.write("\n" + show_disagreements(comparison, args.show) + "\n")
    return 0
