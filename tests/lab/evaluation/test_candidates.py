"""`hf_adafuse.lab.evaluation.candidates`: rules by name."""

from __future__ import annotations

import pytest

from hf_adafuse import AdaFuseConfig
from hf_adafuse.config import PRESETS
from hf_adafuse.decoding.strategies.registry import STRATEGIES
from hf_adafuse.lab.evaluation.candidates import RULES, Contestant, fitted, rules_named


def test_rules_by_name():
    found = rules_named(["unite", "word 3:1", "robust"])
    assert found == {"unite": {"method": "unite"}, "word 3:1": RULES["word 3:1"], "robust": PRESETS["robust"]}
    assert rules_named(["rules"]) == RULES
    assert rules_named(["paper", "robust"]) == PRESETS
    assert list(rules_named(["all"])) == ["robust", *STRATEGIES]
    with pytest.raises(ValueError, match=r"`--methods` must be all, rules, or of \[.+\], but has \['unit'\]"):
        rules_named(["unit", "unite"])


def test_rules_are_valid_and_unlike():
    configs = [AdaFuseConfig(**fitted(rule, 3)) for rule in RULES.values()]
    assert len(set(configs)) == len(configs)
    assert configs[list(RULES).index("word 3:1")].model_weights == (3, 1, 1)


def test_their_settings():
    assert Contestant((0,)).config is None
    assert Contestant((0, 1), "w", {"method": "words"}).config == AdaFuseConfig(method="words")
