"""The command line `hf-adafuse`: picks the subcommand, and turns errors into one line and an exit code.

A subcommand is a module with `add_arguments` and `run`, and one line in `_COMMANDS`. It imports torch and transformers
inside `run`, so that `--help` need not wait for them.
"""

from __future__ import annotations

import argparse
import codecs
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from . import bench, chat, compare, demo, eval, export, fit, generate, headroom, paper, run, score, serve
from .arguments import take_members
from .network import go_offline_without_a_network


class Command(Protocol):
    """What a module in `_COMMANDS` has. `add_arguments` may also set the parser's `description` and `epilog`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, args: argparse.Namespace) -> int: ...


_COMMANDS: dict[str, tuple[str, Command]] = {
    "generate": ("generate text with an ensemble", generate),
    "chat": ("talk with an ensemble in the terminal", chat),
    "serve": ("answer requests of OpenAI's API with an ensemble, and show a page", serve),
    "run": ("answer a file of questions with an ensemble", run),
    "score": ("score a file of given answers under an ensemble", score),
    "eval": ("score an ensemble on tasks of lm-evaluation-harness", eval),
    "compare": ("compare two files of answers", compare),
    "fit": (fit.HELP, fit),
    "headroom": (headroom.HELP, headroom),
    "paper": (paper.HELP, paper),
    "demo": (demo.HELP, demo),
    "bench": (bench.HELP, bench),
    "export": ("write an ensemble as a folder for the Hub", export),
}


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run one command.

    Args:
        argv (`list[str]`, *optional*): the arguments; those of the process when not given.

    Returns:
        the exit code: 0; 1 a member failed during decoding; 2 arguments or models that cannot be used; 130 interrupted;
        141 whoever read the output has gone.
    """
    _replace_what_cannot_be_written(sys.stdout)
    try:
        args = _parser().parse_args(argv)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            take_members(args)
            go_offline_without_a_network([getattr(args, "model", None), *getattr(args, "assistant", [])])
            return int(args.run(args))
    except SystemExit as stop:  # argparse, after `--help` and `--version`
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered has nowhere to go
        return 141
    except (ValueError, OSError, ImportError) as error:
        return _complain(error, 2)
    except RuntimeError as error:
        from ..decoding.progress import AdaFuseDecodingError

        if not isinstance(error, AdaFuseDecodingError):
            raise
        return _complain(error, 1)


def _replace_what_cannot_be_written(stream: Any) -> None:
    """Have a stream that is not of Unicode show `?` for what it cannot write, and say so once, not end halfway."""
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("_", "-")
    if encoding.startswith("utf") or not hasattr(stream, "reconfigure"):
        return
    is_said = False

    def replace(error: UnicodeError) -> tuple[str, int]:
        nonlocal is_said
        if not isinstance(error, UnicodeEncodeError):
            raise error
        if not is_said:
            is_said = True
            sys.stderr.write(
                f"hf-adafuse: standard output is {encoding}, which lacks some characters: they are shown as '?'. Set "
                "PYTHONIOENCODING=utf-8 to see them.\n"
            )
        return "?" * (error.end - error.start), error.end

    codecs.register_error("hf_adafuse_replace", replace)
    stream.reconfigure(errors="hf_adafuse_replace")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see `{self.prog} --help`)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hf-adafuse", description="Ensemble decoding of several language models with AdaFuse.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (help, command) in _COMMANDS.items():
        subparser = commands.add_parser(name, help=help, description=help[:1].upper() + help[1:] + ".")
        subparser.formatter_class = argparse.RawDescriptionHelpFormatter
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        from .. import __version__

        sys.stdout.write(f"hf-adafuse {__version__}\n")
        parser.exit()


def _complain(error: BaseException, code: int) -> int:
    sys.stdout.flush()
    sys.stderr.write(f"hf-adafuse: error: {_one_line(error)}\n")
    return code


def _show_warning(message: Warning | str, *_: Any) -> None:
    sys.stderr.write(f"hf-adafuse: warning: {_one_line(message)}\n")


def _one_line(message: object) -> str:
    return " ".join(str(message).split()) or type(message).__name__
