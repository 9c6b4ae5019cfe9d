"""A repository written by `hf-adafuse export`, seen by the code inside it: its settings, its assistants, its own files.
Works without the package. Knows no algorithm.
"""

from __future__ import annotations

import os
import re
import shutil
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.dynamic_module_utils import get_relative_import_files

from .ensemble import Participant, find_tokenizer
from .exported import ADAFUSE_CONFIG, ASSISTANT_MODELS, REQUIREMENTS

# Per main model, what was loaded for it: for as long as it lives, also when each call sees another view of it.
_LOADED: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


# Where settings are kept, and the repository whose folders they name; `None` where they are the user's own.
Place = tuple["Repository | None", Any]


@dataclass(frozen=True)
class Repository:
    """
    Where names of the form `"./folder"` are looked up.

    Args:
        name (`str`): a local folder or a Hub name.
        options (`dict`): of loading from the Hub: `revision`, `token`, `cache_dir` ...
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def locate(self, name: str) -> tuple[str, dict[str, Any]]:
        """What `from_pretrained` takes to load the member `name`."""
        if not name.startswith("./"):
            return name, {}
        if os.path.isdir(self.name):
            return os.path.abspath(os.path.join(self.name, name)), {}
        return self.name, {"subfolder": name[2:], **self.options}


def plain_class(model: Any) -> Any:
    """The class of `model` without what this code, or the package, has put before it: transformers' own."""
    base: Any = type(model)
    while hasattr(base, "_adafuse_base"):
        base = base._adafuse_base
    return base


def code_revision() -> dict[str, str]:
    """The commit that this code was loaded from, as `revision`; nothing when it is not from the Hub."""
    # transformers keeps the code of a Hub repository in a folder that is named after the commit.
    commits = [part for part in Path(__file__).parts if re.fullmatch("[0-9a-f]{40}", part)]
    return {"revision": commits[-1]} if commits else {}


def with_settings(
    model: Any, generation_config: Any, kwargs: dict[str, Any], explicit: Repository | None
) -> dict[str, Any]:
    """
    The arguments of a `generate()` call, with what they leave open taken from where it is kept: the call's generation
    config, what is bound to the model, the model's generation config, the settings of this repository. A repository
    named in the call (`explicit`) comes before what the model has.

    Raises:
        ValueError: an assistant does not load.
    """
    own = Repository(getattr(model, "name_or_path", "") or "", {} if explicit else code_revision())
    exported = (explicit or own, {"adafuse_config": ADAFUSE_CONFIG, "assistant_models": ASSISTANT_MODELS or None})
    bound = getattr(model, "_adafuse_bound", None)
    kept: list[Place] = [(own, bound), (own, getattr(model, "generation_config", None))]
    kept = [exported, *kept] if explicit else [*kept, exported]
    places: list[Place] = [(None, kwargs), (own, generation_config), *kept]
    kwargs = dict(kwargs)
    _, kwargs["adafuse_config"] = _first(places, "adafuse_config")
    if kwargs["adafuse_config"] is False:
        return kwargs
    repository, assistants = _first(places, "assistant_models")
    if bound is not None and assistants is bound.assistant_models:
        assistants = None  # the mixin knows them, and their tokenizers
    if isinstance(assistants, (list, tuple)):
        given = kwargs.get("assistant_tokenizers") or [None] * len(assistants)
        pairs = [_member(repository, model, name, index) for index, name in enumerate(assistants)]
        assistants = [assistant for assistant, _ in pairs]
        if any(tokenizer for _, tokenizer in pairs) and len(given) == len(pairs):
            kwargs["assistant_tokenizers"] = [mine or found for mine, (_, found) in zip(given, pairs, strict=True)]
    kwargs["assistant_models"] = assistants
    if kwargs.get("tokenizer") is None and getattr(bound, "tokenizer", None) is None:
        kwargs["tokenizer"] = find_tokenizer(model, "tokenizer")
    return kwargs


def load_assistants(model: Any) -> dict[str, tuple[Any, Any]]:
    """The assistants that lie in folders of the repository of `model`: their names, and models with tokenizers."""
    names = getattr(model.generation_config, "assistant_models", None) or ASSISTANT_MODELS
    repository = Repository(model.name_or_path, code_revision())
    folders = [(index, name) for index, name in enumerate(names) if name.startswith("./")]
    return {name: _member(repository, model, name, index) for index, name in folders}


def write_code(folder: str | os.PathLike[str], entry: str) -> None:
    """Copies a module of this code, and all it imports of this code, into a flat folder."""
    source = Path(__file__).parent
    Path(folder).mkdir(parents=True, exist_ok=True)
    for file in [source / entry, *map(Path, get_relative_import_files(source / entry))]:
        shutil.copyfile(file, Path(folder) / file.name)


def write_custom_generate(folder: str | os.PathLike[str], requirements: list[str] | None = None) -> None:
    """Writes the folder `custom_generate` of a repository: what `generate()` and `transformers serve` look for."""
    target = Path(folder) / "custom_generate"
    write_code(target, "generate.py")
    lines = REQUIREMENTS if requirements is None else requirements
    (target / "requirements.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _first(places: list[Place], name: str) -> Place:
    for repository, place in places:
        value = place.get(name) if isinstance(place, Mapping) else getattr(place, name, None)
        if value is not None:
            return repository, value
    return None, None


def _member(repository: Repository | None, main: Any, assistant: Any, index: int) -> tuple[Any, Any]:
    """An assistant with its tokenizer, loaded when it is a name: once, to the main model's device and dtype."""
    if not isinstance(assistant, (str, os.PathLike)):
        return assistant, None
    name = os.fspath(assistant)
    source, options = (name, {}) if repository is None else repository.locate(name)
    key = (source, *options.items())
    loaded = _LOADED.setdefault(main, {})
    if key not in loaded:
        try:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=main.dtype, **options).eval()
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"`assistant_models[{index}]` must be a model, its Hub name or a folder, but {name!r} "
                f"does not load from {source!r} ({type(error).__name__}: {error}). Check the name; a name that begins "
                'with "./" is a folder of the repository that the main model was loaded from.'
            ) from error
        loaded[key] = model.to(Participant("", main, None).device), tokenizer
    pair: tuple[Any, Any] = loaded[key]
    return pair
