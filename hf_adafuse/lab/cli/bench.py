"""The command `hf-adafuse bench`: measures what an ensemble costs, and shows it as tables, JSON or a picture."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...cli.flag_types import count, name_list

if TYPE_CHECKING:
    from ..benchmarks.results import Measurement
    from ..benchmarks.targets import Target
    from ..benchmarks.workload import Combination, Workload

_DESCRIPTION = """\
Measure what decoding with an ensemble costs: seconds, words/s, forward passes, tokens and memory, for every combination
of prompt length, batch and number of branches B. Compared, in turn within one run after a warm-up, medians of several
repeats: each member's own greedy generate() of the same number of tokens, and our own code without one of its ideas;
where it is asked for, also a straightforward implementation. Speed depends on how often the members agree: shown
beside it.

In the tables, `/ ours` is a contender's time over the ensemble's, and `same text` says whether it wrote the same. The
lines below a table have the ensemble's time over that of the member that takes longest alone, and over all members in
turn."""

# `DEFAULT_AGAINST` of `measuring`, which takes too long to import for `--help`.
_AGAINST = "greedy,no-score-first,no-subtree,no-look-ahead,no-drafts,no-tree-attention,no-kernel"

_EPILOG = """\
what --against may name:
  greedy           each member's own generate() of as many tokens as the text has in its own vocabulary
  no-score-first   members propose without first reading what is in the pool
  no-subtree       what was computed below the committed path is dropped
  no-look-ahead    the member that goes first proposes one round at a time
  no-drafts        no tokens are guessed by what has followed the last ones before
  no-tree-attention  each branch a row of the batch with a copy of the keys above it, not all in one row
  no-kernel        linear layers over few tokens multiply as PyTorch has it, not in the quickest way (CPU)
  naive            no cache lives longer than a word: one repeat, on one text, minutes for long prompts

examples:
  hf-adafuse bench --parameters 80M --prompt-tokens 20,500 --batch 1,8
  hf-adafuse bench --model A --assistant B --prompt-file book.txt --json results.json --plot results.png
  hf-adafuse bench --parameters 80M --against greedy --methods all
  hf-adafuse bench --targets --parameters 80M
  hf-adafuse bench --device cuda --dtype bfloat16 --parameters 1B,8B --compile

--device cuda and --compile have not been tried on a GPU by the developers; the weight-reading bound printed under each
table is what they are to be held against. On a GPU each pass waits until it is done, to be timed: calls take longer
than without. With --compile the members' own generate() has a static cache, and on a GPU
both are run by CUDA graphs. On two CPU cores the demo pair is compiled 5 to 6 times in its first text, which takes 1.5
to 2 minutes, and seldom after that."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Put the arguments of the command on a parser."""
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    models = parser.add_argument_group("members (default: the benchmark's own pair, enlarged)")
    models.add_argument("--model", metavar="NAME", help="the main model: a Hub name or local folder")
    models.add_argument(
        "--assistant", metavar="NAME", action="append", default=[], help="a further member; may be given several times"
    )
    models.add_argument(
        "--parameters", type=_sizes, metavar="SIZE[,SIZE]",
        help="enlarge the members, e.g. 80M or 1B,8B (default: 80M; models of your own as they are)",
    )  # fmt: skip
    models.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    models.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    models.add_argument("--compile", action="store_true", help="torch.compile every forward pass")
    models.add_argument("--trust-remote-code", action="store_true", help="run the code in the models' repositories")
    _add_what_is_measured(parser.add_argument_group("what is measured"))
    output = parser.add_argument_group("output (default: tables)")
    output.add_argument(
        "--json", metavar="FILE", help="write everything, raw samples too; - for standard output, alone"
    )
    output.add_argument("--plot", metavar="FILE.png", help="draw the ratios against prompt length and batch")


