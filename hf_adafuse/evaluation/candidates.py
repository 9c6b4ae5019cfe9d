"""What `hf-adafuse tune` chooses among: every member alone, pairs and all of them times every rule. No model.

The table below is all there is to edit: a rule is a name without commas and the fields of `AdaFuseConfig` in which it
differs from the defaults, the paper's. Of weights the first is the main model's, the last that of each assistant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from ..config import PRESETS, AdaFuseConfig

RULES: dict[str, dict[str, Any]] = {
    # The paper's, at other settings too, and spans compared by another measure.
    "span": {},
    "span B 1": {"num_branches": 1},
    "span M 1": {"max_words": 1},
    "span tau 0.9": {"margin_threshold": 0.9},
    "span length^0.5": {"length_exponent": 0.5},
    "span length^0": {"length_exponent": 0.0},
    "span margin 0.5": {"switch_margin": 0.5},
    "horizon": {"fusion": "horizon"},
    "horizon 3:1": {"fusion": "horizon", "model_weights": (3, 1)},
    "horizon prompt weights x10": {"fusion": "horizon", "model_weights": "prompt", "prompt_sharpness": 10.0},
    "horizon margin 0.5": {"fusion": "horizon", "switch_margin": 0.5},
    # Word by word: a mixture of the members, a product, or between the two; and what is recommended untuned.
    "word": {"fusion": "word"},
    "word geometric": {"fusion": "word", "word_mean": "geometric"},
    "word root": {"fusion": "word", "word_mean": "root"},
    "word distinct": {"fusion": "word", "word_part": "distinct"},
    "robust": PRESETS["robust"],
    # The same with a main model that counts more: by fixed weights, or by what it makes of the prompt or the text.
    "word root 3:1": {"fusion": "word", "word_mean": "root", "model_weights": (3, 1)},
    "word 3:1": {"fusion": "word", "model_weights": (3, 1)},
    "word geometric 3:1": {"fusion": "word", "word_mean": "geometric", "model_weights": (3, 1)},
    "word example weights x20": {"fusion": "word", "model_weights": "examples", "prompt_sharpness": 20.0},
    "word prompt weights": {"fusion": "word", "model_weights": "prompt"},
    "word prompt weights x10": {"fusion": "word", "model_weights": "prompt", "prompt_sharpness": 10.0},
    "word online weights": {"fusion": "word", "online_rate": 1.0},
    # A main model that is left only where others win clearly, or not asked about where it is certain.
    "word margin 0.5": {"fusion": "word", "switch_margin": 0.5},
    "word margin 1": {"fusion": "word", "switch_margin": 1.0},
    "word margin 2": {"fusion": "word", "switch_margin": 2.0},
    "word 3:1 margin 1": {"fusion": "word", "model_weights": (3, 1), "switch_margin": 1.0},
    "word gate 0.5": {"fusion": "word", "certainty_gate": 0.5},
    "word gate 0.8": {"fusion": "word", "certainty_gate": 0.8},
    "word gate 0.5 margin 1": {"fusion": "word", "certainty_gate": 0.5, "switch_margin": 1.0},
    # Other methods: over words, over tokens, and over whole answers.
    "sweetspan": {"method": "sweetspan"},
    "cool-fusion": {"method": "cool-fusion"},
    "UniTE": {"method": "unite"},
    "GaC": {"method": "gac"},
    "best of the members' answers": {"method": "rerank"},
}

# The rule of settings that a main model has in its generation config.
OWN = "the model's own settings"


@dataclass(frozen=True)
class Candidate:
    """
    One choice.

    Attributes:
        members (`tuple[int]`): who takes part, the main model first; one alone writes its own greedy text.
        rule (`str`): its name, empty for a member alone.
        settings (`dict`): the fields of `AdaFuseConfig` in which the rule differs from the defaults.
    """

    members: tuple[int, ...]
    rule: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def is_alone(self) -> bool:
        """Whether it is a member alone."""
        return len(self.members) == 1

    @property
    def config(self) -> AdaFuseConfig | None:
        """The settings in full; `None` for a member alone."""
        return None if self.is_alone else AdaFuseConfig(**self.settings)

    def show(self, names: Sequence[str]) -> str:
        """`a alone`, or `a + b: word 3:1`, by the members' names."""
        joined = " + ".join(names[member] for member in self.members)
        return f"{joined} alone" if self.is_alone else f"{joined}: {self.rule}"


