"""The command `hf-adafuse eval`: scores an ensemble, and its members alone, on tasks of lm-evaluation-harness."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...cli.config_flags import adafuse_config, add_config_arguments, given_settings
from ...cli.flag_types import count, name_list, whole_number
from ...cli.job_settings import add_job_arguments, begin_in_folder, file_name, locked_folder
from ...cli.member_flags import add_member_arguments, member_loading, member_names, member_settings
from ...config import AdaFuseConfig

if TYPE_CHECKING:
    from ...cli.members import ModelPair
    from ..evaluation.costs import Cost

_DESCRIPTION = """\
Score an ensemble on tasks of lm-evaluation-harness, with the standard error of every number. This package's own tasks,
nq, triviaqa, squad, gsm8k, flores_en_de and flores_de_en, ask files of yours (--data) or the datasets on the Hub, also
where the harness has a task of that name; demo has questions of its own; any other task of the harness works too."""

_EXAMPLES = """\
examples:
  hf-adafuse eval --tasks demo --methods all --limit 200  # the demo's members, its questions
  hf-adafuse eval --tasks nq,triviaqa --data FOLDER --model A --assistant B --members-alone --output results
  hf-adafuse eval --tasks triviaqa --data FOLDER --model A --assistant B --methods all
  hf-adafuse eval --tasks triviaqa --data FOLDER --model A --assistant B --methods "span,robust,word margin 1"
  hf-adafuse eval --tasks arc_easy --model A --assistant B --method words --limit 100

