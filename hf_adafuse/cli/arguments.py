"""Flags that several commands share: the members, and the settings of AdaFuse. Knows no model."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields, replace
from typing import Any

from ..config import (
    COMMITMENTS,
    EXPLORATIONS,
    FUSIONS,
    NLL_NORMALIZATIONS,
    WORD_BOUNDARIES,
    WORD_MEANS,
    AdaFuseConfig,
)

# Where a setting's flag has another name than its field.
_FLAGS = {
    "margin_threshold": "threshold",
    "num_branches": "branches",
    "model_weights": "weights",
    "certainty_gate": "gate",
    "do_sample": "sample",
}
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_member_arguments(parser: argparse.ArgumentParser) -> None:
    """Which models take part, and how they are loaded."""
    group = parser.add_argument_group("members (Hub names or local folders)")
    group.add_argument("--model", metavar="NAME", help="the main model, which writes the text (default: the demo pair)")
    group.add_argument(
        "--assistant", metavar="NAME", action="append", default=[], help="a further member; may be given several times"
    )
    group.add_argument("--dtype", choices=_DTYPES, default="auto", help="of all weights (default: auto, as saved)")
    group.add_argument(
        "--device-map", metavar="MAP", help="as in from_pretrained, e.g. auto or cpu (default: one device)"
    )
    group.add_argument("--trust-remote-code", action="store_true", help="run the code in the models' repositories")


def add_stop_argument(parser: argparse.ArgumentParser) -> None:
    """Texts to stop after."""
    parser.add_argument(
        "--stop", action="append", type=_text, metavar="TEXT", help="stop after this text; may be given several times"
    )


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per field of `AdaFuseConfig`. Not given: as in the main model's generation config, or the default."""
    group = parser.add_argument_group("settings of AdaFuse")
    defaults = AdaFuseConfig()

    def add(flag: str, field: str, help: str, **options: Any) -> None:
        default = getattr(defaults, field)
        default = {"model_weights": "equal", "certainty_gate": "none"}.get(field, default)
        help += f" (default: {default})"
        group.add_argument(flag, dest=field, help=help, **options)

    add("--threshold", "margin_threshold", "margin below which a word branches", type=float, metavar="TAU")
    add("--max-words", "max_words", "most words per round", type=int, metavar="M")
    add("--branches", "num_branches", "first tokens tried at an uncertain word", type=int, metavar="B")
    add("--weights", "model_weights", "of the members, e.g. 2,1; or prompt", type=_weights, metavar="W,W")
    add("--max-word-tokens", "max_word_tokens", "a word also ends here", type=int, metavar="N")
    add("--word-boundary", "word_boundary", "where words end", choices=WORD_BOUNDARIES)
    add("--nll-normalization", "nll_normalization", "unit of the mean NLL", choices=NLL_NORMALIZATIONS)
    add("--commitment", "commitment", "how long spans are", choices=COMMITMENTS)
    add("--exploration", "exploration", "how branches are found", choices=EXPLORATIONS)
    add("--fusion", "fusion", "how candidates are compared", choices=FUSIONS)
    add("--word-mean", "word_mean", "of the members' probabilities, with --fusion word", choices=WORD_MEANS)
    add("--length-exponent", "length_exponent", "a: NLL / length^a", type=float, metavar="A")
    add("--prompt-sharpness", "prompt_sharpness", "with --weights prompt", type=float, metavar="X")
    add("--online-rate", "online_rate", "at which weights follow what is committed", type=float, metavar="ETA")
    add("--switch-margin", "switch_margin", "by which others must win, in nats", type=float, metavar="DELTA")
    add("--gate", "certainty_gate", "p(1) from which the main model is not questioned", type=float, metavar="THETA")
    group.add_argument("--sample", dest="do_sample", action="store_true", default=None, help="sample words")


def adafuse_config(args: argparse.Namespace, model: Any = None) -> AdaFuseConfig:
    """The settings: the flags that were given, over those in the main model's generation config, over the defaults."""
    given = {field.name: getattr(args, field.name) for field in fields(AdaFuseConfig)}
    stored = getattr(getattr(model, "generation_config", None), "adafuse_config", None)
    base = AdaFuseConfig.coerce(stored) or AdaFuseConfig()
    return replace(base, **{name: value for name, value in given.items() if value is not None})


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, by flag; `None` for the others. What a job that goes on must not change."""
    return {_FLAGS.get(field.name, field.name): getattr(args, field.name) for field in fields(AdaFuseConfig)}


def read_prompt(given: str | None) -> str:
    """The prompt: the argument, or standard input for `None` and `-`, without the newline at its end."""
    if given is not None and given != "-":
        prompt = given
    elif given is None and sys.stdin.isatty():
        raise ValueError("The prompt must be given, as an argument or on standard input, but is not. Quote it.")
    else:
        prompt = _standard_input()
    if not is_unicode(prompt):
        raise ValueError("The prompt must be text in UTF-8, but has bytes that are not. Convert it.")
    return prompt


def is_unicode(text: str) -> bool:
    """Whether a tokenizer can read the text. Python reads a byte that is not UTF-8 as half of a surrogate pair."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def count(text: str) -> int:
    """The type of a flag: a whole number of at least 1."""
    # Not `isdigit`: it is true of "²", which is no number to `int`.
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, but is {text!r}")
    return int(text)


def whole_number(text: str) -> int:
    """The type of a flag: a whole number, 0 too."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, but is {text!r}")
    return int(text)


def _standard_input() -> str:
    try:
        text = sys.stdin.read().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ValueError(f"The prompt must be text in {error.encoding}, but is not: {error}. Convert it.") from None
    if not text:
        raise ValueError("The prompt must not be empty, but standard input is. Pass the prompt as an argument.")
    return text


def _text(text: str) -> str:
    if not is_unicode(text):
        raise argparse.ArgumentTypeError(f"must be text in UTF-8, but is {text!r}")
    return text


def _weights(text: str) -> tuple[float, ...] | str:
    return text if text == "prompt" else _numbers(text)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between, but is {text!r}") from None
