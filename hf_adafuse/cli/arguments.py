"""Flags that several commands share: the members, and the settings of AdaFuse."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path, PurePath
from typing import Any

from ..config import PRESETS, AdaFuseConfig
from ..members.templates import is_unicode
from ..settings.config_checks import CHOICES, FIELDS_OF_ALL, USES
from .flag_types import member_name, option, plain_text, seed, stop_text, weights

# Where a setting's flag has another name than its field.
_FLAGS = {
    "margin_threshold": "threshold",
    "num_branches": "branches",
    "model_weights": "weights",
    "certainty_gate": "gate",
    "do_sample": "sample",
}
# The flags of how words are drawn, by the names that `generate()` has for them.
SAMPLING = ("temperature", "top_p", "top_k")
# The flags of structured output, by the names that `generate(structured=...)` has for them.
STRUCTURED = ("json_schema", "regex", "grammar", "structural_tag")
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_member_arguments(parser: argparse.ArgumentParser, key_flag: str = "--api-key-env") -> None:
    """Which models take part, and how they are loaded; `key_flag` names the key of those behind servers."""
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
        help="a further one, also vllm:URL#name; may be given several times",
    )
    group.add_argument("--dtype", choices=_DTYPES, default="auto", help="of all weights (default: auto, as saved)")
    group.add_argument(
        "--device-map", metavar="MAP", help="as in from_pretrained, e.g. auto or cpu (default: one device)"
    )
    group.add_argument("--trust-remote-code", action="store_true", help="run the code in the models' repositories")
    group.add_argument("--allow-http", action="store_true", help="ask servers on other hosts without encryption too")
    group.add_argument(
        key_flag, dest="api_key_env", metavar="NAME", help="the environment variable with the key of the servers"
    )
    group.add_argument(
        "--served-tokenizer", metavar="NAME",
        help="of the models behind servers, a Hub name or folder (default: the name that the server has for the model)",
    )  # fmt: skip
    group.add_argument(
        "--served-option", action="append", default=[], type=option, metavar="NAME=VALUE",
        help="of ServedModel, e.g. deadline=60; may be given several times",
    )  # fmt: skip


def member_loading(args: argparse.Namespace) -> dict[str, Any]:
    """What these arguments say of how members are loaded, as `load_members` takes it."""
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


def member_names(paths: Sequence[str]) -> list[str]:
    """The last parts of the members' names, with a number where they are alike."""
    short = [PurePath(path).name for path in paths]
    return [f"{name} ({index})" if short.count(name) > 1 else name for index, name in enumerate(short, start=1)]


def add_stop_argument(parser: argparse.ArgumentParser, default: str = "none") -> None:
    """Texts to stop after."""
    help = (
        "stop after this text, where \\n is a newline, \\t a tab and \\\\ a backslash; may be given several times "
        f"(default: {default})"
    )
    parser.add_argument("--stop", action="append", type=stop_text, metavar="TEXT", help=help)


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """What a chat begins with, and who thinks before an answer; for `chat_options`."""
    parser.add_argument("--system", type=plain_text, metavar="TEXT", help="the system's message of the chat")
    parser.add_argument(
        "--thinking", choices=["apart", "main", "off"],
        help="of thinking models in a chat: each thinks alone, the main one does, or none (default: apart)",
    )  # fmt: skip
    parser.add_argument(
        "--max-thinking-tokens", type=int, metavar="N", help="of one member's thoughts, cut there (default: 1024)"
    )


