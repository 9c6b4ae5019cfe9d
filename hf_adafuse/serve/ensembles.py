"""What is served, by name: ensembles, and each of their members alone. Loads models; decodes nothing."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from ..config import PRESETS, AdaFuseConfig
from ..decoding.strategies.registry import make_strategy
from ..ensemble import AdaFuseEnsemble

# Settings with which a member alone writes its own greedy text.
ALONE = AdaFuseConfig(num_branches=1)
_PATH = re.compile(r"(?<![\w:/.])/(?:[\w.@+~-]+/)+[\w.@+~-]*")


@dataclass(eq=False)
class Served:
    """
    One name that requests may ask for.

    Args:
        name (`str`)
        ensemble (`AdaFuseEnsemble`)
        config (`AdaFuseConfig`): of requests that name no settings.
        members (`list[str]`): the names of the members, the main one first.
        alone (`list[Served]`): each member by itself; empty where this is one.
        template (`str`, *optional*): what the page makes a prompt of, where there is no chat: with `{question}`.
    """

    name: str
    ensemble: AdaFuseEnsemble
    config: AdaFuseConfig
    members: list[str]
    alone: list[Served] = field(default_factory=list)
    template: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        """Whether it can be asked in conversations: a member has a chat template."""
        return any(getattr(tokenizer, "chat_template", None) for tokenizer in self.ensemble.tokenizers)

    def settings(self, given: Mapping[str, Any]) -> AdaFuseConfig:
        """
        The settings of a request that names some.

        Raises:
            ValueError: they do not go together, or there are no such settings.
        """
        if not given:
            return self.config
        given = dict(given)
        preset = given.pop("preset", None)
        if preset is not None and preset not in PRESETS:
            raise ValueError(f"`preset` must be one of {list(PRESETS)}, but is {preset!r}. Choose one of these.")
        base = self.config if preset is None else AdaFuseConfig.coerce(preset)
        assert base is not None
        config = base.changed({name: value for name, value in given.items() if value is not None})
        make_strategy(config)
        return config


def serve_members(
    name: str, members: Sequence[tuple[Any, Any]], config: Any = None, template: str | None = None
) -> list[Served]:
    """
    An ensemble of loaded members, and each of these alone.

    Args:
        name (`str`): of the ensemble; a member's name is its model's, with a number where several are alike.
        members (`list[tuple]`): each a model and its tokenizer, the main one first.
        config (`AdaFuseConfig`, `dict` or `str`, *optional*): as of `generate()`.
        template (`str`, *optional*): as of [`Served`].

    Raises:
        ValueError: members that do not go together.
    """
    names = _names([_name(model) for model, _ in members])
    ensemble = AdaFuseEnsemble(members, config)
    settings = AdaFuseConfig.coerce(config)
    if settings is None:
        stored = getattr(getattr(members[0][0], "generation_config", None), "adafuse_config", None)
        settings = AdaFuseConfig.coerce(stored) or AdaFuseConfig.robust()
    alone = [
        Served(one, AdaFuseEnsemble([pair], ALONE), ALONE, [one], [], template)
        for one, pair in zip(names, members, strict=True)
    ]
    return [Served(name, ensemble, settings, names, alone, template), *alone]


def without_paths(message: str) -> str:
    """A message without the folders of this machine: of each path its last part."""
    home = str(Path.home())
    return _PATH.sub(
        lambda found: PurePath(found[0]).name or "...", message.replace(home, "~") if home != "/" else message
    )


def _name(model: Any) -> str:
    name = str(getattr(model, "name_or_path", "") or type(model).__name__)
    return name.rpartition("#")[2] or "model" if "://" in name else PurePath(name).name


def _names(names: Sequence[str]) -> list[str]:
    return [f"{name}-{index}" if names.count(name) > 1 else name for index, name in enumerate(names, start=1)]