def rules_named(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """
    Rules, presets and methods by name, each with its settings as in `RULES`; weights are not yet [`fitted`].

    Args:
        names (`list[str]`): `"all"` stands for all methods and presets, `"rules"` for all rules.

    Raises:
        ValueError: a name that none of them has.
        ImportError: a method needs a library that is not there.
    """
    from ..decoding.strategies.registry import STRATEGIES, make_strategy

    methods = {name: values for name, values in PRESETS.items() if values}
    methods |= {name: {"method": name} if name != "adafuse" else {} for name in STRATEGIES}
    known = RULES | methods
    groups = {"all": list(methods), "rules": list(RULES)}
    wrong = [name for name in names if name not in {**known, **groups}]
    if wrong:
        raise ValueError(f"`--methods` must be all, rules, or of {list(known)}, but has {wrong}. Check the spelling.")
    found = {name: known[name] for group in names for name in groups.get(group, [group])}
    for settings in found.values():
        make_strategy(AdaFuseConfig(**settings))
    return found


def make_candidates(num_members: int, rules: Mapping[str, Mapping[str, Any]] | None = None) -> list[Candidate]:
    """
    All candidates: the members alone; then the pairs and, of more, all members, by who they are, by which is the main
    one, by rule. Of rules with the same settings only the first.

    Args:
        num_members (`int`): at least 2.
        rules (`dict`, *optional*): instead of `RULES`.

    Raises:
        ValueError: fewer members.
    """
    if num_members < 2:
        raise ValueError(
            f"The members must be 2 or more, but are {num_members}. Name a further one: `--assistant` on the command "
            "line."
        )
    rules = RULES if rules is None else rules
    firsts = {AdaFuseConfig(**rules[name]): name for name in reversed(list(rules))}.values()
    made = [Candidate((member,)) for member in range(num_members)]
    for size in sorted({2, num_members}):
        for chosen in combinations(range(num_members), size):
            for main in chosen:
                members = (main, *(member for member in chosen if member != main))
                made += [Candidate(members, name, fitted(rule, size)) for name, rule in rules.items() if name in firsts]
    return made


def with_own_settings(candidates: Sequence[Candidate], stored: Sequence[AdaFuseConfig | None]) -> list[Candidate]:
    """
    The candidates and, for every choice of members, what they do untuned: the settings of the main one's own.

    Left out are settings that a candidate with these members has already, weights for another number of members, and
    settings that sample: tuning compares answers that are not drawn, with which the other settings would mean nothing.

    Args:
        candidates (`list[Candidate]`)
        stored (`list[AdaFuseConfig]`): per member, the settings in its generation config, or `None`.
    """
    known = {(candidate.members, candidate.config) for candidate in candidates}
    made = list(candidates)
    for members in dict.fromkeys(candidate.members for candidate in candidates if not candidate.is_alone):
        own = stored[members[0]]
        if own is None or own.do_sample:
            continue
        own = replace(own, do_sample=None)
        is_fitting = not isinstance(own.model_weights, tuple) or len(own.model_weights) == len(members)
        if is_fitting and (members, own) not in known:
            settings = {name: value for name, value in vars(own).items() if value != getattr(AdaFuseConfig(), name)}
            made.append(Candidate(members, OWN, settings))
    return made


def fitted(rule: Mapping[str, Any], num_members: int) -> dict[str, Any]:
    """The fields of a rule with a weight for each of so many members."""
    weights = rule.get("model_weights")
    if not isinstance(weights, tuple):
        return dict(rule)
    return {**rule, "model_weights": (*weights, *[weights[-1]] * num_members)[:num_members]}
