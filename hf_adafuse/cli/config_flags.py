"""Flags for the settings of AdaFuse: one for each field of [`AdaFuseConfig`], one for a preset, and one for a file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..config import PRESETS, AdaFuseConfig
from ..settings.config_checks import CHOICES, FIELDS_OF_ALL, USES
from ..settings.spelling import did_you_mean
from .flag_types import option, weights

# Where a setting's flag has another name than its field.
_FLAGS = {
    "margin_threshold": "threshold",
    "num_branches": "branches",
    "model_weights": "weights",
    "certainty_gate": "gate",
    "do_sample": "sample",
}


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of `AdaFuseConfig`. Without its flag, a field is as in the main model's generation
    config, or has its default."""
    group = parser.add_argument_group("settings of AdaFuse")
    robust = AdaFuseConfig.robust()
    paper = AdaFuseConfig()

    def shown(config: AdaFuseConfig, field: str) -> Any:
        value = getattr(config, field)
        return {"model_weights": "equal", "certainty_gate": "none"}[field] if value is None else value

    def add(flag: str, field: str, help: str, **options: Any) -> None:
        default = shown(robust, field)
        of_paper = shown(paper, field)
        help += f" (default: {default}{f'; with --preset paper: {of_paper}' if of_paper != default else ''})"
        group.add_argument(flag, dest=field, help=help, choices=CHOICES.get(field), **options)

    group.add_argument(
        "--adafuse", metavar="FILE",
        help="a file of settings in JSON: what `hf-adafuse fit` wrote, or the fields of AdaFuseConfig; it may name the "
        "members, too, and flags override it",
    )  # fmt: skip
    group.add_argument(
        "--preset", choices=list(PRESETS), help="named settings, which the flags below change (default: robust)"
    )
    group.add_argument(
        "--method", metavar="NAME",
        help="how the members decode together; a method other than the preset's begins at its own defaults (default: "
        "words, as the preset robust has it; with --preset paper: adafuse)",
    )  # fmt: skip
    group.add_argument(
        "--option", dest="method_options", action="append", type=option, metavar="NAME=VALUE",
        help="an option of the method, e.g. mean=geometric (words) or top_k=5 (unite); may be given several times",
    )  # fmt: skip
    add(
        "--threshold", "margin_threshold", "the margin between the two likeliest tokens below which a word branches",
        type=float, metavar="TAU",
    )  # fmt: skip
    add("--max-words", "max_words", "the most words in a round", type=int, metavar="M")
    add("--branches", "num_branches", "how many first tokens are tried at an uncertain word", type=int, metavar="B")
    add(
        "--weights", "model_weights", "the members' weights, e.g. 2,1, or where they come from: prompt, "
        "examples, examples_or_content",
        type=weights, metavar="W,W",
    )  # fmt: skip
    add("--max-word-tokens", "max_word_tokens", "the most tokens in a word", type=int, metavar="N")
    add("--word-boundary", "word_boundary", "where words end")
    add("--nll-normalization", "nll_normalization", "what a mean NLL is taken over")
    add("--commitment", "commitment", "how long the committed spans are")
    add("--exploration", "exploration", "how a word's branches are found")
    add(
        "--prompt-sharpness", "prompt_sharpness", "how strongly --weights prompt or examples prefers the better member",
        type=float, metavar="X",
    )  # fmt: skip
    add("--online-rate", "online_rate", "how fast weights follow the committed text", type=float, metavar="ETA")
    add(
        "--switch-margin", "switch_margin", "how much better than the main model's own another span must be, in nats",
        type=float, metavar="DELTA",
    )  # fmt: skip
    add(
        "--gate", "certainty_gate", "the probability of a token from which the main model is not questioned",
        type=float, metavar="THETA",
    )  # fmt: skip
    group.add_argument("--sample", dest="do_sample", action="store_true", default=None, help="draw words at random")


@dataclass(frozen=True)
class SettingsFile:
    """
    What the file of `--adafuse` holds.

    Args:
        path (`str`): the name of the file.
        config (`AdaFuseConfig`): the settings in it.
        members (`list[str]`): the names of the members that the settings were fitted to. Empty where the file names
            none.
    """

    path: str
    config: AdaFuseConfig
    members: list[str]


