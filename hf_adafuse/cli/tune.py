"""The command `hf-adafuse tune`: members and settings that answer a development set best, and the evidence."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import AdaFuseConfig
from .arguments import add_member_arguments, add_stop_argument, member_loading, member_names
from .few_shot import add_prompt_arguments, default_stops, first_answers, put_behind, worked_examples
from .flag_types import count, name_list
from .job_settings import add_job_arguments, begin_in_folder, locked_folder
from .progress import Progress
from .questions import Question, Template, read_questions

if TYPE_CHECKING:
    from ..evaluation.candidates import Candidate
    from ..evaluation.halving import Look

_DESCRIPTION = """\
Find the members and settings that answer questions best: every member alone; and every pair of members and all of them
together (not the sets between), with each of them as the main one, by every rule. The questions are split, equal ones
to the same part: successive halving on one part drops the candidates that are behind, and what is found is judged on
the other part. Killed and started again, it goes on where it stopped."""

_DETAILS = """\
examples:
  hf-adafuse tune --data dev.jsonl --few-shot 5 --model A --assistant B --max-new-tokens 32 --output tuned
  hf-adafuse tune --data dev.jsonl --methods all,"word root" --model A --assistant B --assistant C --output tuned
  hf-adafuse tune --data dev.jsonl --chat --metric last_number --model A --assistant B --budget 2000 --output tuned

The rules are those in hf_adafuse/evaluation/candidates.py, or of --methods, and, where a main model's generation config
has settings, "the model's own settings". A line of the data is {"question": ..., "answer": ...}, the answer a text or a
list of accepted ones. A budget, like a bar's total, counts answers: one candidate's to one question. The ensemble that
did best on the questions searched is chosen only where it is above the best member alone by more than --min-gain
standard errors of the paired difference there, and not behind the member that is best on the questions held out; else
the member alone that is best on all questions. A question that a candidate fails on counts as wrong for it, and the
report says so.

