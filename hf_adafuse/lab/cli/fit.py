"""The command `hf-adafuse fit`: chooses settings by questions with answers, and says what speaks for them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from ...cli.answers import Record, check_output
from ...cli.job_settings import locked_folder
from ...cli.member_flags import member_names
from .fit_arguments import add_asking_arguments, read_asked

if TYPE_CHECKING:
    from ...cli.questions import Question
    from .fit_answers import MemberJobs, Said
    from .fit_report import FitReport

_DESCRIPTION = """\
Ask every member alone and the recommended fusion each question once, learn from a hundred questions with answers which
member is right when, and write what to use: one member, the fusion, or `select`, which takes of the members' own
answers the one that is most likely right. Killed and started again, it goes on where it stopped."""

_DETAILS = """\
examples:
  hf-adafuse fit --data dev.jsonl --few-shot 5 --model A --assistant B --max-new-tokens 32
  hf-adafuse fit --data dev.jsonl --chat --metric last_number --model A --assistant B --assistant C --out math.json
  hf-adafuse serve --adafuse adafuse.json

A line of the data is {"question": ..., "answer": ...}, the answer a text or a list of accepted ones. Take questions
like those that you will ask, 100 or more; all of them are asked, but for worked examples. A line may have a "metric" of
its own, so that short answers and sums go into one file.

FILE holds `members`, the main model first, `adafuse_config`, and `evidence`. --adafuse FILE of the other commands reads
members and settings, adafuse_config="FILE" in Python the settings.
FILE.answers/ holds all answers: members.jsonl, fusion.jsonl, samples-K.jsonl (drawn by member K, at temperature 0.7).

Selection is judged by cross-validation: no answer is judged by a calibration that has seen the question. `select` or
the fusion is chosen only where it is above the best member by more than one standard error of the paired difference."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Put the arguments of the command on a parser."""
    add_asking_arguments(parser, _DESCRIPTION, _DETAILS)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code."""
    from .fit_answers import MemberJobs

    output = Path(args.output)
    check_output(output, args.data, args.few_shot)
    questions, template = read_asked(args, with_answers=True)
    if len({question.prompt for question in questions}) < 2:
        raise ValueError(f"The questions must be 2 or more different ones, but {args.data!r} has 1. Give a hundred.")
    with closing(locked_folder(Path(f"{output}.answers"))):
        jobs = MemberJobs(args, questions, template)
        report = _fit(args, jobs, questions, template.text)
        report.write(output)
    sys.stdout.write(f"{report.text()}\n\nWritten: {output}. Ask as you asked here:\n  {report.command(output)}\n")
    return 0


def _fit(args: argparse.Namespace, jobs: MemberJobs, questions: Sequence[Question], template: str) -> FitReport:
    from ...confidence.features import feature_penalties
    from ..evaluation.fitting import Answered, best_of, judge
    from ..evaluation.headroom import Headroom, Same, vote
    from .fit_answers import drawn_answers, metrics_of, num_members_of, said_by, sames_of, score_of
    from .fit_report import Figures, FitReport

    num_members = num_members_of(args)
    _price(args, jobs, len(questions), num_members)
    records = jobs.members()
    said = said_by(records, questions, num_members)
    fused = {record["line"]: record for record in jobs.fusion()}
    sames = sames_of(said, args.metric)
    right = [[score_of(one.question, text, args.metric) for text in one.texts] for one in said]
    best = best_of(list(zip(*right, strict=True)))
    drawn = {record["line"]: record for record in jobs.samples(best, num_members)}

    def majority(one: Said, same: Same) -> float:
        winner = vote(one.texts, [1.0] * num_members, one.nlls, same)
        return 0.0 if winner is None else score_of(one.question, one.texts[winner], args.metric)

    def ensemble_of_one(one: Said, same: Same) -> float:
        texts, shares, nlls = drawn_answers(drawn[one.question.line])
        winner = vote(texts, shares, nlls, same)
        return 0.0 if winner is None else score_of(one.question, texts[winner], args.metric)

    judged = judge(
        Answered(
            right=right,
            rows=[one.rows for one in said],
            fused=[_scored(fused[one.question.line], one, args.metric) for one in said],
            groups=[one.question.prompt for one in said],
            penalties=feature_penalties(num_members, args.with_ratings),
        )
    )
    paths = jobs.paths()
    figures = Figures(
        judged=judged,
        majority=[majority(one, same) for one, same in zip(said, sames, strict=True)],
        drawn=[ensemble_of_one(one, same) for one, same in zip(said, sames, strict=True)],
        headroom=Headroom.of([one.texts for one in said], [one.beliefs for one in said], sames),
        failed=[record for record in [*records, *fused.values(), *drawn.values()] if "error" in record],
        metrics=metrics_of(said, args.metric),
    )
    return FitReport(figures, member_names(paths), paths, args, template)


def _scored(record: Record, said: Said, metric: str) -> float:
    from .fit_answers import score_of

    return 0.0 if "error" in record else score_of(said.question, record["text"], metric)


def _price(args: argparse.Namespace, jobs: MemberJobs, number: int, num_members: int) -> None:
    """Say what the job costs: the number of passes before anything is asked, and the time after the first batch."""
    each = 3 * num_members * args.max_new_tokens
    passes = -(-number // args.batch_size) * each
    sys.stderr.write(
        f"hf-adafuse: price: {number} questions x ({num_members} members' answers, 1 fused by all, {num_members} drawn "
        f"by the best) of at most {args.max_new_tokens} tokens: up to about {passes:,} passes of a member, "
        f"{args.batch_size} prompts each\n"
    )
    first = min(args.batch_size, number)
    jobs.members(first)
    jobs.fusion(first)
    seconds = jobs.seconds_a_question
    if first < number and {"members", "fusion"} <= seconds.keys():
        left = (number - first) * (2 * seconds["members"] + seconds["fusion"]) + first * seconds["members"]
        sys.stderr.write(
            f"hf-adafuse: price: about {_duration(left)} more, by the first {first} questions, if drawing answers is "
            "as fast as asking the members. Ctrl-C stops here; started again, it goes on\n"
        )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