--data FOLDER holds one file per task, named by it (nq*.jsonl), with lines {"question": ..., "answer": ...}; an answer
is a text or a list of accepted ones. The first lines are the worked examples, the others are asked. Where a task asks
for log-likelihoods (multiple choice, perplexity), methods other than AdaFuse and words are scored by AdaFuse's span
rule, and differ in nothing but weights. --output DIR gets results.json and, per method, samples_TASK.jsonl, two of
which `hf-adafuse compare` sets side by side. Killed and started again with the same --output, it goes on where it
stopped: other members, settings or options of servers, or another version of hf_adafuse, need another DIR or
--overwrite."""

_SETTINGS = "settings.json"
_RESULTS = "results.json"
_MEMBER = "member-"
# The settings that `--methods` takes for all methods.
_OF_ALL = ("model_weights", "max_word_tokens", "word_boundary")
ENSEMBLE = "ensemble"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Put the arguments of the command on a parser."""
    parser.description = _DESCRIPTION
    parser.epilog = _EXAMPLES
    parser.add_argument("--tasks", required=True, type=name_list, metavar="TASK,TASK", help="names, or files of tasks")
    parser.add_argument("--data", metavar="FOLDER", help="the questions of this package's tasks (default: the Hub)")
    parser.add_argument("--include-path", metavar="FOLDER", help="further tasks")
    parser.add_argument("--members-alone", action="store_true", help="also each member alone, under the same code")
    parser.add_argument(
        "--methods", type=name_list, metavar="NAME,NAME",
        help="several methods, presets and rules, and the members alone: one table; all: methods and presets; rules: "
        "those of lab/evaluation/candidates.py. --weights, --max-word-tokens and --word-boundary are for all "
        "of them, but for rules and presets with weights of their own",
    )  # fmt: skip
    parser.add_argument("--limit", type=count, metavar="N", help="the first N questions of each task")
    parser.add_argument("--num-fewshot", type=whole_number, metavar="K", help="worked examples in a prompt")
    parser.add_argument(
        "--max-new-tokens", type=count, metavar="N", help="the most tokens of an answer (default: as the task says)"
    )
    parser.add_argument("--apply-chat-template", action="store_true", help="ask in chats, by each member's template")
    parser.add_argument("--output", metavar="DIR", help="where results, samples and what is known so far go")
    add_job_arguments(parser, "requests", "responses")
    add_member_arguments(parser)
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code."""
    adafuse_config(args)  # refuse wrong settings before models are loaded
    if args.methods is not None:
        _configs(args.methods, args)

    from ...demo.tables import aligned
    from ..evaluation import harness
    from ..evaluation.costs import cost_rows
    from ..evaluation.score_table import score_rows

    tasks = harness.load_tasks(args.tasks, args.data, args.num_fewshot, args.include_path)
    with ExitStack() as stack:
        output = None if args.output is None else Path(args.output)
        load = partial(_load, args)
        members = load() if output is None else _begin(output, args, stack, load)
        plan = harness.Plan(args.num_fewshot, args.limit, args.apply_chat_template, args.max_new_tokens)
        found: dict[str, dict[str, Any]] = {}
        costs: dict[str, Cost] = {}
        methods = _methods(args, members, output)
        for folder, name, lm in methods:
            found[name] = harness.evaluate(lm, tasks, plan)
            costs[name] = lm.cost
            if output is not None:
                harness.write_samples(output / folder, found[name])
        if output is not None:
            _write_summary(output / _RESULTS, args, found, costs)
    alone = [name for folder, name, _ in methods if folder.startswith(_MEMBER)]
    tables = [aligned(score_rows(found, alone), left=3)]
    if args.methods is not None:
        tables.append(aligned(cost_rows(costs, [costs[name] for name in alone]), left=1))
    sys.stdout.write("\n\n".join("\n".join(table) for table in tables) + "\n")
    return 0


def _load(args: argparse.Namespace) -> list[ModelPair]:
    """The members. Raises `ValueError` where they cannot be asked as the flags say."""
    from ...cli.members import load_members
    from ..evaluation.candidates import check_config

    members = load_members(args.model, args.assistant, **member_loading(args))
    for config in _configs_by_name(args, members[0][0]).values():
        check_config(members, config)
    return members


def _configs_by_name(args: argparse.Namespace, main: Any) -> dict[str, AdaFuseConfig]:
    """The settings of the ensemble, or of each method. `main`: the main model."""
    return {ENSEMBLE: adafuse_config(args, main)} if args.methods is None else _configs(args.methods, args)


def _methods(args: argparse.Namespace, members: list[ModelPair], output: Path | None) -> list[tuple[str, str, Any]]:
    """The ensemble or the methods, and each member where that is asked for. For each, its folder below `output`, its
    name, and the model as the harness sees it."""
    from ..evaluation.language_model import AdaFuseLM
    from ..evaluation.responses import Responses

    options = {"batch_size": args.batch_size, "progress": args.progress}

    def method(folder: str, name: str, members: list[Any], config: Any) -> tuple[str, str, Any]:
        (main, tokenizer), *others = members
        path = None if output is None else output / folder / "responses.jsonl"
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        lm = AdaFuseLM(
            main,
            [model for model, _ in others],
            tokenizer,
            [tokenizer for _, tokenizer in others],
            adafuse_config=config,
            responses=Responses(path),
            label=name,
            **options,
        )
        return folder, name, lm

    settings = _configs_by_name(args, members[0][0])
    folders = {name: ENSEMBLE if name == ENSEMBLE else f"method-{file_name(name)}" for name in settings}
    made = [method(folders[name], name, members, settings[name]) for name in settings]
    for number, member in enumerate(members if args.members_alone or args.methods else [], start=1):
        known = str(getattr(member[0], "name_or_path", "") or type(member[0]).__name__)
        made.append(method(f"{_MEMBER}{number}", f"member {number} ({member_names([known])[0]})", [member], False))
    return made


def _configs(names: list[str], args: argparse.Namespace) -> dict[str, AdaFuseConfig]:
    """By the name of a method, a preset or a rule, its settings: its own, over what the flags say for all, over the
    defaults."""
    from ..evaluation.candidates import fitted, rules_named

    given = {name: getattr(args, name) for name in _OF_ALL if getattr(args, name) is not None}
    flags = [name for name, value in given_settings(args).items() if value is not None]
    others = [flag for flag in flags if flag not in (*_OF_ALL, "weights")]
    if others:
        raise ValueError(f"`--methods` must come without settings of one method, but has {others}. Drop them.")
    num_members = max(2, 1 + len(args.assistant))
    rules = {name: fitted(rule, num_members) for name, rule in rules_named(names).items()}
    return {name: AdaFuseConfig.from_dict(given | rule) for name, rule in rules.items()}


def _begin(
    output: Path, args: argparse.Namespace, stack: ExitStack, load: Callable[[], list[ModelPair]]
) -> list[ModelPair]:
    """Make and lock the folder, load the members, and write the settings into it. Those of an earlier run there must be
    the same."""
    stack.enter_context(locked_folder(output))
    responses = sorted(output.glob("*/responses.jsonl"))
    samples = [path for one in responses for path in one.parent.glob("samples_*.jsonl")]
    files = [*responses, *samples, *output.glob(_RESULTS)]
    return begin_in_folder(output / _SETTINGS, files, _settings(args), args.overwrite, load)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the responses depend on beside the requests, by flag."""
    return member_settings(args) | given_settings(args)


def _write_summary(
    path: Path, args: argparse.Namespace, found: dict[str, dict[str, Any]], costs: dict[str, Cost]
) -> None:
    from ..evaluation.harness import write_results

    kept = {name: {key: results[key] for key in results if key != "samples"} for name, results in found.items()}
    asked = {name: value for name, value in vars(args).items() if name != "run"}
    spent = {name: asdict(cost) for name, cost in costs.items()}
    write_results(path, {"settings": asked, "methods": kept, "costs": spent})
