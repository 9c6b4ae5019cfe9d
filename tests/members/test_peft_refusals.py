"""PEFT: what is no adapter of the model, and kinds of adapters that cannot take part, are refused."""

from __future__ import annotations

import pytest
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from support.adapted import PEFT_WARNINGS, base_of, call, lora, own, with_adapters

from hf_adafuse import enable_adafuse

pytestmark = PEFT_WARNINGS


@pytest.mark.parametrize(
    ("pair", "match"),
    [
        (lambda model: (model, "c"), r"`assistant_models\[0\]` must name an adapter .*\['law', 'tales'\].* names 'c'"),
        (lambda model: (own(), None), r"`assistant_models\[0\]` must name an adapter .*\[\], or None, but names None"),
        (lambda model: (model, 3), r"`assistant_models\[0\]` must be a model or a pair .*\('PeftModelFor.*', 3\)"),
        (lambda model: (model,), "must be a model or a pair"),
        (lambda model: ("gpt2", "tales"), r"must be a model or a pair .*\('gpt2', 'tales'\). Load the model"),
    ],
    ids=["unknown", "without", "no_name", "no_pair", "no_model"],
)
def test_wrong_pairs_are_refused(pair, match):
    model = with_adapters()
    with pytest.raises(ValueError, match=match):
        call(enable_adafuse(own()), [pair(model)])


@pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig])
@pytest.mark.parametrize("as_pair", [False, True])
def test_prompt_learning_is_refused(config, as_pair):
    model = get_peft_model(own(), config(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    given = (model, "default") if as_pair else model
    with pytest.raises(ValueError, match=r"must answer to token ids alone, but .*uses prompt learning"):
        call(enable_adafuse(own()), [given])
    with pytest.raises(ValueError, match=r"with PEFT, enable the base model \(`get_base_model\(\)`\)"):
        enable_adafuse(model)


@pytest.mark.parametrize("as_pair", [False, True])
def test_activated_lora_is_refused(as_pair):
    model = get_peft_model(own(), lora(alora_invocation_tokens=[5, 6]))
    with pytest.raises(ValueError, match="uses activated LoRA"):
        call(enable_adafuse(own()), [(model, "default") if as_pair else model])


def test_an_adapter_for_each_row_is_refused():
    model = with_adapters()
    enable_adafuse(base_of(model))
    with pytest.raises(ValueError, match="the main model has `adapter_names`"):
        call(model, [own()], adapter_names=["tales"])
