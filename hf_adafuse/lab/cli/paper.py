"""The command `hf-adafuse paper`: makes the tables and figures of the AdaFuse paper on other models and questions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...cli.flag_types import count, name_list, option, whole_number
from ...cli.job_settings import add_job_arguments, begin_in_folder, locked_folder
from ...cli.member_flags import add_member_arguments, member_loading, member_names

if TYPE_CHECKING:
    from ..paper.runs import Questions
    from ..paper.values import Experiment
    from .paper_job import PaperJob

_CHOICES = ("table1", "table2", "fig2", "fig3", "fig4", "fig5", "fig6", "fig7", "all")
_ALL = _CHOICES[:-1]
_DESCRIPTION = """\
Make a table or figure of the AdaFuse paper (arXiv 2601.06022) on models and questions of your own, with the number of
questions, standard errors, differences question by question, and the words per round:

  table1  each member alone, peer methods, AdaFuse without branches (B = 1), on all tasks
  table2  2, 3, ... members, as given
  fig2    rounds of always 1, 2, 3 words, and adaptive ones
  fig3    questions on which one-word and adaptive rounds part, round by round
  fig4    B = 1 to 5; and with and without branching on all tasks
  fig5    wall-clock of the methods, one prompt at a time, 10 new tokens
  fig6    the margin threshold tau
  fig7    diverse branches, and beam search cut to the word, by B
  all     all of them"""

_DETAILS = """\
examples:
  hf-adafuse paper table1
  hf-adafuse paper table1 --model A --assistant B --data FOLDER --limit 300 --output results
  hf-adafuse paper fig6 --model A --assistant B --data FOLDER --task triviaqa,gsm8k

Without --model the members are the demo's: the first two, for table2 all three. Their questions are the demo's too (the
first 200, without --limit), unless --data or --task is given. With --model and without --data, the questions are those
on the Hub. --data FOLDER holds one file per task, named by it (nq*.jsonl, squad*.jsonl, triviaqa*.jsonl, gsm8k*.jsonl,
flores_en_de*.jsonl, flores_de_en*.jsonl), with lines {"question": ..., "answer": ...}; what is missing is said and left
out. The first lines are the worked examples (5; gsm8k 4, flores none), the others are asked.

LLM-Blender ranks by NLL, unless --peer-option blender.ranker=NAME names a PairRM (blender.fuser=NAME: a fuser).

