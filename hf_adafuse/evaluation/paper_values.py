"""What a table or figure of the AdaFuse paper (arXiv 2601.06022) is, as values: whose answers to which questions it is
made of, and what is compared. Knows no model and no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..config import AdaFuseConfig
from ..decoding.strategies.registry import STRATEGIES, make_strategy
from ..decoding.strategies.strategy import SpanStrategy
from .candidates import Candidate

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
_DEFAULTS = {one.name: getattr(AdaFuseConfig(), one.name) for one in fields(AdaFuseConfig)}


@dataclass(frozen=True)
class Contrast:
    """
    A difference to show, question by question.

    Attributes:
        label (`str`)
        candidate (`Candidate`): whose gain it is.
        others (`list[Candidate]`): over the best of these, of each task.
    """

    label: str
    candidate: Candidate
    others: Sequence[Candidate]


@dataclass(frozen=True)
class Experiment:
    """
    A table or figure.

    Attributes:
        name (`str`): `"table1"`.
        title (`str`), about (`str`): what it shows, and how.
        tasks (`list[str]`): of `TASKS`, the paper's.
        candidates (`list[Candidate]`): the rows.
        contrasts (`list[Contrast]`)
        few (`list[Candidate]`): those asked of `few_tasks` alone; empty: all are asked of all tasks.
        few_tasks (`list[str]`)
    """

    name: str
    title: str
    about: str
    tasks: Sequence[str]
    candidates: Sequence[Candidate]
    contrasts: Sequence[Contrast] = ()
    few: Sequence[Candidate] = field(default=())
    few_tasks: Sequence[str] = ()

    def cells(self, tasks: Sequence[str]) -> list[tuple[str, Candidate]]:
        """Which of these tasks each candidate is asked, candidate by candidate."""
        pairs = [(task, candidate) for candidate in self.candidates for task in tasks]
        return [(task, one) for task, one in pairs if one not in self.few or task in self.few_tasks]


def usable_peers(names: Sequence[str] = tuple(PEERS)) -> tuple[dict[str, str], dict[str, str]]:
    """
    Of these methods, those that are registered and need nothing that is not here, with what they are called; and why
    the others are left out.
    """
    found, left_out = {}, {}
    for name in names:
        label = PEERS.get(name, name)
        if name not in STRATEGIES:
            left_out[label] = f"no method {name!r} is registered"
            continue
        try:
            make_strategy(AdaFuseConfig(method=name))
        except (ValueError, ImportError) as error:
            left_out[label] = str(error)
        else:
            found[name] = label
    return found, left_out


def adafuse(members: Sequence[int], label: str, **settings: Any) -> Candidate:
    """AdaFuse with the settings that are not the defaults: the same settings are the same candidate everywhere."""
    changed = {name: value for name, value in settings.items() if value != _DEFAULTS[name]}
    return Candidate(tuple(members), label, changed)


def has_spans(candidate: Candidate) -> bool:
    """Whether the candidate writes in rounds of several words: no member alone, no tokens, no whole answers."""
    method = STRATEGIES.get(str(candidate.settings.get("method", "adafuse")))
    is_of_spans = method is not None and issubclass(method, SpanStrategy) and not method.is_whole
    return is_of_spans and not candidate.is_alone


def slug(candidate: Candidate) -> str:
    """The candidate as the name of a folder: `1_alone`, `1+2_adafuse_num_branches=1`."""
    members = "+".join(str(member + 1) for member in candidate.members)
    if candidate.is_alone:
        return f"{members}_alone"
    settings = dict(candidate.settings)
    parts = [settings.pop("method", "adafuse"), *(f"{name}={settings[name]}" for name in sorted(settings))]
    return f"{members}_{'_'.join(parts)}"
