"""What a table or figure of the AdaFuse paper (arXiv 2601.06022) is, as values: whose answers to which questions it is
made of, and what is compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ...config import AdaFuseConfig
from ...decoding.strategies.registry import STRATEGIES, make_strategy
from ...decoding.strategies.strategy import SpanStrategy
from ..evaluation.candidates import Contestant

TASKS = {
    "nq": "NQ",
    "squad": "SQuAD",
    "triviaqa": "TriviaQA",
    "gsm8k": "GSM8K",
    "flores_en_de": "En-De",
    "flores_de_en": "De-En",
    "demo": "demo",
}
SHOTS = {"flores_en_de": 0, "flores_de_en": 0}  # the paper's; of the other tasks as the tasks themselves say
PEERS = {"blender": "LLM-Blender", "deepen": "DeePEn", "sweetspan": "SweetSpan", "unite": "UniTE"}
Peers = Mapping[str, Mapping[str, Any]]  # settings by what the method is called
_DEFAULTS = {one.name: getattr(AdaFuseConfig(), one.name) for one in fields(AdaFuseConfig)}


@dataclass(frozen=True)
class Contrast:
    """
    A difference to show, question by question.

    Attributes:
        label (`str`)
        candidate (`Contestant`): whose gain it is.
        others (`list[Contestant]`): over the best of these, of each task.
    """

    label: str
    candidate: Contestant
    others: Sequence[Contestant]


@dataclass(frozen=True)
class Experiment:
    """
    A table or figure.

    Attributes:
        name (`str`): `"table1"`.
        title (`str`), about (`str`): what it shows, and how.
        tasks (`list[str]`): of `TASKS`, the paper's.
        candidates (`list[Contestant]`): the rows.
        contrasts (`list[Contrast]`)
        few (`list[Contestant]`): those asked of `few_tasks` alone; empty: all are asked of all tasks.
        few_tasks (`list[str]`)
    """

    name: str
    title: str
    about: str
    tasks: Sequence[str]
    candidates: Sequence[Contestant]
    contrasts: Sequence[Contrast] = ()
    few: Sequence[Contestant] = field(default=())
    few_tasks: Sequence[str] = ()

    def cells(self, tasks: Sequence[str]) -> list[tuple[str, Contestant]]:
        """Which of these tasks each candidate is asked, candidate by candidate."""
        pairs = [(task, candidate) for candidate in self.candidates for task in tasks]
        return [(task, one) for task, one in pairs if one not in self.few or task in self.few_tasks]


def usable_peers(
    names: Sequence[str] = tuple(PEERS), options: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[Peers, dict[str, str]]:
    """
    Of these methods, those that are registered and need nothing that is not here; and why the others are left out.

    Args:
        names (`list[str]`, *optional*): as in the registry; by default the paper's.
        options (`dict[str, dict]`, *optional*): of a method, those that are not its defaults.

    Returns:
        `tuple[dict[str, dict], dict[str, str]]`: the settings of each, and the reasons, both by what it is called.
    """
    found: dict[str, dict[str, Any]] = {}
    left_out: dict[str, str] = {}
    for name in names:
        own = dict((options or {}).get(name, {}))
        settings: dict[str, Any] = {"method": name} | ({"method_options": own} if own else {})
        label = _peer_label(name, own)
        if name not in STRATEGIES:
            left_out[label] = f"no method {name!r} is registered"
            continue
        try:
            make_strategy(AdaFuseConfig(**settings))
        except (ValueError, ImportError) as error:
            left_out[label] = str(error)
        else:
            found[label] = settings
    return found, left_out


def _peer_label(name: str, options: Mapping[str, Any]) -> str:
    label = PEERS.get(name, name)
    # Without the model that ranks the answers it is not what the paper compares with.
    return f"{label}, by NLL" if name == "blender" and "ranker" not in options else label


def adafuse(members: Sequence[int], label: str, **settings: Any) -> Contestant:
    """AdaFuse with the settings that are not the defaults: the same settings are the same candidate everywhere."""
    changed = {name: value for name, value in settings.items() if value != _DEFAULTS[name]}
    return Contestant(tuple(members), label, changed)


def has_spans(candidate: Contestant) -> bool:
    """Whether the candidate writes in rounds of several words: no member alone, no tokens, no whole answers."""
    method = STRATEGIES.get(str(candidate.settings.get("method", "adafuse")))
    is_of_spans = method is not None and issubclass(method, SpanStrategy) and not method.is_whole
    return is_of_spans and not candidate.is_alone


def slug(candidate: Contestant) -> str:
    """The candidate as the name of a folder: `1_alone`, `1+2_adafuse_num_branches=1`."""
    members = "+".join(str(member + 1) for member in candidate.members)
    if candidate.is_alone:
        return f"{members}_alone"
    settings = dict(candidate.settings)
    options = settings.pop("method_options", {})
    parts = [settings.pop("method", "adafuse")]
    parts += [f"{name}={value}" for name, value in sorted([*settings.items(), *options.items()])]
    return re.sub(r"[^\w.=+-]+", "-", "_".join([members, *parts]))  # a value may be the path of a model
