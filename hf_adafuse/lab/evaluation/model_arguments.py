"""Reads the arguments of `AdaFuseLM` and of the harness's requests: members, settings, and options of `generate()`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...call.sampling import SETTINGS
from ...cli.members import ModelPair, load_members
from ...config import PRESETS, AdaFuseConfig, is_file
from ...settings.config_checks import OPTIONS_OF_PRESETS, WEIGHTINGS
from ...settings.old_fields import OLD_FIELDS
from ...settings.spelling import did_you_mean


def members_of(
    pretrained: Any, assistants: Any, tokenizer: Any, tokenizers: Sequence[Any] | None, loading: tuple[Any, ...]
) -> list[ModelPair]:
    """
    The model and the tokenizer of each member, the main one first. A tokenizer that is not known yet is `None`.

    Args:
        pretrained, assistants, tokenizer, tokenizers: as of `AdaFuseLM`.
        loading (`tuple`): `dtype`, `device_map` and `trust_remote_code` of `load_members`.

    Raises:
        ValueError: a model does not load, or the numbers of tokenizers and assistants differ.
    """
    others = assistants.split("+") if isinstance(assistants, str) else list(assistants or [])
    names = [name.strip() if isinstance(name, str) else name for name in others]
    if len(tokenizers or names) != len(names):
        raise ValueError(
            f"`assistant_tokenizers` must be one per assistant, but is {len(tokenizers or [])} for {len(names)} "
            "assistants. Use None for one to be found by its model's name."
        )
    if isinstance(pretrained, str) and all(isinstance(name, str) for name in names):
        loaded = load_members(pretrained, names, *loading)
        given = [tokenizer, *(tokenizers or [None] * len(names))]
        return [(model, own if own is not None else found) for (model, found), own in zip(loaded, given, strict=True)]
    if isinstance(pretrained, str):
        pretrained, found = load_members(pretrained, [], *loading)[0]
        tokenizer = found if tokenizer is None else tokenizer
    return [(pretrained, tokenizer), *zip(names, tokenizers or [None] * len(names), strict=True)]


def settings_of(given: Any, settings: Mapping[str, Any], model: Any, num_members: int) -> AdaFuseConfig | None:
    """
    The settings of an ensemble; `None` for the main model alone.

    Args:
        given: `adafuse_config` of `AdaFuseLM`. `None`: the settings in the main model's generation config, and where it
            has none, the preset `robust`.
        settings (`dict`): fields that change it, as the harness reads them from text.
        model (`PreTrainedModel`): the main model.
        num_members (`int`): the number of members.

    Raises:
        ValueError: these are no settings.
    """
    if given is False:
        if num_members > 1 or settings:
            raise ValueError("`adafuse_config` must not be False with assistants or settings, but is. Leave it out.")
        return None
    if given is None:
        given = getattr(getattr(model, "generation_config", None), "adafuse_config", None)
    is_text = isinstance(given, str) and given not in PRESETS and not is_file(given)
    config = AdaFuseConfig.coerce(_from_text(given) if is_text else given) or AdaFuseConfig.robust()
    known = [field.name for field in fields(AdaFuseConfig)]
    known += [*OLD_FIELDS, *OPTIONS_OF_PRESETS.get(settings.get("method", config.method), settings)]
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ValueError(
            f"The arguments of the model type adafuse must be those of AdaFuseLM or fields of AdaFuseConfig, but "
            f"{unknown[0]!r} is none. {did_you_mean(unknown[0], known, 'Check the spelling.')}"
        )
    changes = dict(settings)
    weights = changes.get("model_weights")
    if isinstance(weights, str) and weights not in WEIGHTINGS:  # a comma parts arguments
        try:
            changes["model_weights"] = tuple(float(weight) for weight in weights.split("+"))
        except ValueError:
            raise ValueError(
                f"`model_weights` must be numbers with + between or one of {list(WEIGHTINGS)}, but is {weights!r}. "
                "Write 2+1."
            ) from None
    return config.changed(changes)


def generation_options(gen_kwargs: Mapping[str, Any], default: int) -> tuple[dict[str, Any], list[str], int]:
    """What a request asks of `generate()`: options of sampling, the stop texts, and the most new tokens. `default`:
    that number where the request does not say."""
    from lm_eval.models.utils import normalize_gen_kwargs

    options = dict(normalize_gen_kwargs(dict(gen_kwargs), default))
    until = options.pop("until", None) or []
    max_new_tokens = options.pop("max_gen_toks")
    if options.get("temperature") == 0:
        options["do_sample"] = False
    if not options["do_sample"]:  # what warps a distribution is of no use then
        options = {name: value for name, value in options.items() if name not in SETTINGS}
    return options, [stop for stop in ([until] if isinstance(until, str) else until) if stop], max_new_tokens


def read_batch_size(given: int | str | None) -> int:
    """The batch size of the harness's argument; 8 where it is not given or `"auto"`."""
    if given is None or str(given).startswith("auto"):
        return 8
    if not str(given).isdecimal() or int(given) < 1:
        raise ValueError(f"`batch_size` must be a whole number of at least 1, but is {given!r}. Leave it out for 8.")
    return int(given)


def _from_text(text: str) -> Any:
    try:
        return json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`adafuse_config` must be JSON or a file of it, but is {text!r} ({error}). Check the name."
        ) from None
