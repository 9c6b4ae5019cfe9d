"""Flags that say which models take part, and how they are loaded."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from .flag_types import member_name, option

_DTYPES = ("auto", "float32", "bfloat16", "float16")
# The options of `ServedModel` that say how long a server is waited for, which changes no answer.
_OPTIONS_OF_WAITING = ("timeout", "deadline", "retries")


def add_member_arguments(parser: argparse.ArgumentParser, key_flag: str = "--api-key-env") -> None:
    """Add the flags that say which models take part, and how they are loaded. `key_flag`: the flag that names the API
    key of models behind servers."""
    group = parser.add_argument_group("members (Hub names, local folders or servers)")
    group.add_argument(
        "--model",
        type=member_name,
        metavar="NAME",
        help="the main model, which writes the text (default: the demo pair)",
    )
    group.add_argument(
        "--assistant",
        type=member_name,
        metavar="NAME",
        action="append",
        default=[],
        help="a further member: a name as above, or one behind a server, as vllm:URL#name; may be given several times",
    )
    group.add_argument(
        "--dtype", choices=_DTYPES, default="auto", help="the type of all weights (default: auto, as they were saved)"
    )
    group.add_argument(
        "--device-map",
        metavar="MAP",
        help="where weights lie, as in from_pretrained, e.g. auto or cpu (default: one device)",
    )
    group.add_argument(
        "--trust-remote-code", action="store_true", help="run the code in the repositories that the flags name"
    )
    group.add_argument("--allow-http", action="store_true", help="ask servers on other hosts without encryption too")
    group.add_argument(
        key_flag, dest="api_key_env", metavar="NAME", help="the environment variable with the key of the servers"
    )
    group.add_argument(
        "--served-tokenizer", metavar="NAME",
        help="the tokenizer of models behind servers: a Hub name or folder (default: the server's name of the model)",
    )  # fmt: skip
    group.add_argument(
        "--served-option", action="append", default=[], type=option, metavar="NAME=VALUE",
        help="an argument of ServedModel, e.g. deadline=60; may be given several times",
    )  # fmt: skip


def member_loading(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `load_members` that say how members are loaded."""
    return {
        "dtype": args.dtype,
        "device_map": args.device_map,
        "trust_remote_code": args.trust_remote_code,
        "served": {
            "allow_http": args.allow_http,
            "api_key_env": args.api_key_env,
            "tokenizer": args.served_tokenizer,
            **dict(args.served_option),
        },
    }


def loading_flags(args: argparse.Namespace) -> list[str]:
    """The flags that say how members are loaded, where they were given, as words of a command."""
    words = [] if args.dtype == "auto" else ["--dtype", args.dtype]
    for name in ("device_map", "api_key_env", "served_tokenizer"):
        if getattr(args, name) is not None:
            words += [f"--{name.replace('_', '-')}", getattr(args, name)]
    words += [f"--{name.replace('_', '-')}" for name in ("trust_remote_code", "allow_http") if getattr(args, name)]
    for name, value in args.served_option:
        words += ["--served-option", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return words


def member_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What answers depend on, by flag: which members they are of, and how these were loaded."""
    names = ("model", "assistant", "dtype", "trust_remote_code", "served_tokenizer")
    options = {name: value for name, value in args.served_option if name not in _OPTIONS_OF_WAITING}
    return {name: getattr(args, name) for name in names} | {"served_option": options or None}


def member_names(paths: Sequence[str]) -> list[str]:
    """The last parts of the members' names, with a number where several are alike: `["a (1)", "a (2)"]`. `"."` is
    called as the folder is."""
    short = [os.path.basename(os.path.abspath(path)) or path for path in paths]
    return [f"{name} ({index})" if short.count(name) > 1 else name for index, name in enumerate(short, start=1)]
