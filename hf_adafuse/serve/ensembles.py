"""Loads what is served, by name: ensembles, and each of their members alone."""

from __future__ import annotations

import functools
import inspect
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from ..call.planning import KnownPlans
from ..config import AdaFuseConfig
from ..decoding.strategies.registry import STRATEGIES, make_strategy
from ..ensemble import AdaFuseEnsemble
from ..members.chat import takes_system
from ..members.mistral_tokenizers import fast_interface
from ..members.model_handle import servers_of
from ..trees.adapters import base_model
from ..trees.model_call import trained_length
from .requests import check_request_options, check_request_settings

# Settings with which a member alone writes its own greedy text.
ALONE = AdaFuseConfig(num_branches=1)
# The most tokens of a prompt where a model's config does not say for which length the model was trained.
_USUAL_LENGTH = 32_768
_PATH = re.compile(r"(?<![\w:/.])/(?:[\w.@+~-]+/)+[\w.@+~-]*")


@dataclass(eq=False)
class ServedEnsemble:
    """
    An ensemble under the name that requests use.

    Args:
        name (`str`): the value of the field `model` in requests.
        ensemble (`AdaFuseEnsemble`): the members, ready to decode.
        config (`AdaFuseConfig`): the settings of requests that name none.
        members (`list[str]`): the names of the members, the main one first.
        alone (`list[ServedEnsemble]`): each member by itself. Empty where this is a member by itself.
        template (`str`, *optional*): the prompt that the page makes of a question where there is no chat, with the
            field `{question}`.
        pair (`tuple`, *optional*): the model and the tokenizer, where this is a member by itself.
        lengths (`list[int]`): for each member, the most tokens of a prompt.
        servers (`frozenset[str]`): the addresses of the servers that members are behind.
        created (`int`): when it was loaded, in seconds since 1970.

    Attributes:
        known_plans (`KnownPlans`): the plans of requests so far, for later requests that are like them.
    """

    name: str
    ensemble: AdaFuseEnsemble
    config: AdaFuseConfig
    members: list[str]
    alone: list[ServedEnsemble] = field(default_factory=list)
    template: str | None = None
    pair: tuple[Any, Any] | None = None
    lengths: list[int] = field(default_factory=list)
    servers: frozenset[str] = frozenset()
    created: int = field(default_factory=lambda: int(time.time()))
    known_plans: KnownPlans = field(default_factory=KnownPlans)

    @property
    def is_chat(self) -> bool:
        """Whether a member has a chat template, so that conversations can be asked."""
        return any(getattr(fast_interface(tokenizer), "chat_template", None) for tokenizer in self.ensemble.tokenizers)

    @functools.cached_property
    def takes_system(self) -> bool:
        """Whether all chat templates take a system message; see [`takes_system`]."""
        return takes_system(self.ensemble.tokenizers)

    def has_option(self, given: Mapping[str, Any], name: str) -> bool:
        """Whether the method of a request with these settings has an option of a name."""
        method = STRATEGIES.get(str(given.get("method") or self.config.method))
        return method is not None and name in inspect.signature(method).parameters

    def settings(self, given: Mapping[str, Any], drawn: Mapping[str, Any] | None = None) -> AdaFuseConfig:
        """
        The settings of a request: those of the ensemble, changed by those that the request names.

        Args:
            given (`dict`): the fields of `AdaFuseConfig` and options of its method that the request names.
            drawn (`dict`, *optional*): fields like `top_k` that say how tokens are sampled. They are settings only
                where the method has an option of that name, as UniTE has `top_k`.

        Raises:
            ValueError: the settings do not go together, or there are no such settings.
        """
        given = {**given, **{name: value for name, value in (drawn or {}).items() if self.has_option(given, name)}}
        if not given:
            return self.config
        check_request_settings(given)
        named = {name: value for name, value in given.items() if value is not None}
        config = AdaFuseConfig.from_dict(named, self.config)
        if config.method in STRATEGIES:
            check_request_options(STRATEGIES[config.method], given)
        make_strategy(config)
        return config


