"""The command `hf-adafuse serve`: answers requests of OpenAI's API with an ensemble."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from .config_flags import adafuse_config, add_config_arguments, given_settings
from .flag_types import port
from .member_flags import add_member_arguments, member_loading

_DESCRIPTION = """\
Answer requests of OpenAI's API with an ensemble: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics,
and a page to chat with it at /. Each member is served alone, too, under its own name. Needs hf_adafuse[serve]."""

_EXAMPLES = """\
examples:
  hf-adafuse serve --model A --assistant B
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "ensemble", "messages": [{"role": "user", "content": "Who wrote Faust?"}]}'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Put the arguments of the command on a parser."""
    parser.description = _DESCRIPTION
    parser.epilog = _EXAMPLES
    parser.add_argument("--name", default="ensemble", help="the ensemble's name in requests (default: ensemble)")
    parser.add_argument(
        "--ensembles", metavar="FILE",
        help="several ensembles by name, in YAML: ensembles: {a: {members: [A, B], settings: {method: unite}}}",
    )  # fmt: skip
    parser.add_argument(
        "--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1, this machine alone)"
    )
    parser.add_argument("--port", type=port, default=8000, help="the port to listen on (default: 8000; 0: a free one)")
    parser.add_argument(
        "--api-key-env",
        dest="key_env",
        metavar="NAME",
        help="the environment variable with the key that clients must send",
    )
    parser.add_argument(
        "--max-batch-size",
        type=_number,
        default=8,
        metavar="N",
        help="the most requests decoded at a time (default: 8)",
    )
    parser.add_argument(
        "--max-waiting", type=_number, default=64, metavar="N",
        help="the most requests that wait; further ones are refused with 429 (default: 64)",
    )  # fmt: skip
    parser.add_argument(
        "--max-new-tokens", type=_number, default=512, metavar="N",
        help="the most tokens of an answer where a chat names no number (default: 512)",
    )  # fmt: skip
    parser.add_argument(
        "--max-prompt-tokens", type=_number, metavar="N",
        help="the most tokens of a prompt with the thoughts behind it, by each member; longer prompts are refused "
        "(default: as it was trained)",
    )  # fmt: skip
    parser.add_argument(
        "--prefix-cache-mib", type=_from_zero, default=512, metavar="N",
        help="memory for prompts and texts that are kept for requests that begin alike; 0 keeps none (default: 512)",
    )  # fmt: skip
    parser.add_argument(
        "--cors-origin", action="append", default=[], metavar="URL",
        help="let pages of this origin ask from a browser; may be given several times (default: none)",
    )  # fmt: skip
    add_member_arguments(parser, "--served-api-key-env")
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code."""
    adafuse_config(args)  # refuse wrong settings before models are loaded
    key = _key(args.key_env)
    ensembles = None if args.ensembles is None else _ensembles(args)
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"`hf-adafuse serve` needs FastAPI and uvicorn ({error}). Install them with "
            '`pip install "hf_adafuse[serve]"`.'
        ) from error
    _check_address(args.host, args.port)  # before models are loaded, too
    from ..serve.engine import Engine
    from ..serve.ensembles import ServedEnsemble, serve_members
    from ..serve.server import make_server
    from ..serve.service import Service
    from .members import load_members

    served: list[ServedEnsemble] = []
    if ensembles is None:
        members = load_members(args.model, args.assistant, **member_loading(args))
        template = _demo_template() if args.model is None else None
        config = adafuse_config(args, members[0][0])
        served = serve_members(args.name, members, config, template, (), args.max_prompt_tokens)
    else:
        names = list(dict.fromkeys(name for own, _ in ensembles.values() for name in own))
        loaded = dict(zip(names, load_members(names[0], names[1:], **member_loading(args)), strict=True))
        for name, (own, config) in ensembles.items():
            served += serve_members(name, [loaded[one] for one in own], config, None, served, args.max_prompt_tokens)
    engine = Engine(args.max_batch_size, args.max_waiting, args.prefix_cache_mib * 2**20)
    service = Service(served, engine, args.max_new_tokens)

    def on_ready(url: str) -> None:
        sys.stdout.write(f"Serving {', '.join(service.served)} at {url} (Ctrl-C ends it)\n")
        sys.stdout.flush()

    # What is loaded stays loaded. Without `freeze` each full garbage collection would look through its half a million
    # objects, and nobody would be answered meanwhile.
    gc.collect()
    gc.freeze()
    server = make_server(service, args.host, args.port, key, args.cors_origin, on_ready)
    # When everything has ended, uvicorn raises Ctrl-C again. It then ends the process at once, by the system's own
    # handler. Under Python's handler all modules would be freed one by one, which takes seconds.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        server.run()
    finally:
        signal.signal(signal.SIGINT, before)
    return 0


def _read(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"`{flag}` must be a file that can be read, but is not: {error}. Check its name.") from None


def _ensembles(args: argparse.Namespace) -> dict[str, tuple[list[str], Any]]:
    """The ensembles that the file of `--ensembles` names. With it no other flag may name members or settings."""
    given = {"model": args.model, "assistant": args.assistant or None, **given_settings(args)}
    flag = next((name for name, value in given.items() if value is not None), None)
    if flag is not None:
        raise ValueError(
            f"`--{flag.replace('_', '-')}` must be left out with `--ensembles`, but is given. Put it into the file."
        )
    from ..serve.ensembles import read_ensembles

    return read_ensembles(_read(args.ensembles, "--ensembles"))


def _demo_template() -> str:
    """The only form in which the members of the demo know questions."""
    from ..demo.data import PROMPT

    return PROMPT


def _key(name: str | None) -> str | None:
    if name is None:
        return None
    key = os.environ.get(name, "")
    if not key:
        raise ValueError(
            f"`--api-key-env` must name an environment variable with the key, but {name!r} is empty. Set it."
        )
    return key


def _check_address(host: str, port: int) -> None:
    """
    Raises:
        ValueError: this process cannot listen there.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, *_, address in found:
            with socket.create_server(address[:2], family=family):
                pass
    except (OSError, UnicodeError) as error:  # the latter by names that are no host's
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"`--host` and `--port` must name an address where nobody listens yet, but are {host!r} and {port}: "
            f"{reason}. Choose another port, or an address of this machine."
        ) from None


def _number(text: str, least: int = 1) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, but is {number}")
    return number


def _from_zero(text: str) -> int:
    return _number(text, 0)
