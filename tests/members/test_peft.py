"""PEFT: adapters on a member, and adapters of one model as members of their own."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tiny import TOKENIZERS, tiny_model
from transformers import AutoModelForCausalLM

from hf_adafuse import AdaFuseDecodingError, AdaFuseOutput, enable_adafuse
from hf_adafuse.generation import AdaFuseGenerationMixin
from hf_adafuse.trees.adapters import weak_reference

pytestmark = [
    # PEFT still asks transformers for an attribute under its old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # It says so of every second adapter that transformers adds.
    pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning"),
]

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


# With the adapters that transformers adds, both must be of the same modules: its `set_adapter` asks each for each.
@pytest.mark.parametrize(("kind", "native"), [*((kind, False) for kind in KINDS), ("same_layers", True)])
def test_adapters_of_one_model_are_members_of_their_own(kind, native):
    model = with_adapters(kind, native)
    main, before = enable_adafuse(base_of(model)), switches(model)
    output = call(main, [(model, "tales"), (main, None)])
    assert switches(model) == before
    same(output, call(enable_adafuse(merged(kind, "law")), [merged(kind, "tales"), own()]))
    # Three members of three opinions.
    for nlls in (candidate.nlls for committed in output.rounds[0] for candidate in committed.candidates):
        assert min(abs(nlls[0] - nlls[1]), abs(nlls[0] - nlls[2]), abs(nlls[1] - nlls[2])) > 1e-3
    names = [member["name"] for member in output.stats["members"]]
    assert names == [
        "the main model",
        "assistant 1 (LlamaForCausalLM, adapter 'tales')",
        "assistant 2 (LlamaForCausalLM, adapter None)",
    ]


def test_an_adapter_beside_the_model_without_one():
    model = with_adapters()
    main = enable_adafuse(base_of(model))
    expected = call(enable_adafuse(own()), [merged("same_layers", "tales")])
    with model.disable_adapter():
        before = switches(model)
        same(call(main, [(model, "tales")]), expected)
        assert switches(model) == before
    with pytest.raises(AssertionError):
        same(call(main, [(model, "tales")]), expected)


def test_adapters_cost_one_models_memory():
    def size(models):
        held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for m in models for p in m.parameters()}
        return sum(held.values())

    model = with_adapters("other_layers")
    main = enable_adafuse(base_of(model), [(model, "tales")], [BYTES], BYTES)
    (assistant,) = main._adafuse_bound.assistant_models
    adapters = sum(
        parameter.numel() * parameter.element_size()
        for name, parameter in model.named_parameters()
        if "lora_" in name or "modules_to_save" in name
    )
    assert adapters > 0
    assert size([main, assistant]) == size([tiny_model()]) + adapters
    assert size([assistant]) == size([main])  # nothing of it is its own


def test_an_error_leaves_the_adapters_as_they_were():
    model = with_adapters()
    main, before = enable_adafuse(base_of(model)), switches(model)
    layer = main.model.layers[1].self_attn.q_proj

    def fail(module, arguments):
        if module.active_adapters == ["tales"]:
            raise RuntimeError("no memory left")

    with layer.register_forward_pre_hook(fail), pytest.raises(AdaFuseDecodingError) as caught:
        call(main, [(model, "tales")])
    assert "adapter 'tales'" in caught.value.member and "no memory left" in str(caught.value)
    assert switches(model) == before


@pytest.mark.parametrize("role", ["main", "assistant"])
def test_lora_on_one_member(role):
    model, plain, other = with_adapters(), merged("same_layers", "law"), tiny_model("gpt2", "byte_level", 1)
    if role == "assistant":  # the whole PeftModel, called like any model
        same(call(enable_adafuse(own("qwen3")), [model]), call(enable_adafuse(own("qwen3")), [plain]))
        return
    main = enable_adafuse(model.get_base_model())
    expected = call(enable_adafuse(plain), [other])
    same(call(main, [other]), expected)
    same(call(model, [other]), expected)  # the wrapper's `generate` is the base's
    same(call(pickle.loads(pickle.dumps(main)), [other]), expected)
    same(call(copy.deepcopy(model), [other]), expected)
    unloaded = model.merge_and_unload()
    assert unloaded is main and isinstance(unloaded, AdaFuseGenerationMixin)
    same(call(unloaded, [other]), expected)


@pytest.mark.parametrize("native", [False, True], ids=["peft", "native"])
def test_adapters_of_an_enabled_model_are_saved_and_loaded(native, tmp_path):
    model = with_adapters(native=native)
    expected = call(enable_adafuse(base_of(model)), [(model, "tales")])
    own().save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path)
    fresh = enable_adafuse(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    if native:  # one adapter a folder
        assert (tmp_path / "adapter_model.safetensors").exists()
        fresh.load_adapter(tmp_path, "law")
        same(call(fresh, [own()]), call(enable_adafuse(merged("same_layers", "law")), [own()]))
        return
    loaded = PeftModel.from_pretrained(fresh, tmp_path / "law", adapter_name="law")
    loaded.load_adapter(tmp_path / "tales", "tales")
    same(call(loaded, [(loaded, "tales")]), expected)


def test_a_cache_resumes_the_same_adapter_only():
    model = with_adapters()
    main = enable_adafuse(base_of(model))
    whole = call(main, [(model, "tales")], max_new_tokens=24)
    length = sum(committed.num_tokens for committed in whole.rounds[0][:2])
    start = call(main, [(model, "tales")], max_new_tokens=length)

    def go_on(adapter, cache=start.past_key_values):
        return call(main, [(model, adapter)], start.sequences, 8, past_key_values=cache)

    resumed, again = go_on("tales"), go_on("tales", None)
    assert resumed.sequences[0].tolist() == whole.sequences[0, : resumed.sequences.shape[1]].tolist()
    assert resumed.sequences.tolist() == again.sequences.tolist()
    run = [[member["tokens_run"] for member in output.stats["members"]] for output in (resumed, again)]
    assert run[0][0] < run[1][0] and run[0][1] < run[1][1]
    (reference, *_), *_ = start.past_key_values.assistants
    assert reference().model is main
    other = go_on(None)
    same(other, go_on(None, None))
    assert other.stats["members"][1]["tokens_run"] > start.sequences.shape[1]


def test_a_bound_adapter_is_checked_at_each_call_and_holds_nothing_alive(tmp_path):
    BYTES.save_pretrained(tmp_path)
    model = with_adapters()
    main = model.get_base_model()
    main.name_or_path = main.config._name_or_path = str(tmp_path)  # where its tokenizer is
    enable_adafuse(main, [(model, "tales")])
    ids = BYTES(["Once upon a time"], return_tensors="pt").input_ids
    settings = dict(max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    output = main.generate(ids, **settings)
    assert isinstance(output, AdaFuseOutput)
    same(output, call(main, [(model, "tales")], max_new_tokens=6))
    twin = copy.deepcopy(main)  # shares the original's assistants
    same(twin.generate(ids, **settings), output)
    model.merge_adapter(["law"])
    with pytest.raises(ValueError, match=r"adapters are apart from it, but \['law'\] are merged"):
        main.generate(ids, **settings)
    (assistant,) = main._adafuse_bound.assistant_models
    watched, reference = weakref.ref(main), weak_reference(assistant)
    assert reference() == assistant
    del assistant, model, main, twin
    gc.collect()
    assert watched() is None and reference() is None


def test_adapters_in_low_precision():
    model = with_adapters()
    main = enable_adafuse(base_of(model)).to(torch.bfloat16)
    output = call(main, [(model, "tales")])
    assert output.past_key_values.layers[0].keys.dtype is torch.bfloat16
    # What bfloat16 rounds off is small beside what an adapter does.
    exact = call(enable_adafuse(merged("same_layers", "law")), [merged("same_layers", "tales")])
    nlls, expected = (out.rounds[0][0].candidates[0].nlls for out in (output, exact))
    assert output.rounds[0][0].candidates[0].text == exact.rounds[0][0].candidates[0].text
    assert nlls == pytest.approx(expected, rel=0.1)


# Refusals


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