def serve_members(
    name: str,
    members: Sequence[tuple[Any, Any]],
    config: Any = None,
    template: str | None = None,
    known: Sequence[ServedEnsemble] = (),
    max_prompt_tokens: int | None = None,
) -> list[ServedEnsemble]:
    """
    An ensemble of loaded members, and each of them alone.

    Args:
        name (`str`): the ensemble's name. A member alone has its model's name, with a number where several are alike.
        members (`list[tuple]`): each a model and its tokenizer, the main one first.
        config (`AdaFuseConfig`, `dict` or `str`, *optional*): the settings, as `generate()` takes them.
        template (`str`, *optional*): as of [`ServedEnsemble`].
        known (`list[ServedEnsemble]`): what is served already. A member that is among it is not served alone twice.
        max_prompt_tokens (`int`, *optional*): the most tokens of a prompt, for any member. By default each member takes
            as many as it was trained for.

    Returns:
        `list[ServedEnsemble]`: the ensemble, then its members, except those that are among `known`.

    Raises:
        ValueError: the members do not go together.
    """
    names = _names([_name(model) for model, _ in members])
    ensemble = AdaFuseEnsemble(members, config)
    settings = AdaFuseConfig.coerce(config)
    if settings is None:
        stored = getattr(getattr(members[0][0], "generation_config", None), "adafuse_config", None)
        settings = AdaFuseConfig.coerce(stored) or AdaFuseConfig.robust()
    alone: list[ServedEnsemble] = []
    new: list[ServedEnsemble] = []
    for one, pair in zip(names, members, strict=True):
        found = next((other for other in known if other.pair is not None and other.pair[0] is pair[0]), None)
        if found is None:
            length = max_prompt_tokens or trained_length(base_model(pair[0]).config.get_text_config()) or _USUAL_LENGTH
            servers = servers_of(pair[0])
            found = ServedEnsemble(
                one, AdaFuseEnsemble([pair], ALONE), ALONE, [one], [], template, pair, [length], servers
            )
            new.append(found)
        alone.append(found)
    lengths = [length for one in alone for length in one.lengths]
    member_names = [one.name for one in alone]
    servers = frozenset[str]().union(*(one.servers for one in alone))
    return [ServedEnsemble(name, ensemble, settings, member_names, alone, template, None, lengths, servers), *new]


def read_ensembles(text: str) -> dict[str, tuple[list[str], Any]]:
    """
    The ensembles in the text of a YAML file: by name, the names of the members and the settings (`None`: none given).

    ```yaml
    ensembles:
      ensemble:
        members: [HuggingFaceTB/SmolLM2-135M-Instruct, Qwen/Qwen2.5-0.5B-Instruct]
      careful:
        members: [HuggingFaceTB/SmolLM2-135M-Instruct, vllm:http://localhost:8001]
        settings: {method: unite}
    ```

    Raises:
        ValueError: the text is not of this form, or settings do not go together.
    """
    import yaml

    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"`--ensembles` must be a file in YAML, but is not: {error}. Correct it.") from None
    ensembles = found.get("ensembles") if isinstance(found, dict) and set(found) == {"ensembles"} else None
    if not isinstance(ensembles, dict) or not ensembles:
        raise ValueError(
            "`--ensembles` must be a file with `ensembles:`, which has a name for each, but is another. Write "
            "`ensembles: {a: {members: [A, B]}}`."
        )
    made: dict[str, tuple[list[str], Any]] = {}
    for name, one in ensembles.items():
        members = one.get("members") if isinstance(one, dict) else None
        is_list = isinstance(members, list) and bool(members) and all(isinstance(each, str) for each in members)
        if not isinstance(name, str) or not is_list or set(one) - {"members", "settings"}:
            raise ValueError(
                f"The ensemble {name!r} of `--ensembles` must have `members`, a list of names, and may have "
                f"`settings`, but is {one!r}. Correct it."
            )
        config = AdaFuseConfig.coerce(one.get("settings"))
        if config is not None:
            make_strategy(config)
        made[name] = list(members or []), config
    return made


def without_paths(message: str) -> str:
    """A message in which each path of this machine is cut to its last part."""
    home = str(Path.home())
    return _PATH.sub(
        lambda found: PurePath(found[0]).name or "...", message.replace(home, "~") if home != "/" else message
    )


def _name(model: Any) -> str:
    name = str(getattr(model, "name_or_path", "") or type(model).__name__)
    return name.rpartition("#")[2] or "model" if "://" in name else PurePath(name).name


def _names(names: Sequence[str]) -> list[str]:
    return [f"{name}-{index}" if names.count(name) > 1 else name for index, name in enumerate(names, start=1)]
