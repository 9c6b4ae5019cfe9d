"""Flags that are about texts: the prompt, a chat, stop texts, structured output, and sampling."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..members.templates import is_unicode
from .flag_types import plain_text, seed, stop_text

# The flags of sampling, by their names in `generate()`.
SAMPLING = ("temperature", "top_p", "top_k")
# The flags of structured output, by their names in `generate(structured=...)`.
STRUCTURED = ("json_schema", "regex", "grammar", "structural_tag")


def read_prompt(given: str | None) -> str:
    """The prompt: the argument, or standard input without its last newline where the argument is `None` or `-`."""
    if given is not None and given != "-":
        prompt = given
    elif given is None and sys.stdin.isatty():
        raise ValueError("The prompt must be given, as an argument or on standard input, but is not. Quote it.")
    else:
        prompt = _standard_input()
    if not is_unicode(prompt):
        raise ValueError("The prompt must be text in UTF-8, but has bytes that are not. Convert it.")
    return prompt


def add_length_argument(parser: argparse.ArgumentParser, default: int) -> None:
    """Add the flag for the most tokens of an answer that is written as it comes."""
    help = f"the most tokens of an answer, as the main model counts them (default: {default})"
    parser.add_argument("--max-new-tokens", type=int, default=default, metavar="N", help=help)


def add_stop_argument(parser: argparse.ArgumentParser, default: str = "none") -> None:
    """Add the flag for stop texts. `default`: what the help says of the default."""
    help = (
        "stop after this text, where \\n is a newline, \\t a tab and \\\\ a backslash; may be given several times "
        f"(default: {default})"
    )
    parser.add_argument("--stop", action="append", type=stop_text, metavar="TEXT", help=help)


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a chat: its system message, and who thinks before an answer. `chat_options` reads them."""
    parser.add_argument("--system", type=plain_text, metavar="TEXT", help="the system's message of the chat")
    parser.add_argument(
        "--thinking", choices=["apart", "main", "off"],
        help="which thinking models think before an answer: each on its own, the main one, or none (default: apart)",
    )  # fmt: skip
    parser.add_argument(
        "--max-thinking-tokens", type=int, metavar="N", help="where one member's thoughts are cut (default: 1024)"
    )


def chat_options(args: argparse.Namespace) -> dict[str, Any]:
    """
    The arguments of `AdaFuseEnsemble.generate()` for a chat. There are none where the prompt is a text.

    Raises:
        ValueError: a flag of chats is given where the prompt is a text, or flags do not go together.
    """
    options = {"thinking": args.thinking, "max_thinking_tokens": args.max_thinking_tokens}
    if args.chat:
        from ..members.thoughts import check_thinking

        check_thinking(**options)
        return {"chat": True, **options}
    for name, value in {"system": args.system, **options}.items():
        if value is not None:
            flag = f"`--{name.replace('_', '-')}`"
            raise ValueError(f"{flag} must be left out without `--chat`, but is {value!r}. Add --chat, or drop it.")
    return {}


def add_text_arguments(parser: argparse.ArgumentParser, default_seed: str) -> None:
    """Add the flags of structured output and of sampling. `read_text_arguments` reads them."""
    group = parser.add_argument_group("the text (structured output needs hf_adafuse[structured])")
    kinds = group.add_mutually_exclusive_group()
    kinds.add_argument("--json-schema", metavar="FILE", help="the text is JSON that is valid by the schema in a file")
    kinds.add_argument("--regex", type=plain_text, metavar="TEXT", help="the text matches a regular expression")
    kinds.add_argument("--grammar", metavar="FILE", help="the text follows the GBNF grammar in a file (from root)")
    kinds.add_argument(
        "--structural-tag", metavar="FILE", help="tagged parts of the text follow xgrammar's tag in a file"
    )
    group.add_argument(
        "--strict", action="store_true", help="with --json-schema: refuse keywords that cannot be enforced"
    )
    group.add_argument("--seed", type=seed, metavar="N", help=f"the seed with --sample (default: {default_seed})")
    group.add_argument(
        "--temperature", type=float, metavar="T", help="the temperature with --sample (default: each member's own)"
    )
    group.add_argument("--top-p", type=float, metavar="P", help="top-p with --sample (default: each member's own)")
    group.add_argument("--top-k", type=int, metavar="K", help="top-k with --sample (default: each member's own)")


def read_text_arguments(args: argparse.Namespace) -> None:
    """
    Check the flags of structured output and of sampling, and put the argument of `generate(structured=...)` into
    `args.structured`. Files are read and grammars are compiled. No model is loaded.

    Raises:
        ValueError: a file cannot be read, a grammar does not compile, a strict schema has keywords that cannot be
            enforced, or a flag of sampling is given without `--sample`.
        ImportError: a grammar is given, but its library is not installed.
    """
    for name in ("seed", *SAMPLING):
        if getattr(args, name) is not None and not args.do_sample:
            flag = f"`--{name.replace('_', '-')}`"
            raise ValueError(f"{flag} must be left out without `--sample`, but is given. Add --sample, or drop it.")
    if args.strict and args.json_schema is None:
        raise ValueError("`--strict` must be left out without `--json-schema`, but is given. Add that, or drop it.")
    args.structured = None
    for kind in STRUCTURED:
        given = getattr(args, kind)
        flag = f"`--{kind.replace('_', '-')}`"
        if given is None:
            continue
        from ..members.structured import check_keywords, parse_grammar

        text = given if kind == "regex" else _content(given, flag)
        if kind in ("json_schema", "structural_tag"):  # as one line, however the file is laid out
            text = _json_line(text, given, flag)
        if kind == "json_schema":
            check_keywords((kind, text), args.strict, flag)
        parse_grammar((kind, text), flag)
        args.structured = {kind: text}


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `generate()` for sampling. Without `--sample` there is only `do_sample=False`."""
    if not args.do_sample:
        return {"do_sample": False}
    given = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    return {"do_sample": True, **given}


def _standard_input() -> str:
    try:
        text = sys.stdin.read().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ValueError(f"The prompt must be text in {error.encoding}, but is not: {error}. Convert it.") from None
    if not text:
        raise ValueError("The prompt must not be empty, but standard input is. Pass the prompt as an argument.")
    return text


def _content(path: str, flag: str) -> str:
    """The text of a file that a flag names."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} must be a file in UTF-8, but {path!r} is not: {error}. Convert it.") from None
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"{flag} must be a file, but {path!r} cannot be read: {reason}. Check the name.") from None


def _json_line(text: str, path: str, flag: str) -> str:
    try:
        return json.dumps(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{flag} must be a file in JSON, but {path!r} is not: {error}. Correct it.") from None
