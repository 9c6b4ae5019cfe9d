"""The command `hf-adafuse chat`: a conversation with an ensemble in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from .config_flags import adafuse_config, add_config_arguments
from .member_flags import add_member_arguments, member_loading
from .text_flags import (
    add_chat_arguments,
    add_length_argument,
    add_stop_argument,
    add_text_arguments,
    chat_options,
    read_text_arguments,
)

if TYPE_CHECKING:
    from ..ensemble import AdaFuseEnsemble

_DESCRIPTION = """\
Talk with an ensemble in the terminal. Each member reads the conversation in its own chat template, and from turn to
turn reads only what is new."""

_COMMANDS = """\
commands within the conversation:
  /trace   the rounds of the last answer: who proposed what, and what decided
  /clear   begin a new conversation
  /help    these lines
  /quit    end; as do Ctrl-D, and Ctrl-C while nothing is being written

Ctrl-C while an answer is being written stops it; what was written stays in the conversation."""

_EXAMPLES = f"""\
{_COMMANDS}

examples:
  hf-adafuse chat --model A --assistant B --system "Be brief."
  printf 'Who wrote Faust?\\nWhen?\\n' | hf-adafuse chat --model A --assistant B"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Put the arguments of the command on a parser."""
    parser.description = _DESCRIPTION
    parser.epilog = _EXAMPLES
    parser.set_defaults(chat=True)
    add_length_argument(parser, 512)
    add_chat_arguments(parser)
    add_stop_argument(parser)
    add_text_arguments(parser, "another text each time")
    add_member_arguments(parser)
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code."""
    adafuse_config(args)  # refuse wrong settings before models are loaded
    read_text_arguments(args)
    chat_options(args)
    if args.model is None:
        raise ValueError(
            "`--model` must be given for a chat, but is not: the demo's members know single questions only. Name a "
            "chat model, and others with --assistant."
        )

    from ..ensemble import AdaFuseEnsemble
    from ..trees.shared_prefix import prefix_caching
    from .members import load_members

    members = load_members(args.model, args.assistant, **member_loading(args))
    ensemble = AdaFuseEnsemble(members, adafuse_config(args, members[0][0]))
    ensemble.encode(["?"], chat=True)  # a missing template is found before the first message
    conversation = Conversation(args, ensemble)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # Windows has none
            import readline  # noqa: F401  # earlier lines by the arrow keys
        sys.stdout.write("Ctrl-D or /quit ends the conversation, /help shows the commands.\n")
    with prefix_caching():
        while (message := _next_message()) is not None:
            if not conversation.take(message):
                break
    return 0


class Conversation:
    """
    A conversation. It answers messages, and carries out commands like `/clear`.

    Args:
        args (`Namespace`): the arguments of the command.
        ensemble (`AdaFuseEnsemble`): writes the answers.

    Attributes:
        messages (`list[dict]`): what has been said so far, without the members' thoughts.
    """

    def __init__(self, args: argparse.Namespace, ensemble: AdaFuseEnsemble) -> None:
        self._args = args
        self._ensemble = ensemble
        self._last: Any = None
        self.messages: list[dict[str, str]] = []
        self._clear()

    def take(self, line: str) -> bool:
        """Answer a message, or carry out a command. Returns whether the conversation goes on."""
        command = line.strip()
        if command in ("/quit", "/exit"):
            return False
        if command == "/clear":
            self._clear()
        elif command == "/trace":
            _say(_trace(self._last) if self._last is not None else "There is no answer yet.\n")
        elif command == "/help" or command.startswith("/"):
            known = "" if command == "/help" else f"{command.split()[0]} is no command.\n"
            _say(f"{known}{_COMMANDS}\n")
        elif command:
            self._answer(line)
        return True

    def _answer(self, message: str) -> None:
        from ..confidence.answer_text import cut_at
        from .generate import answer
        from .streaming import TextWriter

        self.messages.append({"role": "user", "content": message})
        writer = TextWriter(self._ensemble.tokenizers[0])
        try:
            output = answer(self._args, self._ensemble, self.messages, writer)
            self._last = output.rounds[0]
            text = self._last.text
        except KeyboardInterrupt:
            self._last = None
            text = writer.text
        except BaseException:
            self.messages.pop()
            raise
        finally:
            writer.close()
        self.messages.append({"role": "assistant", "content": cut_at(text, self._args.stop).strip()})
        if not text:
            _say("(an empty answer)\n")

    def _clear(self) -> None:
        self._last = None
        self.messages = [] if self._args.system is None else [{"role": "system", "content": self._args.system}]


def _trace(rounds: Any) -> str:
    thoughts = [f"Thoughts of {k}\n{one}\n" for k, one in enumerate(rounds.thoughts or []) if one is not None]
    return "\n".join([*thoughts, str(rounds)])


def _next_message() -> str | None:
    """The next line of standard input; `None` at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        if sys.stdin.isatty():
            _say("\n")
        return None


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
