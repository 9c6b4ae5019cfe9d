"""The command `hf-adafuse eval`: an ensemble, and its members alone, on the tasks of lm-evaluation-harness."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .arguments import (
    adafuse_config,
    add_config_arguments,
    add_member_arguments,
    count,
    given_settings,
    name_list,
    whole_number,
)

_DESCRIPTION = """\
Score an ensemble on tasks of lm-evaluation-harness, with the standard error of every number. This package's own tasks,
nq, triviaqa, squad, gsm8k, flores_en_de and flores_de_en, ask files of yours (--data) or the datasets on the Hub, also
where the harness has a task of that name; any other task of the harness works too."""

_EXAMPLES = """\
examples:
  hf-adafuse eval --tasks nq,triviaqa --data FOLDER --model A --assistant B --members-alone --output results
  hf-adafuse eval --tasks arc_easy --model A --assistant B --fusion word --limit 100

--data FOLDER holds one file per task, named by it (nq*.jsonl), with lines {"question": ..., "answer": ...}; an answer
is a text or a list of accepted ones. The first lines are the worked examples, the others are asked. --output DIR gets
results.json and, per method, samples_TASK.jsonl, two of which `hf-adafuse compare` sets side by side. Killed and
started again with the same --output, it goes on where it stopped."""

_SETTINGS = "settings.json"
ENSEMBLE = "ensemble"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command, put on a parser of the caller's."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument("--tasks", required=True, type=name_list, metavar="TASK,TASK", help="names, or files of tasks")
    parser.add_argument("--data", metavar="FOLDER", help="the questions of this package's tasks (default: the Hub)")
    parser.add_argument("--include-path", metavar="FOLDER", help="further tasks")
    parser.add_argument("--members-alone", action="store_true", help="also each member alone, under the same code")
    parser.add_argument("--limit", type=count, metavar="N", help="the first N questions of each task")
    parser.add_argument("--num-fewshot", type=whole_number, metavar="K", help="worked examples in a prompt")
    parser.add_argument("--batch-size", type=count, default=8, metavar="N", help="requests at a time (default: 8)")
    parser.add_argument("--max-new-tokens", type=count, metavar="N", help="per answer (default: as the task says)")
    parser.add_argument("--apply-chat-template", action="store_true", help="ask in chats, by each member's template")
    parser.add_argument("--output", metavar="DIR", help="where results, samples and what is known so far go")
    parser.add_argument("--overwrite", action="store_true", help="start over: drop an earlier run's responses")
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="a bar on standard error (default: where that is a terminal)",
    )
    add_member_arguments(parser)
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    adafuse_config(args)  # refuse wrong settings before models are loaded

    from ..evaluation import harness

    tasks = harness.load_tasks(args.tasks, args.data, args.num_fewshot, args.include_path)
    with ExitStack() as stack:
        output = None if args.output is None else _prepared(Path(args.output), args, stack)
        plan = harness.Plan(args.num_fewshot, args.limit, args.apply_chat_template, args.max_new_tokens)
        found: dict[str, dict[str, Any]] = {}
        for folder, name, lm in _methods(args, output):
            found[name] = harness.evaluate(lm, tasks, plan)
            if output is not None:
                harness.write_samples(output / folder, found[name])
        if output is not None:
            _write_summary(output / "results.json", args, found)
    sys.stdout.write("\n".join(_lines(harness.score_rows(found))) + "\n")
    return 0


def _methods(args: argparse.Namespace, output: Path | None) -> list[tuple[str, str, Any]]:
    """The ensemble and, if asked for, each member: folder, name and the model as the harness sees it."""
    from ..evaluation.language_model import AdaFuseLM
    from ..evaluation.responses import Responses
    from .members import load_members

    members = load_members(args.model, args.assistant, args.dtype, args.device_map, args.trust_remote_code)
    config = adafuse_config(args, members[0][0])
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

    made = [method(ENSEMBLE, ENSEMBLE, members, config)]
    for number, member in enumerate(members if args.members_alone else [], start=1):
        known = str(getattr(member[0], "name_or_path", "") or type(member[0]).__name__)
        made.append(method(f"member-{number}", f"member {number} ({Path(known).name})", [member], False))
    return made


def _prepared(output: Path, args: argparse.Namespace, stack: ExitStack) -> Path:
    """The folder, with the settings in it: those of an earlier run there must be the same."""
    from .answers import locked
    from .job_settings import begin_in_folder

    if output.exists() and not output.is_dir():
        raise ValueError(f"`--output` must be a folder or a new name, but {str(output)!r} is a file. Choose another.")
    output.mkdir(parents=True, exist_ok=True)
    sidecar = output / _SETTINGS
    known = sorted(output.glob("*/responses.jsonl"))
    stack.enter_context(locked(output / "lock"))
    begin_in_folder(sidecar, known, _settings(args), args.overwrite)
    return output


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the responses depend on, by flag, but for the requests themselves."""
    names = ("model", "assistant", "dtype")
    return {name: getattr(args, name) for name in names} | given_settings(args)


def _write_summary(path: Path, args: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    from ..evaluation.harness import write_results

    kept = {name: {key: results[key] for key in results if key != "samples"} for name, results in found.items()}
    asked = {name: value for name, value in vars(args).items() if name != "run"}
    write_results(path, {"settings": asked, "methods": kept})


def _lines(rows: list[tuple[str, ...]]) -> list[str]:
    from ..demo.tables import aligned

    return aligned(rows, left=3)
