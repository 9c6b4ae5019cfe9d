"""The command line `hf-adafuse`: picks the subcommand, and turns errors into one line and an exit code.

A subcommand is a module with `add_arguments` and `run`, and a line in `_COMMANDS`. It imports torch and transformers
inside `run`, so that `--help` need not wait for them.
"""

from __future__ import annotations

import argparse
import codecs
import itertools
import os
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn, Protocol, cast

from ..settings.spelling import did_you_mean
from .config_flags import take_members
from .network import go_offline_without_a_network


class Command(Protocol):
    """What a module in `_COMMANDS` has. `add_arguments` may also set the parser's `description` and `epilog`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, args: argparse.Namespace) -> int: ...


# By name: what a command is for, and its module, which is imported when the command is called.
_COMMANDS = {
    "generate": ("generate text with an ensemble", ".generate"),
    "chat": ("talk with an ensemble in the terminal", ".chat"),
    "serve": ("answer requests of OpenAI's API with an ensemble, and show a page", ".serve"),
    "run": ("answer a file of questions with an ensemble", ".run"),
    "score": ("score a file of given answers under an ensemble", ".score"),
    "eval": ("score an ensemble on tasks of lm-evaluation-harness", "..lab.cli.eval"),
    "compare": ("compare two files of answers", "..lab.cli.compare"),
    "fit": (
        "fit to a file of questions whom to ask: one member, their fusion, or all and the likeliest answer",
        "..lab.cli.fit",
    ),
    "headroom": (
        "how often members differ, and what choosing among their answers could gain; needs no answers",
        "..lab.cli.headroom",
    ),
    "confidence": (
        "how well members' probabilities tell right answers from wrong ones",
        "..lab.cli.confidence",
    ),
    "paper": ("make a table or figure of the AdaFuse paper, on your models and questions", "..lab.cli.paper"),
    "demo": ("show small models that ship with the package decode together, and what it gains", ".demo"),
    "bench": (
        "measure what an ensemble costs beside its members, on your models or on the pair that ships with the package",
        "..lab.cli.bench",
    ),
    "export": ("write an ensemble as a folder for the Hub", ".export"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run one command.

    Args:
        argv (`list[str]`, *optional*): the arguments. By default those of the process.

    Returns:
        `int`: the exit code. 0: the command is done. 1: a member failed during decoding, or a job stopped at an
        error. 2: the arguments or the models cannot be used. 130: Ctrl-C. 141: whoever read the output has gone.
    """
    _replace_what_cannot_be_written(sys.stdout)
    try:
        arguments = sys.argv[1:] if argv is None else list(argv)
        args = _parser(arguments).parse_args(arguments)
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
    """Make a stream whose encoding lacks some characters write `?` for them, and say so once on standard error. Without
    this the command would end in the middle of its text."""
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

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        self.refuse_unknown(unknown)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def refuse_unknown(self, arguments: Iterable[str]) -> None:
        """Refuse an option that is none of this parser's, with the ones that may have been meant."""
        help = re.sub(r"\x1b\[[\d;]*m", "", self.format_help())  # Python 3.14 colours it
        options = re.findall(r"(?<![\w-])--[\w-]+", help)
        for given in (argument.partition("=")[0] for argument in arguments):
            if given.startswith("--") and not any(option.startswith(given) for option in options):
                hint = did_you_mean(given, options, "Leave it out.")
                self.error(f"`{given}` must be an option of `{self.prog}`, but is none. {hint}")


class _CommandParser(_Parser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Misspelt options are named first: argparse would say that a required one is missing. For argparse an argument
        # with a space in it is a text.
        before_end = itertools.takewhile(lambda one: one not in ("--", "-h", "--help"), args or ())
        self.refuse_unknown(argument for argument in before_end if " " not in argument)
        return super().parse_known_args(args, namespace)


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of a command line. It has all commands by name, and the arguments of the one that is called."""
    parser = _Parser(prog="hf-adafuse", description="Ensemble decoding of several language models with AdaFuse.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_CommandParser)
    called = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, (help, module) in _COMMANDS.items():
        subparser = commands.add_parser(name, help=help, description=help[:1].upper() + help[1:] + ".")
        subparser.formatter_class = argparse.RawDescriptionHelpFormatter
        if name == called:
            command = cast(Command, import_module(module, __package__))
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
