"""`export_adafuse`: writes a folder for the Hub with the members, their settings and the code to run them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from ..call.arguments import EnsembleArguments, listed_assistants, resolve_handles
from ..config import AdaFuseConfig
from ..decoding.strategies.registry import make_strategy
from ..generation import plain_class
from ..servers.kinds import check_member_name, is_served_name
from ..transformers_compat import FROM_MODEL_CONFIG, is_adapter_layer
from ..trees.adapters import AdaptedModel
from .exported import REQUIREMENTS
from .model_card import model_card
from .repository import update_json, write_custom_generate

ASSISTANTS = ("names", "folders")
_UNICODE_REQUIREMENT = "icu4py>=1.2,<2"


def export_adafuse(
    folder: str | os.PathLike[str],
    model: Any = None,
    tokenizer: Any = None,
    assistant_models: Sequence[Any] | None = None,
    assistant_tokenizers: Sequence[Any] | None = None,
    adafuse_config: AdaFuseConfig | Mapping[str, Any] | bool | None = None,
    *,
    assistants: str | None = None,
    repo_id: str | None = None,
) -> Path:
    """
    Write a folder that is a Hub repository of the ensemble: weights, tokenizers, settings, code and a model card. With
    `trust_remote_code=True` it works without this package; without that, it is the plain main model.

    Args:
        folder (`str`): new or empty.
        model (*optional*): the main model, loaded or by name. Without it the folder holds the method only, for
            `model.generate(custom_generate=...)` with any main model.
        tokenizer, assistant_models, assistant_tokenizers (*optional*): as in [`enable_adafuse`]; by default those bound
            to the main model.
        adafuse_config (*optional*): the settings; by default those bound to the main model, or those in its generation
            config.
        assistants (`str`, *optional*): `"names"`: the assistants stay on the Hub. `"folders"`: the repository holds
            them. By default, those given as Hub names are named and others are held.
        repo_id (`str`, *optional*): its name in the model card; the folder's own when not given.

    Returns:
        the folder's path.

    Raises:
        ValueError: members, settings or a folder that cannot be used.
    """
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise ValueError(f"`folder` must be the name of a folder, but is {folder!r}. Give the name of a new one.")
    if repo_id is not None and not isinstance(repo_id, str):
        raise ValueError(f"`repo_id` must be a name like 'me/my-ensemble', but is {repo_id!r}. Leave it out.")
    target = Path(folder)
    _check_folder(target)
    given = EnsembleArguments(
        assistant_models, assistant_tokenizers, tokenizer=tokenizer, adafuse_config=adafuse_config
    ).over(getattr(model, "_adafuse_bound", None))
    plan = _plan(model, given, assistants)
    was_there = target.exists()
    try:
        _write(target, plan, repo_id or target.absolute().name)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        if was_there:
            target.mkdir(exist_ok=True)
        raise
    return target


@dataclass(frozen=True)
class _Plan:
    """What will be written: the main model, all members that the repository holds as (folder, model, tokenizer)."""

    model: Any
    held: list[tuple[str, Any, Any]]
    assistants: list[str]
    config: AdaFuseConfig


def _plan(model: Any, given: EnsembleArguments, how: str | None) -> _Plan:
    if how is not None and not (isinstance(how, str) and how in ASSISTANTS):
        raise ValueError(f"`assistants` must be one of {list(ASSISTANTS)}, but is {how!r}. Choose one of these.")
    if given.adafuse_config is False:
        raise ValueError("`adafuse_config` must be settings, but is False. Leave it out for the defaults.")
    assistants, tokenizers = listed_assistants(given)
    held, names = _split(assistants, tokenizers, how)
    if model is not None:
        model = _load(model) if isinstance(model, (str, os.PathLike)) else model
        _check_kind(model, "model")
        stored = getattr(model.generation_config, "assistant_models", None)
        if stored and given.assistant_models is None:
            raise ValueError(
                f"`assistant_models` must be given for this main model, whose generation config names {stored}, but is "
                "None. Pass these models, or their folders ('my-ensemble/assistant_1'), or an empty list for none."
            )
    config = AdaFuseConfig.coerce(given.adafuse_config) or _stored_config(model)
    if isinstance(config.model_weights, tuple) and len(config.model_weights) != 1 + len(names):
        raise ValueError(
            f"`model_weights` must be one per member, but is {len(config.model_weights)} for {1 + len(names)} members. "
            "Give the main model's weight first."
        )
    strategy = make_strategy(config)
    if type(strategy).__module__.partition(".")[0] != __name__.partition(".")[0]:
        raise ValueError(
            f"`method` must be one that the package has, but {config.method!r} is registered here alone. A repository "
            "cannot hold it."
        )
    config = replace(config, method_options=strategy.portable_options())
    pairs = _pairs(model, given.tokenizer, held, tokenizers)
    return _Plan(model, pairs, names, config)


def _check_folder(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"`folder` must be new or empty, but {os.fspath(folder)!r} is not. Choose another one.")


def _check_kind(model: Any, argument: str) -> None:
    """Raises `ValueError` where a repository of transformers' own code cannot hold a member: it has adapters, or code
    of its own."""
    if isinstance(model, (AdaptedModel, tuple)) or any(map(is_adapter_layer, getattr(model, "modules", list)())):
        raise ValueError(
            f"`{argument}` must have no PEFT adapters in its layers, but has some, which the repository would not hold."
            " Merge the one that is meant into the weights, and pass the model that `merge_and_unload()` returns."
        )
    base = plain_class(type(model))
    if not isinstance(model, PreTrainedModel) or not base.__module__.startswith("transformers."):
        raise ValueError(
            f"`{argument}` must be of a class of transformers' own, but is {base.__module__}.{base.__name__}. Choose "
            "another model: one with code of its own cannot be exported."
        )


def _split(assistants: list[Any], tokenizers: list[Any], how: str | None) -> tuple[dict[int, Any], list[str]]:
    """The assistants that the repository holds, by their index, and the names of all in its settings."""
    held = {}
    names = []
    for index, (assistant, tokenizer) in enumerate(zip(assistants, tokenizers, strict=True)):
        is_name = isinstance(assistant, str) and not os.path.isdir(assistant)
        if how == "names" and not is_name:
            shown = assistant if isinstance(assistant, (str, os.PathLike)) else type(assistant).__name__
            raise ValueError(
                f'`assistant_models` must be Hub names with `assistants="names"`, but has {shown!r}. Give its Hub '
                'name, or use `assistants="folders"`.'
            )
        if is_name and how != "folders":
            if tokenizer is not None:
                raise ValueError(
                    f"`assistant_tokenizers[{index}]` must be None for an assistant that stays on the Hub, but is given"
                    f', and the repository would not hold it. Use `assistants="folders"`, or let it be loaded from '
                    f"{assistant!r}."
                )
            with loading(assistant):  # a misspelled name is found now, not by a user
                AutoConfig.from_pretrained(assistant)
            names.append(assistant)
        else:
            names.append(f"./assistant_{index + 1}")
            held[index] = assistant
    return held, names


def _load(name: str | os.PathLike[str]) -> Any:
    with loading(name):
        return AutoModelForCausalLM.from_pretrained(os.fspath(name), dtype="auto")


@contextmanager
def loading(name: str | os.PathLike[str]) -> Iterator[None]:
    """Around what loads a member by a name that the user gave: raises `ValueError` where it does not load."""
    check_member_name(name)
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        expected = "server that can be used" if is_served_name(name) else "local folder or a Hub name that loads"
        raise ValueError(f"{name!r} must be a {expected}, but is not. {error}") from error


def _stored_config(model: Any) -> AdaFuseConfig:
    stored = getattr(getattr(model, "generation_config", None), "adafuse_config", None)
    return AdaFuseConfig.coerce(stored) or AdaFuseConfig.robust()


def _pairs(model: Any, tokenizer: Any, held: dict[int, Any], tokenizers: list[Any]) -> list[tuple[str, Any, Any]]:
    """What the repository holds, as folder, model and tokenizer; checked as for `generate()`."""
    models = [_load(given) if isinstance(given, (str, os.PathLike)) else given for given in held.values()]
    for index, assistant in zip(held, models, strict=True):
        _check_kind(assistant, f"assistant_models[{index}]")
    chosen = [tokenizers[index] for index in held]
    folders = [f"assistant_{index + 1}" for index in held]
    main = model if model is not None else (models[0] if models else None)
    if main is None:
        return []
    if model is None:  # then the first assistant is looked at in the place of the main model
        tokenizer = chosen[0]
        models = models[1:]
        chosen = chosen[1:]
    else:
        folders = ["", *folders]
    arguments = EnsembleArguments(models, chosen, tokenizer=tokenizer)
    handles = resolve_handles(main, arguments)
    return [(name, member.model, member.tokenizer) for name, member in zip(folders, handles, strict=True)]


def _write(folder: Path, plan: _Plan, name: str) -> None:
    for place, member, tokenizer in plan.held:
        _save(member, folder / place)
        tokenizer.save_pretrained(folder / place)
    has_sentences = plan.config.method == "spans" and make_strategy(plan.config).unit == "sentence"
    needs_unicode = plan.config.word_boundary == "unicode" or has_sentences
    requirements = [*REQUIREMENTS, *([_UNICODE_REQUIREMENT] if needs_unicode else [])]
    architecture = None if plan.model is None else plain_class(type(plan.model)).__name__
    write_custom_generate(folder, requirements, architecture)
    settings = {"adafuse_config": plan.config.to_dict(), "assistant_models": plan.assistants}
    if plan.model is not None:
        samples = bool(plan.model.generation_config.do_sample)  # transformers' pipelines sample where it says nothing
        # Loading one that was derived from the model's config forgets what transformers does not know.
        update_json(folder / "generation_config.json", {**settings, "do_sample": samples, FROM_MODEL_CONFIG: None})
    exported = folder / "custom_generate" / "exported.py"
    exported.write_text(_exported(settings, requirements), encoding="utf-8")
    main = None if plan.model is None else _shown_name(plan.model)
    held = {place: _shown_name(member) for place, member, _ in plan.held}
    shown = [f"{held[one[2:]]} (in {one[2:]})" if one[2:] in held else one for one in plan.assistants]
    known = [main, *(held.get(one[2:], one) for one in plan.assistants)]
    base_models = [one for one in known if one and one.count("/") == 1]  # those on the Hub
    card = model_card(name, main, shown, base_models, plan.config.to_dict())
    (folder / "README.md").write_text(card, encoding="utf-8")


def _save(model: Any, folder: Path) -> None:
    """Saves a member as its plain class: without the code of another export that it may come from."""
    base = plain_class(type(model))
    plain = base.__new__(base)
    plain.__dict__.update(vars(model))
    # transformers refuses to save some generation configs that it loads (Llama 2's): ours is written as it is.
    plain.__dict__["generation_config"] = GenerationConfig()
    plain.save_pretrained(folder)
    stored = model.generation_config.to_json_string(keys_to_pop=["compile_config"])
    (folder / "generation_config.json").write_text(stored, encoding="utf-8")


def _shown_name(model: Any) -> str:
    """A model's Hub name, or the name of its folder, or of its class."""
    name = getattr(model, "name_or_path", "") or type(model).__name__
    return Path(name).name if os.path.isdir(name) else name


def _exported(settings: Mapping[str, Any], requirements: list[str]) -> str:
    return f'''"""What this repository says to its own code, written by `hf-adafuse export`."""

inf = float("inf")  # a value that settings may have

ADAFUSE_CONFIG = {settings["adafuse_config"]!r}

# Hub names, or folders of this repository as "./folder".
ASSISTANT_MODELS = {settings["assistant_models"]!r}

REQUIREMENTS = {requirements!r}
'''
