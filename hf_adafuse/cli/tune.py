"""The command `hf-adafuse tune`: members and settings that answer a development set best, and the evidence."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .answer_bar import AnswerBar
from .answers import locked
from .arguments import add_member_arguments, add_stop_argument, count, member_names
from .few_shot import add_examples, add_few_shot_argument, first_answers
from .job_settings import begin_in_folder
from .questions import Question, Template, read_questions

if TYPE_CHECKING:
    from ..evaluation.candidates import Candidate
    from ..evaluation.halving import Look
    from ..evaluation.tuning import Plan

_DESCRIPTION = """\
Find the members and settings that answer questions best: every member alone, and every choice of members, of the main
one among them and of a rule. The questions are split: successive halving on one part drops the candidates that are
behind, and what is found is judged on the other part. Killed and started again, it goes on where it stopped."""

_DETAILS = """\
examples:
  hf-adafuse tune --data dev.jsonl --few-shot 5 --model A --assistant B --max-new-tokens 32 --output tuned
  hf-adafuse tune --data dev.jsonl --chat --metric last_number --model A --assistant B --budget 2000 --output tuned

A line of the data is {"question": ..., "answer": ...}, the answer a text or a list of accepted ones. A budget, like a
bar's total, counts answers: one candidate's to one question. The ensemble that did best on the questions searched is
chosen only where it is above the best member alone by more than --min-gain standard errors of the paired difference.

DIR/generation_config.json  for generate(generation_config=GenerationConfig.from_pretrained("DIR"), ...)
DIR/adafuse_config.json     the members, the main model first, and the settings; null: that member alone
DIR/evidence.json           every candidate with its figures, the split, the choice
DIR/answers/*.jsonl         all answers, for `hf-adafuse compare`
The rules: hf_adafuse/evaluation/candidates.py."""

TEMPLATE = "Question: {question}\\nAnswer:"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command, put on a parser of the caller's."""
    parser.description, parser.epilog = _DESCRIPTION, _DETAILS
    parser.add_argument("--data", required=True, metavar="FILE", help="questions with answers, in JSONL")
    parser.add_argument("--output", required=True, metavar="DIR", help="where the settings and the evidence go")
    parser.add_argument("--metric", default="exact_match", metavar="NAME", help="as of compare (default: exact_match)")
    parser.add_argument(
        "--template",
        metavar="TEXT",
        help=f"the prompt, with fields as {{name}} (default: {TEMPLATE}; {{question}} in chats)",
    )
    add_few_shot_argument(parser)
    parser.add_argument("--chat", action="store_true", help="make it a user's message in each member's chat template")
    add_stop_argument(parser, "the end of a line; with examples of several lines, an empty line; in chats none")
    parser.add_argument("--max-new-tokens", type=count, default=64, metavar="N", help="per answer (default: 64)")
    parser.add_argument("--batch-size", type=count, default=8, metavar="N", help="prompts at a time (default: 8)")
    parser.add_argument("--budget", type=count, metavar="Q", help="most answers to ask for (default: as planned)")
    parser.add_argument("--holdout", type=float, default=0.3, metavar="SHARE", help="held out (default: 0.3)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the split (default: 0)")
    parser.add_argument(
        "--min-gain", type=float, default=1.0, metavar="Z", help="standard errors above the best member (default: 1)"
    )
    parser.add_argument("--overwrite", action="store_true", help="start over: drop an earlier run's answers")
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="a bar on standard error (default: where that is a terminal)",
    )
    add_member_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    from ..evaluation.candidates import make_candidates
    from ..evaluation.metrics import METRICS
    from ..evaluation.tuning import make_plan

    if args.metric not in METRICS:
        raise ValueError(f"`--metric` must be one of {list(METRICS)}, but is {args.metric!r}. Choose one of these.")
    candidates = make_candidates(2 if args.model is None else 1 + len(args.assistant))
    template = Template(args.template or ("{question}" if args.chat else TEMPLATE))
    questions = _questions(args, template)
    lines = [question.line for question in questions]
    plan = make_plan(len(candidates), _num_alone(candidates), lines, args.holdout, args.seed, args.budget)
    output = Path(args.output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"`--output` must be a folder or a new name, but {args.output!r} is a file. Choose another.")
    (output / "answers").mkdir(parents=True, exist_ok=True)
    with closing(locked(output / "lock")):
        settings = _settings(args, template)
        _prepare(output, settings, args.overwrite)
        report, evidence = _search(args, candidates, questions, plan, output)
        report.write(output, {"settings": settings, **evidence})
    sys.stdout.write(f"{report.text()}\nWritten: {output}/generation_config.json, adafuse_config.json, evidence.json\n")
    return 0


def _search(
    args: argparse.Namespace, candidates: list[Candidate], questions: list[Question], plan: Plan, output: Path
) -> tuple[Any, dict[str, Any]]:
    from ..evaluation.asking import Asking, Panel
    from ..evaluation.tuning import tune
    from ..trees.shared_prefix import prefix_caching
    from .members import load_members
    from .tune_answers import TuneAnswers
    from .tune_report import TuneReport

    members = load_members(args.model, args.assistant, args.dtype, args.device_map, args.trust_remote_code)
    paths = [args.model, *args.assistant] if args.model else [model.name_or_path for model, _ in members]
    names = member_names(paths)
    panel = Panel(members, Asking(args.max_new_tokens, args.stop, args.chat))
    bar = AnswerBar(plan.most, args.progress)

    def look(at: Look, most: int) -> None:
        bar.expect(most)
        bar.say(f"{len(at.left)} left after {at.num_questions} questions")

    answers = TuneAnswers(output / "answers", questions, names, args.metric, args.batch_size, panel.ask, bar.add)
    try:
        with prefix_caching():
            tuning = tune(
                candidates,
                [question.line for question in questions],
                answers.evaluate,
                holdout=args.holdout,
                seed=args.seed,
                budget=args.budget,
                min_gain=args.min_gain,
                block=max(8, args.batch_size),
                on_look=look,
                tie_break=answers.tie_break,
            )
    finally:
        bar.close()
    report = TuneReport(tuning, candidates, names, paths, args.metric, args.data, args.min_gain)
    return report, {"seconds": round(bar.seconds, 1), "new_answers": bar.num_new}


def _questions(args: argparse.Namespace, template: Template) -> list[Question]:
    """The questions to ask; `args.stop` gets its default."""
    found = read_questions(args.data, template)
    if args.stop is None and not args.chat:
        has_lines = any("\n" in answer.strip() for answer in first_answers(found))
        args.stop = ["\n\n" if has_lines else "\n"]
    asked = add_examples(found, args.few_shot, template)
    for question in asked:
        error = question.error
        if error is None and not first_answers([question]):
            error = "must have the field 'answer', but has none"
        if error is not None:
            raise ValueError(f"line {question.line} of {args.data}: {error}. Mend it.")
    return asked


def _num_alone(candidates: list[Candidate]) -> int:
    return sum(candidate.is_alone for candidate in candidates)


def _settings(args: argparse.Namespace, template: Template) -> dict[str, Any]:
    """What the answers depend on, by flag."""
    names = ("model", "assistant", "dtype", "chat", "stop", "max_new_tokens", "few_shot")
    return {name: getattr(args, name) for name in names} | {"template": template.text}


def _prepare(output: Path, settings: dict[str, Any], overwrite: bool) -> None:
    """Check that the answers that are there were asked for in the same way."""
    sidecar = output / "settings.json"
    known = sorted((output / "answers").glob("*.jsonl"))
    begin_in_folder(sidecar, known, settings, overwrite)
