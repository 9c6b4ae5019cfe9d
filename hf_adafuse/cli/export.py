"""The command `hf-adafuse export`: a folder for the Hub that holds an ensemble and the code to run it."""

from __future__ import annotations

import argparse
import sys

from .config_flags import adafuse_config, add_config_arguments
from .member_flags import add_member_arguments, member_loading

_DESCRIPTION = """\
Write a folder that is a Hub repository of an ensemble: weights, tokenizers, settings, code and a model card. Whoever
loads it needs transformers only, and says trust_remote_code=True."""

_EXAMPLES = """\
examples:
  hf-adafuse export my-ensemble --model A --assistant B --branches 5
  hf-adafuse export my-ensemble                       (the demo pair)
  hf-adafuse export my-method --method-only           (for generate(custom_generate="my-method"))
  transformers serve my-ensemble --trust-remote-code"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Put the arguments of the command on a parser."""
    parser.description = _DESCRIPTION
    parser.epilog = _EXAMPLES
    parser.add_argument("folder", metavar="DIR", help="the folder to write: new or empty")
    parser.add_argument(
        "--method-only", action="store_true", help="write the code alone, for custom_generate=DIR with any main model"
    )
    parser.add_argument(
        "--assistants",
        choices=("names", "folders"),
        help="name the assistants, or put them into folders (default: Hub names are named, local folders copied)",
    )
    parser.add_argument("--repo-id", metavar="NAME", help="the repository's name in the model card (default: DIR's)")
    add_member_arguments(parser)
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code."""
    if args.method_only and args.model is not None:
        raise ValueError("`--model` must be left out with `--method-only`, but is given. Leave one of them out.")
    adafuse_config(args)  # refuse wrong settings before models are loaded

    from ..hub.export import export_adafuse
    from .members import check_loaded_here, load_members

    check_loaded_here("export", args)
    model = None
    tokenizer = None
    assistants = args.assistant
    tokenizers = None
    if not args.method_only:
        named = [] if args.model is None else args.assistant
        members = load_members(args.model, () if named else args.assistant, **member_loading(args))
        (model, tokenizer), *others = members
        if not named:
            assistants = [assistant for assistant, _ in others]
            tokenizers = [found for _, found in others]
    folder = export_adafuse(
        args.folder,
        model,
        tokenizer,
        assistants or None,
        tokenizers,
        adafuse_config(args, model),
        assistants=args.assistants,
        repo_id=args.repo_id,
    )
    sys.stdout.write(f"{folder}\n")
    return 0
