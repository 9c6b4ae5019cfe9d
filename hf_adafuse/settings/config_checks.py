"""The rules of the settings: what each field may be, and which are of no use with the others or with the method."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from .spelling import did_you_mean

# Fields that are one of a few texts.
CHOICES = {
    "word_boundary": ("whitespace", "unicode"),
    "nll_normalization": ("token", "byte"),
    "commitment": ("adaptive", "fixed"),
    "exploration": ("diverse", "beam"),
}
WEIGHTINGS = ("prompt", "examples", "examples_or_content")
# Fields that every method takes. A method names the others that it uses in its class's `uses`.
FIELDS_OF_ALL: tuple[str, ...] = ("method", "method_options", "model_weights", "prompt_sharpness", "do_sample")
FIELDS_OF_ALL += ("max_word_tokens", "word_boundary")
# The fields that say how the methods `adafuse` and `words` propose and compare.
ADAPTIVE_SPAN_FIELDS: tuple[str, ...] = (
    "margin_threshold",
    "max_words",
    "num_branches",
    "commitment",
    "exploration",
    "online_rate",
    "switch_margin",
    "certainty_gate",
)
# What each method of this package uses: here too, so that a config refuses the rest before anything is imported. A test
# compares. Of a method of one's own a call refuses it ([`check_use`]).
USES: dict[str, tuple[str, ...]] = {
    "adafuse": (*ADAPTIVE_SPAN_FIELDS, "nll_normalization"),
    "words": ADAPTIVE_SPAN_FIELDS,
    **dict.fromkeys(("unite", "gac", "deepen", "safe"), ()),
    **dict.fromkeys(("sweetspan", "cool-fusion", "specfuse", "spans", "anchor", "majority"), ("nll_normalization",)),
    **dict.fromkeys(("rerank", "select", "peer-review", "blender"), ("nll_normalization",)),
}
# The options of the methods that the presets name: here, so that a misspelt field of a dict is refused before anything
# is imported. The classes have them with their defaults; a test compares.
OPTIONS_OF_PRESETS = {"adafuse": ("horizon", "length_exponent"), "words": ("mean", "part", "allow_blank")}
# Bounds far beyond what is of use, within which nothing overflows.
_MOST = {"margin_threshold": math.inf, "prompt_sharpness": 1e6, "online_rate": 1e6, "switch_margin": math.inf}
_LEAST_WEIGHT = 1e-100
_MOST_WEIGHT = 1e100


def check(config: Any) -> None:
    """
    Check an [`AdaFuseConfig`] by itself. What a method of one's own uses is known where the method is ([`check_use`]).

    Raises:
        ValueError: a field is out of its range, or of no use with the others.
    """
    _check_method(config)
    for name in ("max_words", "num_branches", "max_word_tokens"):
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"`{name}` must be an integer of at least 1, but is {value!r}. Use 1 for the least.")
    for name, allowed in CHOICES.items():
        value = getattr(config, name)
        if value not in allowed:
            raise ValueError(f"`{name}` must be one of {list(allowed)}, but is {value!r}. Choose one of these.")
    for name, most in _MOST.items():
        value = getattr(config, name)
        is_number = _is_number(value) or (name == "switch_margin" and value == math.inf)
        if not is_number or not 0 <= value <= most:
            bounds = "of at least 0" if most == math.inf else f"from 0 to {most:g}"
            raise ValueError(f"`{name}` must be a number {bounds}, but is {value!r}. Leave it out.")
    gate = config.certainty_gate
    if gate is not None and not (_is_number(gate) and 0 < gate <= 1):
        raise ValueError(f"`certainty_gate` must be a number above 0, to 1, but is {gate!r}. Use None for no gate.")
    if not isinstance(config.do_sample, bool | None):
        raise ValueError(f"`do_sample` must be True, False or None, but is {config.do_sample!r}. Leave it out.")
    if config.model_weights is not None and config.model_weights not in WEIGHTINGS:
        _check_weights(config.model_weights)
    if config.method in USES:
        _check_fields(config, USES[config.method])
    defaults = _defaults(config)
    for name, needed in without_use(vars(config), defaults).items():
        value = getattr(config, name)
        raise ValueError(f"`{name}` must be {defaults[name]!r} without {needed}, but is {value!r}. Leave it out.")


def check_use(config: Any, uses: Collection[str], options: Collection[str]) -> None:
    """
    Refuse what the method of an [`AdaFuseConfig`] does not use.

    Args:
        config (`AdaFuseConfig`): the settings of a call.
        uses (`tuple[str]`): the fields that the method uses beside [`FIELDS_OF_ALL`].
        options (`list[str]`): the names of the method's options.

    Raises:
        ValueError: a field that it does not use is not the default, or it has no such option.
    """
    _check_options(config, options)
    _check_fields(config, uses)


def without_use(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, str]:
    """Of all fields, those other than the defaults that are not used with the others, and what would use them."""
    needed = {
        "prompt_sharpness": (isinstance(values["model_weights"], str), '`model_weights` "prompt" or "examples"'),
        "exploration": (values["commitment"] == "adaptive", '`commitment="adaptive"`'),
    }
    changed = {name for name in needed if values[name] != defaults[name]}
    return {name: used_by for name, (is_used, used_by) in needed.items() if name in changed and not is_used}


def _defaults(config: Any) -> dict[str, Any]:
    return {one.name: one.default for one in fields(config) if one.name != "method_options"}


def _check_method(config: Any) -> None:
    method = config.method
    if not isinstance(method, str) or not method:
        raise ValueError(f"`method` must be the name of a method, but is {method!r}. The page on methods lists them.")
    if not isinstance(config.method_options, dict):
        raise ValueError(f"`method_options` must be a dict, but is {config.method_options!r}. Name each option in it.")
    if method in OPTIONS_OF_PRESETS:
        _check_options(config, OPTIONS_OF_PRESETS[method])


def _check_fields(config: Any, uses: Collection[str]) -> None:
    for name, default in _defaults(config).items():
        value = getattr(config, name)
        if value != default and name not in uses and name not in FIELDS_OF_ALL:
            raise ValueError(
                f"`{name}` must be {default!r} with method {config.method!r}, which does not use it, but is {value!r}. "
                "Leave it out."
            )


def _check_options(config: Any, options: Collection[str]) -> None:
    unknown = next((name for name in config.method_options if name not in options), None)
    if unknown is not None:
        names = [one.name for one in fields(config)]
        otherwise = f"The fields are {', '.join(names)}. An option of another method goes with its `method`."
        hint = did_you_mean(str(unknown), [*options, *names], otherwise)
        raise ValueError(
            f"`adafuse_config` must be made of fields of AdaFuseConfig and options of method {config.method!r} "
            f"({', '.join(options) or 'it has none'}), but has {unknown!r}. {hint}"
        )


def _check_weights(weights: Any) -> None:
    if not isinstance(weights, tuple):
        names = ", ".join(map(repr, WEIGHTINGS))
        raise ValueError(
            f"`model_weights` must be a list of numbers, or one of {names}, but is {weights!r}. Give one per member. "
            "'examples_or_prompt' is gone: take 'examples_or_content'."
        )
    if not weights or not all(_is_number(one) and _LEAST_WEIGHT <= one <= _MOST_WEIGHT for one in weights):
        raise ValueError(
            f"`model_weights` must be a list of positive numbers from {_LEAST_WEIGHT} to {_MOST_WEIGHT}, but is "
            f"{list(weights)!r}. Leave a member out of `assistant_models` instead of giving it no weight."
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf
