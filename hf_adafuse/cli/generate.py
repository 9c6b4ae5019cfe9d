"""The command `hf-adafuse generate`: writes what follows a prompt to standard output."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from ..rounds.plain_json import with_nulls
from .config_flags import adafuse_config, add_config_arguments, settings_file
from .member_flags import add_member_arguments, member_loading
from .text_flags import (
    add_chat_arguments,
    add_length_argument,
    add_stop_argument,
    add_text_arguments,
    chat_options,
    read_prompt,
    read_text_arguments,
    sampling_options,
)

if TYPE_CHECKING:
    from ..ensemble import AdaFuseEnsemble
    from .streaming import TextWriter

_DESCRIPTION = """\
Generate text with an ensemble and write it to standard output as it comes: only the continuation, not the prompt."""

_EXAMPLES = """\
examples:
  hf-adafuse generate "What is the capital of Peru?"
  hf-adafuse generate --model A --assistant B "The capital of France is"
  hf-adafuse generate --model A --assistant B --chat --system "Be brief." "Name the capital of France."
  echo "The capital of France is" | hf-adafuse generate --model A --assistant B --trace"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Put the arguments of the command on a parser."""
    parser.description = _DESCRIPTION
    parser.epilog = _EXAMPLES
    parser.add_argument("prompt", nargs="?", help="the text to go on from; - or nothing: standard input")
    add_length_argument(parser, 128)
    add_stop_argument(parser)
    add_text_arguments(parser, "another text each time")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="write one JSON object instead: prompt, text, rounds, stats")
    shape.add_argument(
        "--trace", action="store_true", help="write the text with [each round] in brackets, then all candidates"
    )
    parser.add_argument(
        "--confidence",
        action="store_true",
        help="also write how sure the members are of the text and of each word, from 0 to 1 (--json always does)",
    )
    parser.add_argument("--html", metavar="FILE", help="also write a page that shows each round and its candidates")
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a user's message, read in each member's chat template"
    )
    add_chat_arguments(parser)
    add_member_arguments(parser)
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code."""
    prompt = read_prompt(args.prompt)
    adafuse_config(args)  # refuse wrong settings before models are loaded
    read_text_arguments(args)
    chat_options(args)

    from ..ensemble import AdaFuseEnsemble
    from .members import load_members
    from .streaming import SpanWriter, TextWriter

    if args.model is None and not args.chat:
        prompt = as_question(prompt)
    members = load_members(args.model, args.assistant, **member_loading(args))
    file = settings_file(args)
    if len(members) == 1 and not (file and file.members):  # a file may say to ask one alone
        name = _name(members[0][0])
        sys.stderr.write(f"hf-adafuse: {name} answers alone; with --assistant NAME it answers in an ensemble\n")
    ensemble = AdaFuseEnsemble(members, adafuse_config(args, members[0][0]))
    writer = None if args.json else (SpanWriter if args.trace else TextWriter)(members[0][1])
    try:
        output = answer(args, ensemble, opening(args, prompt) if args.chat else prompt, writer)
    finally:
        if writer is not None:
            writer.close()
    if args.html is not None:
        Path(args.html).write_text(output.rounds.to_html(prompt), encoding="utf-8")
    if args.json:
        sys.stdout.write(_as_json(prompt, output) + "\n")
    elif args.trace:
        from ..rounds.trace_text import format_trace

        sys.stdout.write("\n" + format_trace(output.rounds[0], [_name(model) for model, _ in members], output.stats))
    if args.confidence and not args.json:
        sys.stdout.write("\n" + show_confidence(output.rounds[0]))
    sys.stdout.flush()
    return 0


def show_confidence(rounds: Any) -> str:
    """A line that says how sure the members are of a text, and a line for each of its words."""
    if rounds.confidence is None:
        return "confidence  -\n"
    from ..rounds.trace_text import on_one_line, show_confidences

    meaning = "the probability that the answer is right" if rounds.is_calibrated else "a score, not a probability"
    lines = [f"confidence  {rounds.confidence:.2f}  ({meaning})"]
    for committed in rounds:
        for word, value in zip(committed.words, committed.confidences, strict=True):
            lines.append(f"      {show_confidences([value]).rjust(4)}  {on_one_line(word).strip(' ')}")
    return "\n".join(lines) + "\n"


def as_question(prompt: str) -> str:
    """The prompt in the only form that the demo's members know: `Question: ...`, and `Answer:` on the next line."""
    from ..demo.data import PROMPT

    return prompt if prompt.startswith("Question:") else PROMPT.format(question=prompt.strip())


def opening(args: argparse.Namespace, message: str) -> list[dict[str, str]]:
    """A conversation with one message of the user, behind a system message where `--system` gives one."""
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": message}]


def answer(args: argparse.Namespace, ensemble: AdaFuseEnsemble, prompt: Any, writer: TextWriter | None) -> Any:
    """
    What the ensemble generates, as the flags say.

    Args:
        args (`Namespace`): the arguments of the command.
        ensemble (`AdaFuseEnsemble`): the ensemble.
        prompt (`str` or `list[dict]`): a text, or with `args.chat` a conversation.
        writer (`TextWriter`, *optional*): gets the text as it comes.

    Returns:
        `AdaFuseOutput`: its rounds are those of one prompt.
    """
    import torch

    if adafuse_config(args, ensemble.model).do_sample:  # torch begins with the same seed in every process
        torch.manual_seed(torch.seed() if args.seed is None else args.seed)
    return ensemble.output(
        [prompt],
        **chat_options(args),
        structured=args.structured,
        max_new_tokens=args.max_new_tokens,
        stop_strings=args.stop,
        **sampling_options(args),
        streamer=writer,
    )


def _as_json(prompt: str, output: Any) -> str:
    rounds = output.rounds[0]
    result = {
        "prompt": prompt,
        "text": rounds.text,
        **({"thoughts": rounds.thoughts} if rounds.thoughts and any(rounds.thoughts) else {}),
        "finish_reason": rounds.finish_reason,
        "confidence": rounds.confidence,
        "rounds": [committed.to_dict() for committed in rounds],
        "stats": output.stats,
    }
    return json.dumps(with_nulls(result), allow_nan=False)


def _name(model: Any) -> str:
    return PurePath(getattr(model, "name_or_path", "") or type(model).__name__).name
