"""The command `hf-adafuse run`: answers a file of questions into a file, over any number of kills and processes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .answers import check_output
from .config_flags import adafuse_config, add_config_arguments, given_settings
from .few_shot import add_examples, add_prompt_arguments
from .file_jobs import Ask, FileJob, check_lines
from .flag_types import count
from .job_settings import add_job_arguments
from .member_flags import add_member_arguments, member_loading, member_settings
from .questions import Template, read_questions
from .text_flags import SAMPLING, STRUCTURED, add_stop_argument, add_text_arguments, read_text_arguments

_DESCRIPTION = """\
Answer many questions with an ensemble: one JSON object per line in, one per line out, in the same order, written as
they come. Killed and started again, it goes on where it stopped."""

_EXAMPLES = """\
examples:
  hf-adafuse run questions.jsonl --output answers.jsonl
  hf-adafuse run questions.jsonl --output answers.jsonl --model A --assistant B --template "Q: {question}\\nA:"
  hf-adafuse run squad --split validation --output answers.jsonl --model A --assistant B --template "{question}" --chat
  torchrun --nproc-per-node 2 -m hf_adafuse run questions.jsonl --output answers.jsonl

an answer:
  {"line": 1, "input": {"question": ...}, "prompt": ..., "text": ..., "words": 2, "finish_reason": "stop",
   "confidence": 0.731}
`finish_reason`: "stop" (the text came to its end, or to a --stop, which is not in it), "length" or "error". With an
error there is also "error", which says why, and the text until there. `confidence`: how sure the members are, from 0
to 1, or null; a score, and only of a calibrated method a probability. --rounds adds "rounds", as `generate --json`
writes them. `hf-adafuse compare` sets two such files side by side."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Put the arguments of the command on a parser."""
    parser.description = _DESCRIPTION
    parser.epilog = _EXAMPLES
    parser.add_argument("questions", help="a JSONL file, - for standard input, or a dataset's name or folder")
    parser.add_argument("--output", required=True, metavar="FILE", help="the answers, in JSONL")
    parser.add_argument(
        "--template", help="the prompt, with fields as {name} (default: {prompt}; with the demo pair its question form)"
    )
    add_prompt_arguments(parser)
    parser.add_argument("--split", help="the split of a dataset")
    parser.add_argument("--subset", help="the subset of a dataset")
    parser.add_argument(
        "--max-new-tokens", type=count, default=128, metavar="N", help="the most tokens of an answer (default: 128)"
    )
    add_stop_argument(parser, "none; with --few-shot the end of a line, or an empty line where answers have several")
    add_text_arguments(parser, "0")
    parser.add_argument("--rounds", action="store_true", default=None, help="also write each answer's rounds")
    parser.add_argument("--html", metavar="FOLDER", help="also write a page for each answer that shows its rounds")
    parser.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="at a bad line or an answer that fails: stop (default), or write an answer with an error and go on",
    )
    add_job_arguments(parser)
    add_member_arguments(parser)
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code."""
    adafuse_config(args)  # refuse wrong settings before models are loaded
    read_text_arguments(args)
    check_output(Path(args.output), args.questions, args.few_shot)
    if args.html is not None:
        Path(args.html).mkdir(parents=True, exist_ok=True)
    template = Template(args.template or default_template(args.model))
    found = read_questions(args.questions, template, args.split, args.subset)
    questions, stops = add_examples(found, args.few_shot, template)
    if args.stop is None and not args.chat:
        args.stop = stops
    if args.on_error == "stop":
        check_lines(questions, args.questions)

    from .batches import Processes

    processes = Processes.find()
    job = FileJob(
        source=args.questions,
        path=Path(args.output),
        questions=questions,
        settings=_settings(args, template),
        load=lambda: _load(args),
        failed={"text": "", "finish_reason": "error"},
        batch_size=args.batch_size,
        stops=args.on_error == "stop",
        overwrite=args.overwrite,
        progress=args.progress,
    )
    has_stopped = job.run(processes)
    if not has_stopped:  # after a stop the launcher ends the other processes
        processes.leave()
    return 1 if has_stopped else 0


def _load(args: argparse.Namespace) -> Ask:
    from .batches import Answerer
    from .members import load_members

    members = load_members(args.model, args.assistant, **member_loading(args))
    return Answerer(args, members).answer


def default_template(model: str | None) -> str:
    """The template where none is given: the demo's question form where no model is named, else the field `prompt`."""
    if model is not None:
        return "{prompt}"
    from ..demo.data import PROMPT  # the only form that the members of the demo know

    return PROMPT


def _settings(args: argparse.Namespace, template: Template) -> dict[str, Any]:
    """What the answers depend on, by flag. Flags that change no answer, like the batch size, are left out."""
    names = ("chat", "max_new_tokens", "stop", "rounds", "few_shot", "seed", *SAMPLING)
    settings = member_settings(args) | {name: getattr(args, name) for name in names} | {"template": template.text}
    settings |= {kind: (args.structured or {}).get(kind) for kind in STRUCTURED}
    return settings | given_settings(args)
