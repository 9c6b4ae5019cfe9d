"""`Experiment`: a table or figure of the AdaFuse paper (arXiv 2601.06022) as a value.

It says whose answers to which questions it is made of, and which answers are compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from typing import Any

from ...config import AdaFuseConfig
from ...decoding.strategies.registry import STRATEGIES, make_strategy
from ...decoding.strategies.strategy import SpanStrategy
from ..evaluation.candidates import Contestant

# The tasks by name, and what tables call them.
TASKS = {
    "nq": "NQ",
    "squad": "SQuAD",
    "triviaqa": "TriviaQA",
    "gsm8k": "GSM8K",
    "flores_en_de": "En-De",
    "flores_de_en": "De-En",
    "demo": "demo",
}
# The paper's number of worked examples, where it is not the task's own.
SHOTS = {"flores_en_de": 0, "flores_de_en": 0}
# The paper's peer methods by their names in the registry, and what tables call them.
PEERS = {"blender": "LLM-Blender", "deepen": "DeePEn", "sweetspan": "SweetSpan", "unite": "UniTE"}
Peers = Mapping[str, Mapping[str, Any]]  # the settings of methods, by what tables call them
_MOST_LETTERS = 120  # of the name of a folder, without the hash; file systems allow 255 bytes
_DEFAULTS = {one.name: getattr(AdaFuseConfig(), one.name) for one in fields(AdaFuseConfig)}


@dataclass(frozen=True)
class Contrast:
    """
    A difference to show, question by question.

    Attributes:
        label (`str`): what the table calls it.
        candidate (`Contestant`): the candidate whose gain it is.
        others (`list[Contestant]`): the gain is over the best of these on each task.
    """

    label: str
    candidate: Contestant
    others: Sequence[Contestant]


@dataclass(frozen=True)
class Experiment:
    """
    A table or figure.

    Attributes:
        name (`str`): its name, like `"table1"`.
        title (`str`): its heading.
        about (`str`): a sentence that says what it shows.
        tasks (`list[str]`): the paper's tasks, from `TASKS`.
        candidates (`list[Contestant]`): who answers, a row each.
        headline (`Contestant`): the candidate that is drawn where there is no room for all of them.
        contrasts (`list[Contrast]`): the differences that are shown.
        few (`list[Contestant]`): the candidates that answer only `few_tasks`. Empty: all candidates answer all tasks.
        few_tasks (`list[str]`): the tasks of those candidates.
    """

    name: str
    title: str
    about: str
    tasks: Sequence[str]
    candidates: Sequence[Contestant]
    headline: Contestant
    contrasts: Sequence[Contrast] = ()
    few: Sequence[Contestant] = field(default=())
    few_tasks: Sequence[str] = ()

    def cells(self, tasks: Sequence[str]) -> list[tuple[str, Contestant]]:
        """The pairs of a task and a candidate that is asked it, candidate by candidate."""
        pairs = [(task, candidate) for candidate in self.candidates for task in tasks]
        return [(task, one) for task, one in pairs if one not in self.few or task in self.few_tasks]

    def without(self, refused: Collection[Contestant]) -> Experiment:
        """The experiment without some candidates, and without the differences to and of these."""
        kept = [one for one in self.contrasts if not {one.candidate, *one.others} & {*refused}]
        return replace(self, candidates=[one for one in self.candidates if one not in refused], contrasts=kept)


def usable_peers(
    names: Sequence[str] = tuple(PEERS), options: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[Peers, dict[str, str]]:
    """
    Find the methods that are registered and have all that they need, and say why the others are left out.

    Args:
        names (`list[str]`, *optional*): the names of methods in the registry. By default the paper's peers.
        options (`dict[str, dict]`, *optional*): by the name of a method, its options that are not the defaults.

    Returns:
        `tuple[dict[str, dict], dict[str, str]]`: the settings of each usable method, and the reasons why others are
        left out. The keys of both are what tables call the methods.
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
    # Without a model that ranks the answers, LLM-Blender is not what the paper compares with.
    return f"{label}, by NLL" if name == "blender" and "ranker" not in options else label


def adafuse(members: Sequence[int], label: str, **settings: Any) -> Contestant:
    """AdaFuse with these settings. Those that are the defaults are dropped, so that equal settings make equal
    candidates in all tables."""
    changed = {name: value for name, value in settings.items() if value != _DEFAULTS[name]}
    return Contestant(tuple(members), label, changed)


def has_spans(candidate: Contestant) -> bool:
    """Whether the candidate's rounds are spans of words. Those of a member alone, of methods over tokens and of methods
    over whole answers are not."""
    method = STRATEGIES.get(str(candidate.settings.get("method", "adafuse")))
    is_of_spans = method is not None and issubclass(method, SpanStrategy) and not method.is_whole
    return is_of_spans and not candidate.is_alone


def slug(candidate: Contestant) -> str:
    """The name of a candidate's folder, like `1_alone` or `1+2_adafuse_num_branches=1`. A hash of the settings follows
    where the name does not have them in full: a value may be the path of a model."""
    members = "+".join(str(member + 1) for member in candidate.members)
    if candidate.is_alone:
        return f"{members}_alone"
    settings = dict(candidate.settings)
    options = settings.pop("method_options", {})
    method = settings.pop("method", "adafuse")
    values = {name: str(value) for name, value in sorted([*settings.items(), *options.items()])}
    whole = "_".join([members, method, *(f"{name}={value}" for name, value in values.items())])
    plain = "_".join([members, _plain(method), *(f"{name}={_plain(value)}" for name, value in values.items())])
    if plain == whole and len(plain) <= _MOST_LETTERS:
        return plain
    return f"{plain[:_MOST_LETTERS]}-{sha256(json.dumps(candidate.settings, sort_keys=True).encode()).hexdigest()[:8]}"


def _plain(text: str) -> str:
    """A text with `-` in place of what parts the names and values of a folder, or is no letter of all systems."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text)