DIR/generation_config.json  for generate(generation_config=GenerationConfig.from_pretrained("DIR"), ...)
DIR/adafuse_config.json     the members, the main model first, and the settings; null: that member alone
DIR/evidence.json           every candidate with its figures, the split, the choice
DIR/answers/*.jsonl         all answers, for `hf-adafuse compare`"""

TEMPLATE = "Question: {question}\\nAnswer:"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command, put on a parser of the caller's."""
    parser.description, parser.epilog = _DESCRIPTION, _DETAILS
    parser.add_argument("--data", required=True, metavar="FILE", help="questions with answers, in JSONL")
    parser.add_argument("--output", required=True, metavar="DIR", help="where the settings and the evidence go")
    parser.add_argument(
        "--methods", type=name_list, metavar="NAME,NAME",
        help="which rules, presets and methods are tried, as of `eval --methods`; all: methods and presets; rules: the "
        "rules (default: rules)",
    )  # fmt: skip
    parser.add_argument("--metric", default="exact_match", metavar="NAME", help="as of compare (default: exact_match)")
    parser.add_argument(
        "--template",
        metavar="TEXT",
        help=f"the prompt, with fields as {{name}} (default: {TEMPLATE}; {{question}} in chats)",
    )
    add_prompt_arguments(parser)
    add_stop_argument(parser, "the end of a line; with examples of several lines, an empty line; in chats none")
    parser.add_argument("--max-new-tokens", type=count, default=64, metavar="N", help="per answer (default: 64)")
    parser.add_argument("--budget", type=count, metavar="Q", help="most answers to ask for (default: as planned)")
    parser.add_argument("--holdout", type=float, default=0.3, metavar="SHARE", help="held out (default: 0.3)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the split (default: 0)")
    parser.add_argument(
        "--min-gain", type=float, default=1.0, metavar="Z", help="standard errors above the best member (default: 1)"
    )
    add_job_arguments(parser)
    add_member_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    from ..evaluation.candidates import make_candidates, rules_named
    from ..evaluation.metrics import METRICS
    from ..evaluation.tuning import make_plan

    if args.metric not in METRICS:
        raise ValueError(f"`--metric` must be one of {list(METRICS)}, but is {args.metric!r}. Choose one of these.")
    rules = None if args.methods is None else rules_named(args.methods)
    candidates = make_candidates(2 if args.model is None else 1 + len(args.assistant), rules)
    template = Template(args.template or ("{question}" if args.chat else TEMPLATE))
    questions = _questions(args, template)
    # What cannot be planned is refused before models are loaded.
    make_plan(len(candidates), _num_alone(candidates), **_split(args, questions))
    output = Path(args.output)
    with closing(locked_folder(output)):
        settings = _settings(args, template)
        _prepare(output, settings, args.overwrite)
        report, evidence = _search(args, candidates, questions, output)
        report.write(output, {"settings": settings, **evidence})
    sys.stdout.write(f"{report.text()}\nWritten: {output}/generation_config.json, adafuse_config.json, evidence.json\n")
    return 0


def _search(
    args: argparse.Namespace, candidates: list[Candidate], questions: list[Question], output: Path
) -> tuple[Any, dict[str, Any]]:
    from ..evaluation.asking import Asking, Panel
    from ..evaluation.candidates import with_own_settings
    from ..evaluation.tuning import make_plan, tune
    from ..trees.shared_prefix import prefix_caching
    from .members import load_members
    from .tune_answers import TuneAnswers
    from .tune_report import TuneReport

    members = load_members(args.model, args.assistant, **member_loading(args))
    paths = [args.model, *args.assistant] if args.model else [model.name_or_path for model, _ in members]
    stored = [_own_settings(model, path) for (model, _), path in zip(members, paths, strict=True)]
    candidates = with_own_settings(candidates, stored)
    names = member_names(paths)
    panel = Panel(members, Asking(args.max_new_tokens, args.stop, args.chat))
    split = _split(args, questions)
    bar = Progress(make_plan(len(candidates), _num_alone(candidates), **split).most, "answers", wanted=args.progress)
    answers = TuneAnswers(output / "answers", questions, names, args.metric, args.batch_size, panel.ask, bar.add)

    def on_look(look: Look, most: int) -> None:
        answers.check_any()
        bar.expect(most)
        bar.note(f"{len(look.left)} left after {look.num_questions} questions")

    try:
        with prefix_caching():
            tuning = tune(
                candidates,
                evaluate=answers.evaluate,
                **split,
                min_gain=args.min_gain,
                block=max(8, args.batch_size),
                on_look=on_look,
                tie_break=answers.tie_break,
            )
    finally:
        bar.close()
    report = TuneReport(tuning, candidates, names, paths, args.metric, args.data, answers.failures)
    return report, {"seconds": round(bar.seconds, 1), "new_answers": bar.num_new}


def _questions(args: argparse.Namespace, template: Template) -> list[Question]:
    """The questions to ask; `args.stop` gets its default."""
    found = read_questions(args.data, template)
    if args.stop is None and not args.chat:
        args.stop = default_stops(found)
    examples, others, source = worked_examples(found, args.few_shot, template)
    shown = {example.prompt for example in examples} - {None}
    asked = put_behind(examples, [question for question in others if question.prompt not in shown], source)
    if len(asked) < len(others):
        number = len(others) - len(asked)
        sys.stderr.write(f"hf-adafuse: {number} questions are among the worked examples, and are not asked\n")
    for question in asked:
        error = question.error
        if error is None and not first_answers([question]):
            error = "must have the field 'answer', but has none"
        if error is not None:
            raise ValueError(f"line {question.line} of {args.data}: {error}. Mend it.")
    return asked


def _split(args: argparse.Namespace, questions: list[Question]) -> dict[str, Any]:
    """What [`make_plan`] splits, and how; lines with the same prompt stay together."""
    prompts = {question.line: question.prompt for question in questions}
    split = {"questions": list(prompts), "group": prompts.__getitem__}
    return split | {"holdout": args.holdout, "seed": args.seed, "budget": args.budget}


def _own_settings(model: Any, path: str) -> AdaFuseConfig | None:
    """The settings in a member's generation config."""
    try:
        return AdaFuseConfig.coerce(getattr(model.generation_config, "adafuse_config", None))
    except ValueError as error:
        raise ValueError(f"The generation config of {path!r} must hold settings that can be used: {error}") from None


def _num_alone(candidates: list[Candidate]) -> int:
    return sum(candidate.is_alone for candidate in candidates)


def _settings(args: argparse.Namespace, template: Template) -> dict[str, Any]:
    """What the answers depend on, by flag."""
    names = ("model", "assistant", "dtype", "chat", "stop", "max_new_tokens", "few_shot")
    return {name: getattr(args, name) for name in names} | {"template": template.text}


def _prepare(output: Path, settings: dict[str, Any], overwrite: bool) -> None:
    """Check that the answers that are there were asked for in the same way."""
    sidecar = output / "settings.json"
    (output / "answers").mkdir(exist_ok=True)
    known = sorted((output / "answers").glob("*.jsonl"))
    begin_in_folder(sidecar, known, settings, overwrite)
    # What an earlier run has found: until this one has, it would pass for its own.
    if (output / "evidence.json").exists():
        for name in ("generation_config.json", "adafuse_config.json", "evidence.json"):
            (output / name).unlink(missing_ok=True)
