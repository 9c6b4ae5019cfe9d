"""The command `hf-adafuse paper`: makes the tables and figures of the AdaFuse paper on other models and questions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...cli.flag_types import count, name_list, option, whole_number
from ...cli.job_settings import add_job_arguments, begin_in_folder, locked_folder
from ...cli.member_flags import add_member_arguments, member_loading, member_names, member_settings

if TYPE_CHECKING:
    from ...cli.members import ModelPair
    from ..evaluation.candidates import Contestant
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
Killed and started again with the same --output, it goes on where it stopped; tables and figures share their answers.
Other members, types of weights, tokenizers or options of servers, or another version of hf_adafuse, need another
--output or --overwrite. fig5 takes times anew on another machine, device, number of threads or version of torch.

With a member behind a server, fig5 and what needs all logits (beams, methods over tokens) are left out, with the
reason."""

_METRICS = ("f1", "marked_number", "chrf")
# How many of the demo's questions are asked, and how many prompts fig5 times, without `--limit`.
_DEMO_LIMIT = 200
_NUM_TIMED = 20
# How many questions fig3 shows, without `--show`.
_NUM_SHOWN = 3
# By flag, the tables and figures that it changes, where not all do.
_ANSWERED = tuple(name for name in _ALL if name != "fig5")
_WITH_PEERS = ("table1", "fig5")
_USES = {
    "peers": _WITH_PEERS,
    "peer_option": _WITH_PEERS,
    "show": ("fig3",),
    "metric": _ANSWERED,
    "max_new_tokens": _ANSWERED,
}
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
    parser.add_argument(
        "--show", type=count, metavar="N", help=f"how many questions fig3 shows (default: {_NUM_SHOWN})"
    )
    parser.add_argument("--num-fewshot", type=whole_number, metavar="K", help="worked examples in a prompt")
    parser.add_argument(
        "--max-new-tokens", type=count, metavar="N", help="the most tokens of an answer (default: as the task says)"
    )
    parser.add_argument("--apply-chat-template", action="store_true", help="ask in chats, by each member's template")
    parser.add_argument("--output", default="paper", metavar="DIR", help="where everything goes (default: paper)")
    parser.add_argument(
        "--plot", action=argparse.BooleanOptionalAction, default=True, help="pictures too (hf_adafuse[plots])"
    )
    add_job_arguments(parser, "requests", "answers, tables and figures")
    add_member_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code."""
    from ..evaluation.harness import check_installed

    check_installed()
    if args.plot:
        from ..benchmarks.plot import check_matplotlib

        check_matplotlib("pictures", ", or pass --no-plot")
    if args.model is None and args.assistant:
        raise ValueError("`--model` must be given with `--assistant`, but is not. Name the main model.")
    _check_flags(args)
    experiments, unusable = _experiments(args)
    tasks = [task for one in experiments for task in _tasks(args, one)]
    limit = _limit(args, tasks)
    questions = _questions(args, tasks, limit)
    limits = {one.name: _NUM_TIMED if one.name == "fig5" and args.limit is None else limit for one in experiments}
    asked = {one.name: questions.only(_tasks(args, one), limits[one.name]) for one in experiments}
    experiments = [one for one in experiments if _is_made(args, one, asked[one.name])]
    output = Path(args.output)
    with ExitStack() as stack:
        members, refused = _begin(output, args, experiments, stack)
        job = _job(args, members)
        for experiment in experiments:
            name = experiment.name
            left_out = {one.rule: refused[one] for one in experiment.candidates if one in refused}
            left_out |= unusable if name in _WITH_PEERS else {}
            text = job.make(experiment.without(refused), asked[name], limits[name], left_out)
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
    made = ", ".join(one.name for one in experiments)
    sys.stdout.write(f"Written in {output}: {made}, each as .md, .json{', .png' * args.plot}\n")
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """Raises `ValueError` where a flag is given that the table or figure has no use for."""
    for name, uses in _USES.items():
        if getattr(args, name) and args.what not in (*uses, "all"):
            raise ValueError(
                f"`--{name.replace('_', '-')}` must be left out with `paper {args.what}`, which has no use for it, but "
                "is given. Drop it."
            )


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
    _check_peers(args, list(left_out.values()))
    made = [
        make_experiment(name, _num_members(args, name), peers)
        for name in (_ALL if args.what == "all" else (args.what,))
    ]
    if args.task:  # all candidates answer the tasks that the flag names
        made = [replace(experiment, few=()) for experiment in made]
    return made, left_out


def _check_peers(args: argparse.Namespace, reasons: Sequence[str]) -> None:
    """Raises `ValueError` where flags name peers that cannot be used. Those that no flag names are left out.
    `reasons`: why peers cannot be used."""
    if reasons and (args.peers or args.peer_option):
        raise ValueError(f"`--peers` must be methods that can be used, but are not: {'; '.join(reasons)}")


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


def _limit(args: argparse.Namespace, tasks: Sequence[str]) -> int | None:
    """How many questions of each task are asked; `None` for all."""
    from ..evaluation.local_data import DEMO

    return _DEMO_LIMIT if args.limit is None and set(tasks) == {DEMO} else args.limit


def _questions(args: argparse.Namespace, names: Sequence[str], limit: int | None) -> Questions:
    from ..evaluation.harness import Plan
    from ..paper.runs import load_questions
    from ..paper.values import TASKS

    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise ValueError(f"`--task` must be of {', '.join(TASKS)}, but has {unknown[0]!r}. Check the spelling.")
    plan = Plan(args.num_fewshot, limit, args.apply_chat_template, args.max_new_tokens)
    return load_questions(list(dict.fromkeys(names)), args.data, plan, must_be_there=bool(args.task))


def _is_made(args: argparse.Namespace, experiment: Experiment, asked: Questions) -> bool:
    """
    Whether a table or figure can be made. Of all of them, those that cannot are left out, with the reason on standard
    error.

    Raises:
        ValueError: the one that is asked for cannot be made.
    """
    from ...cli.members import check_loaded_here

    try:
        if experiment.name == "fig5":
            check_loaded_here("paper fig5", args)
        if not asked.tasks:
            raise ValueError("; ".join(asked.left_out.values()))
    except ValueError as error:
        if args.what != "all":
            raise
        sys.stderr.write(f"hf-adafuse: {experiment.name} is left out: {error}\n")
        return False
    return True


def _begin(
    output: Path, args: argparse.Namespace, experiments: Sequence[Experiment], stack: ExitStack
) -> tuple[list[ModelPair], dict[Contestant, str]]:
    """Make and lock the folder, load the members, and write the settings into it. Those of an earlier run there must be
    the same. Returns what `_load` returns."""
    from ...demo.threads import threads

    stack.enter_context(locked_folder(output))
    answers = output / "answers"
    answers.mkdir(exist_ok=True)
    names = ("responses.jsonl", "samples_*.jsonl")
    files = [*answers.glob("seconds.jsonl"), *(path for name in names for path in answers.glob(f"*/{name}"))]
    files += [path for name in _ALL for path in output.glob(f"{name}.*") if path.suffix in (".md", ".json", ".png")]
    if _is_demo(args):
        stack.enter_context(threads(1))  # the demo's matrices are so small that one thread is as fast
    load = partial(_load, args, experiments)
    return begin_in_folder(output / "settings.json", files, member_settings(args), args.overwrite, load)


def _load(args: argparse.Namespace, experiments: Sequence[Experiment]) -> tuple[list[ModelPair], dict[Contestant, str]]:
    """
    Load the members. Returns each one's model and tokenizer, and why some candidates cannot answer with them.

    Raises:
        ValueError: a member does not load, or a candidate cannot answer that must not be left out.
    """
    from ...cli.members import load_members
    from ...demo import load_members as load_demo
    from ...ensemble import AdaFuseEnsemble
    from ..paper.runs import refused

    members = load_members(args.model, args.assistant, **member_loading(args))
    if _is_demo(args):
        num_members = max(_num_members(args, one.name) for one in experiments)
        members = members if num_members == len(members) else load_demo(num_members)
    candidates = [candidate for one in experiments for candidate in one.candidates]
    if args.apply_chat_template:  # a missing template is found before the first question
        for group in dict.fromkeys(candidate.members for candidate in candidates):
            AdaFuseEnsemble([members[member] for member in group]).encode(["?"], chat=True)
    reasons = refused(members, candidates)
    _check_peers(args, [reason for candidate, reason in reasons.items() if "method" in candidate.settings])
    for experiment in experiments:
        if experiment.headline in reasons:
            raise ValueError(reasons[experiment.headline])
    return members, reasons


def _job(args: argparse.Namespace, members: Sequence[ModelPair]) -> PaperJob:
    from .paper_job import PaperJob

    paths = [args.model, *args.assistant] if args.model else [model.name_or_path for model, _ in members]
    names = ("data", "task", "metric", "num_fewshot", "max_new_tokens", "apply_chat_template", "dtype")
    return PaperJob(
        members,
        member_names(paths),
        Path(args.output),
        {name: getattr(args, name) for name in names} | {"members": paths},
        num_shown=args.show or _NUM_SHOWN,
        has_plots=args.plot,
        batch_size=args.batch_size,
        progress=args.progress,
    )
