"""PEFT: adapters on a member, and adapters of one model as members of their own."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from peft import PeftModel
from support.adapted import BYTES, KINDS, PEFT_WARNINGS, base_of, call, merged, own, same, switches, with_adapters
from support.releases import cache_of, with_cache
from support.tiny import tiny_model
from transformers import AutoModelForCausalLM

from hf_adafuse import AdaFuseConfig, AdaFuseDecodingError, AdaFuseOutput, enable_adafuse
from hf_adafuse.generation import AdaFuseGenerationMixin
from hf_adafuse.trees.adapters import weak_reference

pytestmark = PEFT_WARNINGS


# With the adapters that transformers adds, both must be of the same modules: its `set_adapter` asks each for each.
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "native"), [*((kind, False) for kind in KINDS), ("same_layers", True)])
def test_adapters_of_one_model_are_members_of_their_own(kind, native):
    model = with_adapters(kind, native)
    main, before = enable_adafuse(base_of(model)), switches(model)
    alike = {"adafuse_config": {"preset": "robust", "model_weights": None, "online_rate": 0.0}}  # all are asked
    output = call(main, [(model, "tales"), (main, None)], **alike)
    assert switches(model) == before
    same(output, call(enable_adafuse(merged(kind, "law")), [merged(kind, "tales"), own()], **alike))
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


@pytest.mark.slow
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
    paper = dict(adafuse_config=AdaFuseConfig())
    whole = call(main, [(model, "tales")], max_new_tokens=24, **paper)
    length = sum(committed.num_tokens for committed in whole.rounds[0][:2])
    start = call(main, [(model, "tales")], max_new_tokens=length, **paper)

    def go_on(adapter, with_its_cache=True):
        cache = cache_of(start) if with_its_cache else None
        return call(main, [(model, adapter)], start.sequences, 8, **paper, **with_cache(cache))

    resumed, again = go_on("tales"), go_on("tales", with_its_cache=False)
    assert resumed.sequences[0].tolist() == whole.sequences[0, : resumed.sequences.shape[1]].tolist()
    assert resumed.sequences.tolist() == again.sequences.tolist()
    run = [[member["tokens_run"] for member in output.stats["members"]] for output in (resumed, again)]
    assert run[0][0] < run[1][0] and run[0][1] < run[1][1]
    (reference, *_), *_ = cache_of(start).assistants
    assert reference().model is main
    other = go_on(None)
    same(other, go_on(None, with_its_cache=False))
    assert other.stats["members"][1]["tokens_run"] > start.sequences.shape[1]


@pytest.mark.slow
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
    assert cache_of(output).layers[0].keys.dtype is torch.bfloat16
    # What bfloat16 rounds off is small beside what an adapter does.
    exact = call(enable_adafuse(merged("same_layers", "law")), [merged("same_layers", "tales")])
    nlls, expected = (out.rounds[0][0].candidates[0].nlls for out in (output, exact))
    assert output.rounds[0][0].candidates[0].text == exact.rounds[0][0].candidates[0].text
    assert nlls == pytest.approx(expected, rel=0.1)