def _add_what_is_measured(what: Any) -> None:
    def add(flag: str, default: str, help: str, type: Any = _counts, metavar: str = "N[,N]") -> None:
        what.add_argument(flag, type=type, default=default, metavar=metavar, help=f"{help} (default: {default})")

    add("--prompt-tokens", "20,500,2000", "lengths of the prompts")
    add("--batch", "1,8", "numbers of prompts at a time")
    add("--branches", "1,3", "numbers of branches B")
    add("--new-tokens", "64", "tokens to generate, the main model's", count, "N")
    add("--repeats", "3", "of which the medians are taken", count, "N")
    add(
        "--texts",
        "1",
        "how often to take as many prompts as all batch sizes divide; all sizes read the same prompts",
        count,
        "N",
    )
    add("--threads", "2", "CPU threads", count, "N")
    add("--against", _AGAINST, "what to compare with, see below", name_list, "NAME,...")
    what.add_argument(
        "--methods", type=name_list, metavar="NAME,...",
        help="also compare with other methods, with their defaults, e.g. unite,gac; or all",
    )  # fmt: skip
    what.add_argument("--prompt-file", metavar="FILE", help="cut prompts from this text (default: built-in prose)")
    what.add_argument(
        "--targets", action="store_true",
        help="measure what the project's targets need instead, of the shortest, a middle and the longest of "
        "--prompt-tokens, and print them",
    )  # fmt: skip
    what.add_argument(
        "--uneven",
        type=_sizes,
        metavar="SIZE,SIZE",
        help="members of one of the targets (default: 20M,160M; with models of your own the target is left out)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code."""
    if args.plot is not None and Path(args.plot).suffix != ".png":
        raise ValueError(f"`--plot` must be a file name that ends in .png, but is {args.plot!r}. Rename it.")
    for flag, file in (("--json", args.json), ("--plot", args.plot)):
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise ValueError(f"`{flag}` must be a file in a folder that exists, but is {file!r}. Make the folder.")
    from ...cli.members import check_loaded_here
    from ...demo.threads import threads
    from ..benchmarks import report
    from ..benchmarks.instruments import Load
    from ..benchmarks.measuring import METHODS, check_against
    from ..benchmarks.plot import check_matplotlib, save_plot

    load = Load()
    check_loaded_here("bench", args)
    if args.methods is not None:
        methods = list(METHODS) if "all" in args.methods else args.methods
        if unknown := [name for name in methods if name not in METHODS]:
            raise ValueError(f"`--methods` must be of {', '.join(METHODS)}, but has {unknown}. Check the spelling.")
        args.against += methods
    check_against(args.against)
    if args.plot is not None:
        check_matplotlib()
    with threads(args.threads):
        workload = _workload(args)
        measured, targets = _measure(args, workload)
        results = report.as_json(measured, targets, _settings(args), load.so_far())
        machine = report.format_machine(load.so_far())
    # What is printed cannot be lost by a file that cannot be written.
    if args.json == "-":
        print(json.dumps(results, allow_nan=False))
    else:
        print("\n".join([machine, *map(report.format_measurement, measured)]))
        if targets:
            print(report.format_targets(targets))
    if args.json is not None and args.json != "-":
        Path(args.json).write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if args.plot is not None:
        save_plot(measured, args.plot)
    return 0


def _workload(args: argparse.Namespace) -> Workload:
    from ...cli.members import load_members
    from ..benchmarks.workload import DEFAULT_PARAMETERS, Workload, check_device, read_prompt_file

    check_device(args.device)
    members = None
    if args.model is not None or args.assistant:
        members = load_members(args.model, args.assistant, args.dtype, args.device, args.trust_remote_code)
    elif args.parameters is None:
        args.parameters = DEFAULT_PARAMETERS
    text = None if args.prompt_file is None else read_prompt_file(args.prompt_file)
    return Workload(members, text, args.device, args.dtype, args.compile, args.new_tokens, args.texts)


def _measure(args: argparse.Namespace, workload: Workload) -> tuple[list[Measurement], list[Target]]:
    from ..benchmarks.measuring import measure_all
    from ..benchmarks.targets import UNEVEN_PARAMETERS, evaluate, plan
    from ..benchmarks.workload import grid

    parameters = args.parameters or ()
    combinations: dict[str, Combination]
    if args.targets:
        lengths = sorted(args.prompt_tokens)
        # Members of one's own cannot all be made to any size.
        args.uneven = args.uneven or (() if args.model or args.assistant else UNEVEN_PARAMETERS)
        combinations = plan(parameters, args.uneven, lengths[0], lengths[len(lengths) // 2], lengths[-1])
    else:
        made = grid(parameters, args.prompt_tokens, args.batch, args.branches, tuple(args.against))
        combinations = {str(index): combination for index, combination in enumerate(made)}
    jobs = {name: workload.job(combination) for name, combination in combinations.items()}
    measure_all(list(jobs.values()), args.repeats, lambda step: print(f"hf-adafuse: {step}", file=sys.stderr))
    measured = {name: job.result for name, job in jobs.items()}
    return list(measured.values()), evaluate(measured) if args.targets else []


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name not in ("run", "json", "plot")}


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_size(part) for part in text.split(","))


def _size(text: str) -> int:
    units = {"K": 10**3, "M": 10**6, "B": 10**9}
    number, unit = (text[:-1], text[-1:].upper()) if text[-1:].upper() in units else (text, "")
    try:
        size = float(number) * units.get(unit, 1)
    except ValueError:
        size = 0.0
    if not 1 <= size < 10**15:
        raise argparse.ArgumentTypeError(f"must be numbers of parameters such as 80M or 1B,8B, but is {text!r}")
    return round(size)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))