DIR/NAME.md, .json, .png      what is printed, all its numbers, a picture
DIR/answers/WHO/*.jsonl       every answer with its rounds, for `hf-adafuse compare`
Killed and started again with the same --output, it goes on where it stopped; tables and figures share their answers."""

_METRICS = ("f1", "marked_number", "chrf")
# How many of the demo's questions are asked, and how many prompts fig5 times, without `--limit`.
_DEMO_LIMIT = 200
_NUM_TIMED = 20
# How many of the demo's members take part, where it is not two.
_DEMO_MEMBERS = {"table2": 3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Put the arguments of the command on a parser."""
    parser.description = _DESCRIPTION
    parser.epilog = _DETAILS
    parser.add_argument("what", choices=_CHOICES, metavar="NAME", help="which: see above")
    parser.add_argument("--data", metavar="FOLDER", help="the questions (default: see below)")
    parser.add_argument(
        "--task", type=name_list, metavar="TASK,TASK", help="ask these instead of the paper's (often nq alone)"
    )
    parser.add_argument("--limit", type=count, metavar="N", help="the first N questions of each task (fig5: 20)")
    parser.add_argument(
        "--peers", type=name_list, metavar="NAME,NAME", help="methods beside AdaFuse (default: the paper's)"
    )
    parser.add_argument(
        "--peer-option", type=option, action="append", default=[], metavar="PEER.NAME=VALUE",
        help="an option of a peer, e.g. unite.top_k=5; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--metric", choices=_METRICS, help="instead of the paper's, for the tasks that have it; asks nothing anew"
    )
    parser.add_argument("--show", type=count, default=3, metavar="N", help="how many questions fig3 shows (default: 3)")
    parser.add_argument("--num-fewshot", type=whole_number, metavar="K", help="worked examples in a prompt")
    parser.add_argument(
        "--max-new-tokens", type=count, metavar="N", help="the most tokens of an answer (default: as the task says)"
    )
    parser.add_argument("--apply-chat-template", action="store_true", help="ask in chats, by each member's template")
    parser.add_argument("--output", default="paper", metavar="DIR", help="where everything goes (default: paper)")
    parser.add_argument(
        "--plot", action=argparse.BooleanOptionalAction, default=True, help="pictures too (hf_adafuse[plots])"
    )
    add_job_arguments(parser, "requests")
    add_member_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code."""
    from ..evaluation.harness import check_installed

    check_installed()
    if args.plot:
        from ..benchmarks.plot import check_matplotlib

        check_matplotlib()
    if args.model is None and args.assistant:
        raise ValueError("`--model` must be given with `--assistant`, but is not. Name the main model.")
    experiments, left_out = _experiments(args)
    num_timed = _NUM_TIMED if args.limit is None else None
    tasks = {experiment.name: _tasks(args, experiment) for experiment in experiments}
    questions = _questions(args, [task for names in tasks.values() for task in names])
    output = Path(args.output)
    with ExitStack() as stack:
        _prepare(output, args, stack)
        job = _job(args, max(_num_members(args, experiment.name) for experiment in experiments), stack)
        for experiment in experiments:
            asked = questions.only(tasks[experiment.name], num_timed if experiment.name == "fig5" else None)
            text = job.make(experiment, asked, left_out if _has_peers(experiment) else {}, args.show, args.plot)
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
    sys.stdout.write(f"Written in {output}: {', '.join(tasks)}, each as .md, .json{', .png' * args.plot}\n")
    return 0


def _experiments(args: argparse.Namespace) -> tuple[list[Experiment], dict[str, str]]:
    """The tables and figures to make, and why some peers are left out, by the peers' names in tables."""
    from ...decoding.strategies.registry import STRATEGIES
    from ..paper.experiments import make_experiment
    from ..paper.values import PEERS, usable_peers

    unknown = [name for name in args.peers or [] if name not in STRATEGIES or name == "adafuse"]
    if unknown:
        others = [name for name in STRATEGIES if name != "adafuse"]
        raise ValueError(f"`--peers` must be of {', '.join(others)}, but has {unknown[0]!r}. Choose of these.")
    names = args.peers or list(PEERS)
    peers, left_out = usable_peers(names, _peer_options(args, names))
    if left_out and (args.peers or args.peer_option):
        raise ValueError(f"`--peers` must be methods that can be used, but are not: {'; '.join(left_out.values())}")
    made = [
        make_experiment(name, _num_members(args, name), peers)
        for name in (_ALL if args.what == "all" else (args.what,))
    ]
    if args.task:  # all candidates answer the tasks that the flag names
        made = [replace(experiment, few=()) for experiment in made]
    return made, left_out


def _peer_options(args: argparse.Namespace, peers: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The options of `--peer-option`, by peer."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in args.peer_option:
        peer, _, own = name.partition(".")
        if peer not in peers or not own:
            raise ValueError(
                f"`--peer-option` must be PEER.NAME=VALUE with a peer of {', '.join(peers)}, but is {name!r}. Check "
                "the spelling."
            )
        found.setdefault(peer, {})[own] = value
    return found


def _num_members(args: argparse.Namespace, name: str) -> int:
    return _DEMO_MEMBERS.get(name, 2) if _is_demo(args) else 1 + len(args.assistant)


def _is_demo(args: argparse.Namespace) -> bool:
    return args.model is None and not args.assistant


def _tasks(args: argparse.Namespace, experiment: Experiment) -> list[str]:
    from ..evaluation.local_data import DEMO

    if args.task:
        return list(args.task)
    return [DEMO] if _is_demo(args) and args.data is None else list(experiment.tasks)


def _questions(args: argparse.Namespace, names: Sequence[str]) -> Questions:
    from ..evaluation.harness import Plan
    from ..evaluation.local_data import DEMO
    from ..paper.runs import load_questions
    from ..paper.values import TASKS

    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise ValueError(f"`--task` must be of {', '.join(TASKS)}, but has {unknown[0]!r}. Check the spelling.")
    if args.limit is None and set(names) == {DEMO}:
        args.limit = _DEMO_LIMIT
    plan = Plan(args.num_fewshot, args.limit, args.apply_chat_template, args.max_new_tokens)
    return load_questions(list(dict.fromkeys(names)), args.data, plan, must_be_there=bool(args.task))


def _prepare(output: Path, args: argparse.Namespace, stack: ExitStack) -> None:
    """Make and lock the folder, and write the settings into it. Those of an earlier run there must be the same."""
    stack.enter_context(locked_folder(output))
    answers = output / "answers"
    answers.mkdir(exist_ok=True)
    known = sorted([*answers.glob("*/responses.jsonl"), *answers.glob("seconds.jsonl")])
    settings = {name: getattr(args, name) for name in ("model", "assistant", "dtype")}
    begin_in_folder(output / "settings.json", known, settings, args.overwrite)


def _job(args: argparse.Namespace, num_members: int, stack: ExitStack) -> PaperJob:
    from ...cli.members import load_members
    from ...demo import load_members as load_demo
    from ...demo.threads import threads
    from .paper_job import PaperJob

    members = load_members(args.model, args.assistant, **member_loading(args))
    if _is_demo(args):
        stack.enter_context(threads(1))  # the demo's matrices are so small that one thread is as fast
        members = members if num_members == len(members) else load_demo(num_members)
    paths = [args.model, *args.assistant] if args.model else [model.name_or_path for model, _ in members]
    names = (
        "data",
        "task",
        "metric",
        "limit",
        "num_fewshot",
        "max_new_tokens",
        "apply_chat_template",
        "batch_size",
        "dtype",
    )
    settings = {name: getattr(args, name) for name in names} | {"members": paths}
    return PaperJob(members, member_names(paths), Path(args.output), settings, args.batch_size, args.progress)


def _has_peers(experiment: Experiment) -> bool:
    return experiment.name in ("table1", "fig5")