def chat_options(args: argparse.Namespace) -> dict[str, Any]:
    """
    What `AdaFuseEnsemble.generate()` is told of a chat; nothing where the prompt is a text.

    Raises:
        ValueError: options of a chat for a text, or ones that do not go together.
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
    """What the text must be, and which of the possible texts is drawn; for `read_text_arguments`."""
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
    group.add_argument("--seed", type=seed, metavar="N", help=f"of --sample (default: {default_seed})")
    group.add_argument("--temperature", type=float, metavar="T", help="of --sample (default: each member's own)")
    group.add_argument("--top-p", type=float, metavar="P", help="of --sample, likewise")
    group.add_argument("--top-k", type=int, metavar="K", help="of --sample, likewise")


def read_text_arguments(args: argparse.Namespace) -> None:
    """
    Put what `generate(structured=...)` takes into `args.structured`, files read and grammars checked. Loads no model.

    Raises:
        ValueError: a file that cannot be read, a grammar that does not compile, keywords of a schema that it does not
            enforce where it is strict, or a seed without sampling.
        ImportError: there is a grammar, but not the library for it.
    """
    for name in ("seed", *SAMPLING):
        if getattr(args, name) is not None and not args.do_sample:
            flag = f"`--{name.replace('_', '-')}`"
            raise ValueError(f"{flag} must be left out without `--sample`, but is given. Add --sample, or drop it.")
    if args.strict and args.json_schema is None:
        raise ValueError("`--strict` must be left out without `--json-schema`, but is given. Add that, or drop it.")
    args.structured = None
    for kind in STRUCTURED:
        given, flag = getattr(args, kind), f"`--{kind.replace('_', '-')}`"
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


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per field of `AdaFuseConfig`. Not given: as in the main model's generation config, or the default."""
    group = parser.add_argument_group("settings of AdaFuse")
    robust, paper = AdaFuseConfig.robust(), AdaFuseConfig()

    def shown(config: AdaFuseConfig, field: str) -> Any:
        value = getattr(config, field)
        return {"model_weights": "equal", "certainty_gate": "none"}[field] if value is None else value

    def add(flag: str, field: str, help: str, **options: Any) -> None:
        default, of_paper = shown(robust, field), shown(paper, field)
        help += f" (default: {default}{f'; with --preset paper: {of_paper}' if of_paper != default else ''})"
        group.add_argument(flag, dest=field, help=help, choices=CHOICES.get(field), **options)

    group.add_argument(
        "--adafuse", metavar="FILE",
        help="settings in JSON, and the members where none are named: what `hf-adafuse fit` wrote, or settings as "
        "AdaFuseConfig takes them; flags change them",
    )  # fmt: skip
    group.add_argument(
        "--preset", choices=list(PRESETS), help="settings by name; the flags below change them (default: robust)"
    )
    group.add_argument(
        "--method", metavar="NAME",
        help="how the members decode together; a method other than the preset's begins at its own defaults (default: "
        "words, as the preset robust has it; with --preset paper: adafuse)",
    )  # fmt: skip
    group.add_argument(
        "--option", dest="method_options", action="append", type=option, metavar="NAME=VALUE",
        help="of the method, e.g. mean=geometric of words, top_k=5 of unite; may be given several times",
    )  # fmt: skip
    add("--threshold", "margin_threshold", "margin below which a word branches", type=float, metavar="TAU")
    add("--max-words", "max_words", "most words per round", type=int, metavar="M")
    add("--branches", "num_branches", "first tokens tried at an uncertain word", type=int, metavar="B")
    add("--weights", "model_weights", "of the members, e.g. 2,1; or prompt, examples", type=weights, metavar="W,W")
    add("--max-word-tokens", "max_word_tokens", "a word also ends here", type=int, metavar="N")
    add("--word-boundary", "word_boundary", "where words end")
    add("--nll-normalization", "nll_normalization", "unit of the mean NLL")
    add("--commitment", "commitment", "how long spans are")
    add("--exploration", "exploration", "how branches are found")
    add("--prompt-sharpness", "prompt_sharpness", "with --weights prompt or examples", type=float, metavar="X")
    add("--online-rate", "online_rate", "at which weights follow what is committed", type=float, metavar="ETA")
    add("--switch-margin", "switch_margin", "by which others must win, in nats", type=float, metavar="DELTA")
    add("--gate", "certainty_gate", "p(1) from which the main model is not questioned", type=float, metavar="THETA")
    group.add_argument("--sample", dest="do_sample", action="store_true", default=None, help="sample words")


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `generate()` is told of sampling: nothing unless words are drawn."""
    if not args.do_sample:
        return {"do_sample": False}
    given = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    return {"do_sample": True, **given}


def take_members(args: argparse.Namespace) -> None:
    """
    The members of the file of `--adafuse`, where none are named.

    Raises:
        ValueError: no such file, or one for another number of members than are named; or a preset beside it.
    """
    path = getattr(args, "adafuse", None)
    if path is None:
        return
    if args.preset is not None:
        raise ValueError("`--adafuse` must be left out with `--preset`, but is given. Choose one of the two.")
    _, members = _settings_of_file(path)
    if args.model is None and not args.assistant and members:
        args.model, *args.assistant = members
    elif members and 1 + len(args.assistant) != len(members):
        raise ValueError(
            f"`--adafuse` must be a file for as many members as are named, {1 + len(args.assistant)}, but {path!r} is "
            f"for {members}. Leave --model and --assistant out."
        )


def _settings_of_file(path: str) -> tuple[AdaFuseConfig, list[str]]:
    try:
        return AdaFuseConfig.from_file(path)
    except ValueError as error:
        raise ValueError(f"`--adafuse`: {error}") from None


def adafuse_config(args: argparse.Namespace, model: Any = None) -> AdaFuseConfig:
    """
    The settings: the flags that were given, over those of a file, or a preset, or those in the main model's generation
    config, over the defaults.

    Raises:
        ValueError: settings that do not go together, or a method that there is not.
    """
    given = {field.name: getattr(args, field.name) for field in fields(AdaFuseConfig)}
    given |= dict(given.pop("method_options") or [])
    if args.preset not in (None, "paper") and args.method not in (None, PRESETS[args.preset]["method"]):
        raise ValueError(f"`--preset` must be left out with `--method {args.method}`, but is {args.preset}. Drop it.")
    stored = getattr(getattr(model, "generation_config", None), "adafuse_config", None)
    given_base = None if args.adafuse is None else _settings_of_file(args.adafuse)[0]
    base = given_base or AdaFuseConfig.coerce(args.preset or stored) or AdaFuseConfig.robust()
    if args.method in USES:
        kept = ("preset", "adafuse") if base.method == args.method else ("preset",)
        _refuse_flags(args, [*kept, *FIELDS_OF_ALL, *USES[args.method]])
    config = base.changed({name: value for name, value in given.items() if value is not None})
    if config != AdaFuseConfig.robust() and config != AdaFuseConfig():
        from ..decoding.strategies.registry import make_strategy

        make_strategy(config)
    return config


def _refuse_flags(args: argparse.Namespace, uses: Sequence[str]) -> None:
    """Raises `ValueError` where a flag is given that the method has no use for, whatever its value."""
    given = [name for name, value in given_settings(args).items() if value is not None]
    used = [_FLAGS.get(name, name) for name in uses]
    useless = [f"--{name.replace('_', '-')}" for name in given if name not in used]
    if useless:
        raise ValueError(
            f"`{useless[0]}` must be left out with `--method {args.method}`, which has no use for it, but is given. "
            "Drop it."
        )


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, by flag; `None` for the others. What a job that goes on must not change."""
    given = {_FLAGS.get(field.name, field.name): getattr(args, field.name) for field in fields(AdaFuseConfig)}
    given |= {"preset": args.preset, "method_options": dict(args.method_options or []) or None}
    given["adafuse"] = None if args.adafuse is None else _settings_of_file(args.adafuse)[0].to_dict()
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}  # as in JSON


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """
    Fields of `AdaFuseConfig` as arguments that `add_config_arguments` reads, for `shlex.join`. They begin with the
    paper's preset: fields that are not among these are the defaults, whatever the main model's generation config has.
    """
    flags = ["--preset", "paper"]
    for name, value in settings.get("method_options", {}).items():
        flags += ["--option", f"{name}={json.dumps(value)}"]
    for name, value in settings.items():
        if name == "method_options":
            continue
        flags.append(f"--{_FLAGS.get(name, name).replace('_', '-')}")
        if value is not True:  # a switch stands alone
            flags.append(",".join(map(_shown, value)) if isinstance(value, (list, tuple)) else _shown(value))
    return flags


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


def _shown(value: Any) -> str:
    """A value as a flag gives it back, bit by bit; floats as short as that allows."""
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