def settings_file(args: argparse.Namespace) -> SettingsFile | None:
    """
    The file of `--adafuse`; `None` where the flag is not given. It is read the first time, and then kept in `args`.

    Raises:
        ValueError: the file cannot be read, or holds no settings.
    """
    given = getattr(args, "adafuse", None)
    if isinstance(given, str):
        try:
            args.adafuse = SettingsFile(given, *AdaFuseConfig.from_file(given))
        except ValueError as error:
            raise ValueError(f"`--adafuse`: {error}") from None
    return getattr(args, "adafuse", None)


def take_members(args: argparse.Namespace) -> None:
    """
    Take the members that the file of `--adafuse` names, where no flag names any.

    Raises:
        ValueError: the file cannot be read, or is for another number of members than the flags name, or a preset is
            given beside it.
    """
    if getattr(args, "adafuse", None) is None:
        return
    if args.preset is not None:
        raise ValueError("`--adafuse` must be left out with `--preset`, but is given. Choose one of the two.")
    file = settings_file(args)
    if file is None or not file.members:
        return
    if args.model is None and not args.assistant:
        args.model, *args.assistant = file.members
    elif 1 + len(args.assistant) != len(file.members):
        raise ValueError(
            f"`--adafuse` must be a file for as many members as are named, {1 + len(args.assistant)}, but "
            f"{file.path!r} is for {file.members}. Leave --model and --assistant out."
        )


def adafuse_config(args: argparse.Namespace, model: Any = None) -> AdaFuseConfig:
    """
    The settings of a command. They begin with the file of `--adafuse`, else with `--preset`, else with the settings in
    the main model's generation config, else with the preset `robust`. The flags that were given change them.

    Args:
        args (`Namespace`): the arguments of the command.
        model (`PreTrainedModel`, *optional*): the main model. `None` while it is not loaded.

    Raises:
        ValueError: the settings do not go together, or there is no such method.
    """
    given = {field.name: getattr(args, field.name) for field in fields(AdaFuseConfig)}
    given |= dict(given.pop("method_options") or [])
    if args.preset not in (None, "paper") and args.method not in (None, PRESETS[args.preset]["method"]):
        raise ValueError(f"`--preset` must be left out with `--method {args.method}`, but is {args.preset}. Drop it.")
    stored = getattr(getattr(model, "generation_config", None), "adafuse_config", None)
    file = settings_file(args)
    base = file.config if file is not None else AdaFuseConfig.coerce(args.preset or stored) or AdaFuseConfig.robust()
    if args.method is not None and args.method not in USES:
        _check_method(args.method)
    if args.method in USES:
        kept = ("preset", "adafuse") if base.method == args.method else ("preset",)
        _refuse_flags(args, [*kept, *FIELDS_OF_ALL, *USES[args.method]])
    config = base.changed({name: value for name, value in given.items() if value is not None})
    if config != AdaFuseConfig.robust() and config != AdaFuseConfig():
        from ..decoding.strategies.registry import make_strategy

        make_strategy(config)
    return config


def _check_method(name: str) -> None:
    from ..decoding.strategies.registry import STRATEGIES

    if name not in STRATEGIES:
        hint = did_you_mean(name, STRATEGIES, "Choose one of these.")
        raise ValueError(f"`--method` must be one of {', '.join(STRATEGIES)}, but is {name!r}. {hint}")


def _refuse_flags(args: argparse.Namespace, uses: Sequence[str]) -> None:
    """Raises `ValueError` where a flag is given that the method does not use, whatever its value. `uses`: the names of
    the fields and flags that it uses."""
    given = [name for name, value in given_settings(args).items() if value is not None]
    used = [_FLAGS.get(name, name) for name in uses]
    useless = [f"--{name.replace('_', '-')}" for name in given if name not in used]
    if useless:
        raise ValueError(
            f"`{useless[0]}` must be left out with `--method {args.method}`, which has no use for it, but is given. "
            "Drop it."
        )


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """By flag, the settings that were given, and `None` for the others. A job that goes on must not change them."""
    given = {_FLAGS.get(field.name, field.name): getattr(args, field.name) for field in fields(AdaFuseConfig)}
    given |= {"preset": args.preset, "method_options": dict(args.method_options or []) or None}
    file = settings_file(args)
    given["adafuse"] = None if file is None else file.config.to_dict()
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}  # as in JSON
