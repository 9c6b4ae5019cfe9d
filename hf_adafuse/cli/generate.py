"""The command `hf-adafuse generate`: from a prompt to text on standard output."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from .arguments import (
    adafuse_config,
    add_config_arguments,
    add_member_arguments,
    add_stop_argument,
    add_text_arguments,
    member_loading,
    read_prompt,
    read_text_arguments,
    sampling_options,
)
from .plain_json import with_nulls

if TYPE_CHECKING:
    from .members import Pair
    from .streaming import TextWriter

_DESCRIPTION = """\
Generate text with an ensemble and write it to standard output as it comes: only the continuation, not the prompt."""

_EXAMPLES = """\
examples:
  hf-adafuse generate "What is the capital of Peru?"
  hf-adafuse generate --model A --assistant B "The capital of France is"
  echo "The capital of France is" | hf-adafuse generate --model A --assistant B --trace"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command, put on a parser of the caller's."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument("prompt", nargs="?", help="the text to go on from; - or nothing: standard input")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="of the main model (default: 128)")
    add_stop_argument(parser)
    add_text_arguments(parser, "another text each time")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="write one JSON object instead: prompt, text, rounds, stats")
    shape.add_argument("--trace", action="store_true", help="write [each round] in brackets, then all candidates")
    parser.add_argument("--html", metavar="FILE", help="also write a page that shows each round and its candidates")
    add_member_arguments(parser)
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    prompt = read_prompt(args.prompt)
    adafuse_config(args)  # refuse wrong settings before models are loaded
    read_text_arguments(args)

    from .members import load_members
    from .streaming import SpanWriter, TextWriter

    if args.model is None:
        prompt = as_question(prompt)
    members = load_members(args.model, args.assistant, **member_loading(args))
    writer = None if args.json else (SpanWriter if args.trace else TextWriter)(members[0][1])
    try:
        output = _generate(args, members, prompt, writer)
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
    sys.stdout.flush()
    return 0


def as_question(prompt: str) -> str:
    """The prompt in the only form that the members of the demo know: a question and "Answer:"."""
    from ..demo.data import PROMPT

    return prompt if prompt.startswith("Question:") else PROMPT.format(question=prompt.strip())


def _generate(args: argparse.Namespace, members: list[Pair], prompt: str, writer: TextWriter | None) -> Any:
    import torch

    from ..generation import enable_adafuse
    from ..host_internals import execution_device
    from ..members.prompt_inputs import text_inputs

    (model, tokenizer), *assistants = members
    inputs = text_inputs(prompt, [tokenizer for _, tokenizer in members])
    config = adafuse_config(args, model)
    if config.do_sample:  # torch begins with the same seed in every process
        torch.manual_seed(torch.seed() if args.seed is None else args.seed)
    return enable_adafuse(model).generate(
        **inputs.to(execution_device(model)),
        tokenizer=tokenizer,
        assistant_models=[assistant for assistant, _ in assistants],
        assistant_tokenizers=[tokenizer for _, tokenizer in assistants],
        adafuse_config=config,
        structured=args.structured,
        max_new_tokens=args.max_new_tokens,
        stop_strings=args.stop,
        **sampling_options(args),
        return_dict_in_generate=True,
        streamer=writer,
    )


def _as_json(prompt: str, output: Any) -> str:
    rounds = output.rounds[0]
    result = {
        "prompt": prompt,
        "text": "".join(committed.text for committed in rounds),
        "rounds": [committed.to_dict() for committed in rounds],
        "stats": output.stats,
    }
    return json.dumps(with_nulls(result), allow_nan=False)


def _name(model: Any) -> str:
    return PurePath(getattr(model, "name_or_path", "") or type(model).__name__).name
