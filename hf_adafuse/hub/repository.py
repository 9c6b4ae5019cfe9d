"""An exported repository as its own code sees it: its settings, its assistants, its files. Works without the
package.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..call.arguments import first_setting, setting_sources
from ..members.loading import find_tokenizer, load_assistant, load_assistant_tokenizer
from ..servers.served_model import ServedModel
from .exported import ADAFUSE_CONFIG, ASSISTANT_MODELS, REQUIREMENTS
from .flatten import write_code


@dataclass(frozen=True)
class Repository:
    """
    Where names of the form `"./folder"` are looked up.

    Args:
        name (`str`, *optional*): a local folder or a Hub name. `None`: they are folders of the user's.
        options (`dict`): the options of loading from the Hub: `revision`, `token`, `cache_dir` ...
    """

    name: str | None
    options: Mapping[str, Any] = field(default_factory=dict)

    def locate(self, name: str) -> tuple[str, dict[str, Any]]:
        """What `from_pretrained` takes to load the member `name`."""
        if self.name is None or not name.startswith("./"):
            return name, {}
        if os.path.isdir(self.name):
            return os.path.abspath(os.path.join(self.name, name)), {}
        return self.name, {"subfolder": name[2:], **self.options}

    def load_member(self, main_model: Any, member: Any, index: int, tokenizer: Any = None) -> tuple[Any, Any]:
        """
        An assistant with its tokenizer. Those that are given by name are loaded once, to the main model's device and
        in its dtype.

        Args:
            main_model (`PreTrainedModel`), index (`int`): as of [`load_assistant`].
            member (`PreTrainedModel` or `str`): the assistant, or its name.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): its tokenizer, where that is known.

        Raises:
            ValueError: one does not load.
        """
        if not isinstance(member, (str, os.PathLike)):
            return member, tokenizer
        name = os.fspath(member)
        source, options = self.locate(name)
        model = load_assistant(main_model, name, index, source, dtype=main_model.dtype, **options)
        if tokenizer is None and not isinstance(model, ServedModel):
            tokenizer = load_assistant_tokenizer(main_model, name, index, source, **options)
        return model, tokenizer


def code_revision() -> dict[str, str]:
    """The commit that this code was loaded from, as `revision`; nothing when it is not from the Hub."""
    # transformers keeps the code of a Hub repository in a folder that is named after the commit.
    commits = [part for part in Path(__file__).parts if re.fullmatch("[0-9a-f]{40}", part)]
    return {"revision": commits[-1]} if commits else {}


def with_settings(
    model: Any, generation_config: Any, kwargs: dict[str, Any], explicit: Repository | None
) -> dict[str, Any]:
    """
    The arguments of a `generate()` call, with what they leave open taken from where it is kept (`SETTING_SOURCES`).

    Args:
        model (`PreTrainedModel`): the main model.
        generation_config (`GenerationConfig`, *optional*), kwargs (`dict`): those that the call was given.
        explicit (`Repository`, *optional*): this repository, where the call names it.

    Raises:
        ValueError: an assistant does not load.
    """
    own = Repository(getattr(model, "name_or_path", "") or "", {} if explicit else code_revision())
    exported = {"adafuse_config": ADAFUSE_CONFIG, "assistant_models": ASSISTANT_MODELS or None}
    source = "repository of the call" if explicit else "own repository"
    sources = {**setting_sources(model, kwargs, generation_config), source: exported}
    kwargs = dict(kwargs)
    _, kwargs["adafuse_config"] = first_setting("adafuse_config", sources)
    if kwargs["adafuse_config"] is False:
        return kwargs
    bound = sources["bound"]
    found, assistants = first_setting("assistant_models", sources)
    if found == "bound":
        assistants = None  # the mixin knows them, and their tokenizers
    if isinstance(assistants, (list, tuple)):
        repository = {"call": Repository(None), "repository of the call": explicit}.get(found or "") or own
        tokenizers = kwargs.get("assistant_tokenizers") or [None] * len(assistants)
        if len(tokenizers) == len(assistants):  # else the call is refused
            given = enumerate(zip(assistants, tokenizers, strict=True))
            pairs = [repository.load_member(model, name, index, tokenizer) for index, (name, tokenizer) in given]
            assistants = [assistant for assistant, _ in pairs]
            kwargs["assistant_tokenizers"] = [tokenizer for _, tokenizer in pairs]
    kwargs["assistant_models"] = assistants
    if kwargs.get("tokenizer") is None and getattr(bound, "tokenizer", None) is None:
        kwargs["tokenizer"] = find_tokenizer(model, "tokenizer")
    return kwargs


def load_assistants(model: Any) -> dict[str, tuple[Any, Any]]:
    """The assistants that lie in folders of the repository of `model`: their names, and models with tokenizers."""
    names = getattr(model.generation_config, "assistant_models", None) or ASSISTANT_MODELS
    repository = Repository(model.name_or_path, code_revision())
    folders = [(index, name) for index, name in enumerate(names) if name.startswith("./")]
    return {name: repository.load_member(model, name, index) for index, name in folders}


def write_custom_generate(
    folder: str | os.PathLike[str], requirements: list[str] | None = None, architecture: str | None = None
) -> None:
    """
    Writes the code of a repository, all of it, to its folder `custom_generate/`: `generate()` and `transformers serve`
    look there for `generate.py`.

    Args:
        folder (`str`): the repository's folder.
        requirements (`list[str]`, *optional*): what the code needs; by default what this code needs.
        architecture (`str`, *optional*): the main model's class; its config then says where `from_pretrained` finds the
            class that decodes with the ensemble. `None` for a repository without weights.
    """
    target = Path(folder) / "custom_generate"
    write_code(target, Path(__file__).with_name("generate.py"))
    if architecture is not None:
        write_code(target, Path(__file__).with_name("modeling_adafuse.py"))
        entry = f"custom_generate/modeling_adafuse.{architecture}"
        update_json(Path(folder) / "config.json", {"auto_map": {"AutoModelForCausalLM": entry}})
    lines = REQUIREMENTS if requirements is None else requirements
    (target / "requirements.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def update_json(file: Path, values: Mapping[str, Any]) -> None:
    """Sets keys of a JSON file; `None` removes."""
    content = {**(json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}), **values}
    kept = {key: value for key, value in content.items() if key not in values or value is not None}
    file.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
