"""The rules of `hf-adafuse eval --methods` by name, and [`Contestant`]: some members with a rule.

To add a rule, add a line to the table below. It has a name without commas, and the fields of `AdaFuseConfig` that
differ from the defaults, which are the paper's. `method_options` may be among them. In `model_weights` the first number
is the main model's weight, and the last one that of each assistant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...call.arguments import EnsembleArguments, make_ensemble
from ...config import PRESETS, AdaFuseConfig

RULES: dict[str, dict[str, Any]] = {
    # The paper's rule, the same with other settings, and rules that compare spans by another measure.
    "span": {},
    "span B 1": {"num_branches": 1},
    "span M 1": {"max_words": 1},
    "span tau 0.9": {"margin_threshold": 0.9},
    "span length^0.5": {"method_options": {"length_exponent": 0.5}},
    "span length^0": {"method_options": {"length_exponent": 0.0}},
    "span margin 0.5": {"switch_margin": 0.5},
    "horizon": {"method_options": {"horizon": True}},
    "horizon 3:1": {"method_options": {"horizon": True}, "model_weights": (3, 1)},
    "horizon prompt weights x10": {
        "method_options": {"horizon": True},
        "model_weights": "prompt",
        "prompt_sharpness": 10.0,
    },
    "horizon margin 0.5": {"method_options": {"horizon": True}, "switch_margin": 0.5},
    # Word by word: a mixture of the members, a product, something between the two, and the recommended settings.
    "word": {"method": "words"},
    "word geometric": {"method": "words", "method_options": {"mean": "geometric"}},
    "word root": {"method": "words", "method_options": {"mean": "root"}},
    "word distinct": {"method": "words", "method_options": {"part": "distinct"}},
    "robust": PRESETS["robust"],
    # Word by word with weights: fixed ones, by how well members predict the prompt or its examples, or the text so far.
    "word root 3:1": {"method": "words", "method_options": {"mean": "root"}, "model_weights": (3, 1)},
    "word 3:1": {"method": "words", "model_weights": (3, 1)},
    "word geometric 3:1": {"method": "words", "method_options": {"mean": "geometric"}, "model_weights": (3, 1)},
    "word example weights x20": {"method": "words", "model_weights": "examples", "prompt_sharpness": 20.0},
    "word prompt weights": {"method": "words", "model_weights": "prompt"},
    "word prompt weights x10": {"method": "words", "model_weights": "prompt", "prompt_sharpness": 10.0},
    "word online weights": {"method": "words", "online_rate": 1.0},
    # Word by word with the main model in front: others must win clearly, or are not asked where it is certain.
    "word margin 0.5": {"method": "words", "switch_margin": 0.5},
    "word margin 1": {"method": "words", "switch_margin": 1.0},
    "word margin 2": {"method": "words", "switch_margin": 2.0},
    "word 3:1 margin 1": {"method": "words", "model_weights": (3, 1), "switch_margin": 1.0},
    "word gate 0.5": {"method": "words", "certainty_gate": 0.5},
    "word gate 0.8": {"method": "words", "certainty_gate": 0.8},
    "word gate 0.5 margin 1": {"method": "words", "certainty_gate": 0.5, "switch_margin": 1.0},
    # Other methods: over words, over tokens, and over whole answers.
    "sweetspan": {"method": "sweetspan"},
    "cool-fusion": {"method": "cool-fusion"},
    "UniTE": {"method": "unite"},
    "GaC": {"method": "gac"},
    "best of the members' answers": {"method": "rerank"},
}


@dataclass(frozen=True)
class Contestant:
    """
    Some members with a rule.

    Attributes:
        members (`tuple[int]`): the indices of the members that take part, the main model's first. One member alone
            writes its own greedy text.
        rule (`str`): the name of the rule; empty for a member alone.
        settings (`dict`): the fields of `AdaFuseConfig` in which the rule differs from the defaults.
    """

    members: tuple[int, ...]
    rule: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def is_alone(self) -> bool:
        """Whether there is one member."""
        return len(self.members) == 1

    @property
    def config(self) -> AdaFuseConfig | None:
        """The settings in full; `None` for a member alone."""
        return None if self.is_alone else AdaFuseConfig(**self.settings)


def rules_named(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """
    Rules, presets and methods by name, each with its settings as in `RULES`; weights are not yet [`fitted`].

    Args:
        names (`list[str]`): the names. `"all"` stands for all methods and presets, `"rules"` for all rules.

    Raises:
        ValueError: a name belongs to none of them.
        ImportError: a method needs a library that is not installed.
    """
    from ...decoding.strategies.registry import STRATEGIES, make_strategy

    methods = {name: values for name, values in PRESETS.items() if values}  # the preset "paper" is the method "adafuse"
    methods |= {name: {"method": name} if name != "adafuse" else {} for name in STRATEGIES}
    known = RULES | PRESETS | methods
    groups = {"all": list(methods), "rules": list(RULES)}
    wrong = [name for name in names if name not in {**known, **groups}]
    if wrong:
        raise ValueError(f"`--methods` must be all, rules, or of {list(known)}, but has {wrong}. Check the spelling.")
    found = {name: known[name] for group in names for name in groups.get(group, [group])}
    for settings in found.values():
        make_strategy(AdaFuseConfig(**settings))
    return found


def fitted(rule: Mapping[str, Any], num_members: int) -> dict[str, Any]:
    """The fields of a rule, with a weight for each member: `(3, 1)` becomes `(3, 1, 1)` for three members."""
    weights = rule.get("model_weights")
    if not isinstance(weights, tuple):
        return dict(rule)
    return {**rule, "model_weights": (*weights, *[weights[-1]] * num_members)[:num_members]}


def check_config(members: Sequence[tuple[Any, Any]], config: AdaFuseConfig) -> None:
    """
    Refuse settings that members cannot honour, before they are asked anything.

    Args:
        members (`list[tuple]`): each member's model and tokenizer, the main model's first.
        config (`AdaFuseConfig`): the settings.

    Raises:
        ValueError, ImportError: they cannot.
    """
    (main, tokenizer), *others = members
    assistants = [model for model, _ in others], [own for _, own in others]
    make_ensemble(main, EnsembleArguments(*assistants, tokenizer=tokenizer), config)
