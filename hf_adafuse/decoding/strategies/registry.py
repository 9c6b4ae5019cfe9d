"""The methods by name."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from ...config import AdaFuseConfig
from ...settings.config_checks import check_use
from ...settings.old_fields import OLD_FIELDS
from ...settings.spelling import did_you_mean
from .adafuse import AdaFuse
from .adaptive_spans import AdaptiveSpans
from .anchor import Anchor
from .blender import Blender
from .cool_fusion import CoolFusion
from .deepen import DeePEn
from .gac import GaC
from .majority import Majority, WholeAnswers
from .peer_review import PeerReview
from .safe import SAFE
from .selection import Select
from .specfuse import SpecFuse
from .strategy import SpanStrategy
from .sweetspan import SweetSpan
from .text_spans import TextSpans
from .token_strategy import TokenStrategy
from .unite import UniTE
from .words import Words

STRATEGIES: dict[str, type[Any]] = {
    "adafuse": AdaFuse,
    "words": Words,
    "unite": UniTE,
    "gac": GaC,
    "deepen": DeePEn,
    "safe": SAFE,
    "sweetspan": SweetSpan,
    "cool-fusion": CoolFusion,
    "specfuse": SpecFuse,
    "spans": TextSpans,
    "majority": Majority,
    "rerank": WholeAnswers,
    "select": Select,
    "peer-review": PeerReview,
    "blender": Blender,
    "anchor": Anchor,
}


def register_strategy(name: str, cls: type[SpanStrategy] | type[TokenStrategy]) -> None:
    """
    Give a method of your own a name, by which `adafuse_config={"method": name}` uses it in this process.

    Args:
        name (`str`): the name, without commas, and without spaces at its ends. It must not be that of another method.
            A class that is defined anew, with the same name in the same module, may take the place of the earlier one.
        cls (`type`): a subclass of [`SpanStrategy`] or [`TokenStrategy`]. Its keyword arguments are the options of the
            method.

    Raises:
        ValueError: the name cannot be used, the class is no method, or its methods take other arguments than the
            decoder passes.
    """
    if not isinstance(name, str) or not name or "," in name or name != name.strip():
        raise ValueError(
            f"`name` must be a text without commas, and without spaces at its ends, but is {name!r}. Choose another."
        )
    if not (inspect.isclass(cls) and issubclass(cls, (SpanStrategy, TokenStrategy))):
        raise ValueError(f"`cls` must be a subclass of SpanStrategy or TokenStrategy, but is {cls!r}. Derive it.")
    known = STRATEGIES.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"`name` must be new, but {name!r} is {known.__qualname__} already. Choose another one.")
    for method, arguments in _called_with(cls).items():
        _check_signature(cls, method, arguments)
    fields = {one.name for one in dataclasses.fields(AdaFuseConfig)}
    taken = sorted((fields | OLD_FIELDS.keys() | {"preset"}).intersection(inspect.signature(cls).parameters))
    if taken:
        raise ValueError(f"`cls` must have options of new names, but has {taken} of AdaFuseConfig. Rename them.")
    unknown = [one for one in cls.uses if one not in fields]
    if unknown:
        raise ValueError(f"`cls.uses` must be names of fields of AdaFuseConfig, but has {unknown}. Check the spelling.")
    STRATEGIES[name] = cls


def _called_with(cls: type[Any]) -> dict[str, tuple[str, ...]]:
    """The arguments with which the methods of a strategy are called, by position."""
    if issubclass(cls, TokenStrategy):
        return {"choose": ("members", "weights"), "asks": ("main",)}
    return {
        "choose": ("candidates", "weights", "main_index"),
        "make_proposer": ("member_index", "members", "splitter"),
        "asked_members": ("weights",),
        "propose_alone": ("main", "root"),
        "fuse": ("texts",),
        "draft_method": (),
    }


def _check_signature(cls: type[Any], method: str, arguments: tuple[str, ...]) -> None:
    """
    Raises:
        ValueError: the class has no such method, or one that cannot be called with these arguments by position.
    """
    found = getattr(cls, method, None)
    if not callable(found):
        raise ValueError(f"`cls.{method}` must be a method, but is {found!r} in {cls.__qualname__}. Define it.")
    try:
        inspect.signature(found).bind(None, *arguments)
    except TypeError as error:
        shown = ", ".join(("self", *arguments))
        raise ValueError(
            f"`cls.{method}` must take ({shown}), but that of {cls.__qualname__} does not: {error}. Mend it."
        ) from None


def has_adaptive_spans(method: str) -> bool:
    """Whether a method, by its name, is AdaFuse or proposes as AdaFuse does: spans of adaptive length."""
    return issubclass(STRATEGIES[method], AdaptiveSpans)


def options_of(method: str) -> dict[str, Any]:
    """The options of a method and their defaults."""
    parameters = inspect.signature(STRATEGIES[method]).parameters.values()
    return {one.name: None if one.default is one.empty else one.default for one in parameters}


def make_strategy(config: AdaFuseConfig) -> Any:
    """
    The method that the settings name, for one prompt.

    Raises:
        ValueError: no such method, or options or settings that it has not.
        ImportError: a library that it needs is not there.
    """
    if config.method not in STRATEGIES:
        otherwise = "Check the spelling, or give your own class a name with register_strategy."
        hint = did_you_mean(config.method, STRATEGIES, otherwise)
        raise ValueError(f"`method` must be one of {list(STRATEGIES)}, but is {config.method!r}. {hint}")
    cls = STRATEGIES[config.method]
    check_use(config, cls.uses, list(options_of(config.method)))
    strategy = cls(**config.method_options)
    strategy.config = config
    return strategy
