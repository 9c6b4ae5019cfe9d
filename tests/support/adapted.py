"""Tiny models with PEFT adapters, calls of them, and what to compare."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model
from transformers.integrations import peft as host_peft

from support.tiny import TOKENIZERS, tiny_model

PEFT_WARNINGS = [
    # PEFT still asks transformers for an attribute under its old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # It says so of every second adapter that transformers adds.
    pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning"),
]

# transformers 5.24 asks for a PEFT newer than any that was released by November 2026 where it adds adapters itself. All
# that it uses of PEFT is in the older one: only the question for the version is left out.
if Version(peft.__version__) < Version(host_peft.MIN_PEFT_VERSION):
    host_peft.check_peft_version = lambda min_version: None

BYTES = TOKENIZERS["byte_level"]()
ATTENTION, MLP = ["q_proj", "v_proj"], ["up_proj", "down_proj"]


def lora(targets=ATTENTION, **kwargs):
    """An adapter that changes what the model says."""
    return LoraConfig(
        r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM", **kwargs
    )


# The configurations of the adapters "law" and "tales".
KINDS = {
    "same_layers": (lora(), lora()),
    "other_layers": (lora(), lora(MLP, modules_to_save=["lm_head"])),
    "embeddings": (lora(["lm_head", "embed_tokens"]), lora(["embed_tokens", "q_proj"])),
    "embedding_rows": (
        lora(trainable_token_indices=[5, 60]),
        lora(MLP, trainable_token_indices=[60, 70], use_rslora=True),
    ),
}


def own(*args, **kwargs):
    return copy.deepcopy(tiny_model(*args, **kwargs))


def randomize(model):
    """Give the adapters' weights that begin as copies of the model's values of their own."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name or "trainable_tokens_delta" in name:
                parameter.add_(torch.randn(parameter.shape) * parameter.std() * 0.5)
    return model


def with_adapters(kind="same_layers", native=False):
    """A model with the adapters "law", which is active, and "tales": a `PeftModel`, or as transformers adds them."""
    model = own()
    torch.manual_seed(0)
    first, second = copy.deepcopy(KINDS[kind])
    if native:
        model.add_adapter(first, "law")
        model.add_adapter(second, "tales")
        model.set_adapter("law")
    else:
        model = get_peft_model(model, first, adapter_name="law")
        model.add_adapter("tales", second)
    return randomize(model).eval()


def base_of(model):
    return model.get_base_model() if isinstance(model, PeftModel) else model


def merged(kind, name):
    """The plain model that the adapter makes."""
    model = with_adapters(kind)
    model.set_adapter(name)
    return model.merge_and_unload().eval()


def call(main, assistants, prompt="Once upon a time", max_new_tokens=10, **kwargs):
    ids = BYTES([prompt], return_tensors="pt").input_ids if isinstance(prompt, str) else prompt
    kwargs = {"return_dict_in_generate": True, "assistant_tokenizers": [BYTES] * len(assistants)} | kwargs
    return main.generate(input_ids=ids, attention_mask=torch.ones_like(ids), tokenizer=BYTES, do_sample=False,
                         assistant_models=assistants, max_new_tokens=max_new_tokens, **kwargs)  # fmt: skip


def same(output, expected):
    """The same text by the same rounds, and by the same numbers but for rounding."""
    assert output.sequences.tolist() == expected.sequences.tolist()
    for committed, other in zip(output.rounds[0], expected.rounds[0], strict=True):
        assert committed.text == other.text
        nlls = [candidate.nlls for candidate in committed.candidates]
        assert nlls == [pytest.approx(candidate.nlls, abs=1e-3) for candidate in other.candidates]


def switches(model):
    """What a caller sees of the adapters: which are active, which are trained."""
    layers = [module for module in base_of(model).modules() if "_disable_adapters" in vars(module)]
    active = [(copy.copy(layer._active_adapter), layer._disable_adapters) for layer in layers]
    assert len(active) > 1
    return active, [parameter.requires_grad for parameter in model.parameters()]
