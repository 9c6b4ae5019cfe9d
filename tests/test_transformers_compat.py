"""Every private name of the host that the package leans on is what it leans on: with real models, caches and adapters.

A test for each name of `transformers_compat`, so that the release that moves one says which. `test_private_names` holds
that nothing else of the package uses them.
"""

from __future__ import annotations

import ast
import configparser
import copy
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from support.adapted import PEFT_WARNINGS, base_of, own, with_adapters
from support.kinds import model_of
from support.multimodal import tiny_with_images
from support.releases import STATE_NAME, cache_of, with_cache
from support.tiny import TOKENIZERS, tiny_model
from torch.overrides import BaseTorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DynamicCache,
    EncoderRepetitionPenaltyLogitsProcessor,
    GenerationConfig,
    GenerationMixin,
    LlamaForCausalLM,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StaticCache,
    cache_utils,
    dynamic_module_utils,
    pipeline,
)

from hf_adafuse import transformers_compat
from hf_adafuse.generation import AdaFuseGenerationMixin
from hf_adafuse.transformers_compat import (
    ADAPTER_SWITCHES,
    CACHE_ARGUMENTS,
    CACHE_NAME,
    FROM_MODEL_CONFIG,
    GENERATION_HOOKS,
    INNER_MODELS,
    NEWEST_TESTED_TRANSFORMERS,
    NO_IMAGES,
    PIPELINES_PASS_A_CONFIG,
    Conv1D,
    DynamicLayer,
    adapter_configs,
    adapter_names,
    adapters_of,
    attention_of,
    cache_argument,
    execution_device,
    given_cache,
    has_adapter_of_each_row,
    has_compiled_parts,
    has_device_map,
    holds_all_keys,
    hooks_of,
    is_adapter_layer,
    is_compiled,
    is_spread_out,
    is_watched,
    layers_with_keys,
    make_processors,
    mark_static_address,
    modules_inside,
    num_cached,
    prepared_eos_ids,
    prepared_pad_id,
    repository_in_call,
    returned_cache,
    set_prepared_eos_ids,
    takes_keys,
    unwrapped,
    warn_of_untested_release,
    with_modules,
    with_setting,
)
from hf_adafuse.trees.kv_cache import adopt_cache

pytestmark = PEFT_WARNINGS

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7]])


def generate(model, **kwargs):
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=2, do_sample=False, **kwargs)


def test_every_name_has_a_test_here():
    public = {name for name, value in vars(transformers_compat).items() if inspect.isfunction(value) and name[0] != "_"}
    public = {name for name in public if vars(transformers_compat)[name].__module__ == transformers_compat.__name__}
    public |= {name for name in vars(transformers_compat) if name.isupper()} | set(transformers_compat.__all__)
    tests = [node for node in ast.parse(Path(__file__).read_text(encoding="utf-8")).body if is_test(node)]
    named = {inner.id for test in tests for inner in ast.walk(test) if isinstance(inner, ast.Name)}
    assert sorted(public - named) == []
    assert len(public) > 20


def is_test(node):
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test_")


# transformers: generation


@pytest.mark.parametrize("name", GENERATION_HOOKS)
def test_a_hook_takes_the_arguments_that_are_relied_on(name):
    hook = getattr(GenerationMixin, name, None)
    assert callable(hook), f"GenerationMixin has no method {name}"
    given = list(inspect.signature(hook).parameters)
    assert [argument for argument in GENERATION_HOOKS[name] if argument not in given] == []
    if name != "_get_logits_processor":  # the others are passed on by position
        assert given[1 : 1 + len(GENERATION_HOOKS[name])] == list(GENERATION_HOOKS[name])


def test_the_hooks_are_those_that_are_overridden():
    ours = {name for name, value in vars(AdaFuseGenerationMixin).items() if inspect.isfunction(value)}
    assert sorted(name for name in ours if hasattr(GenerationMixin, name)) == sorted([*GENERATION_HOOKS, "generate"])
    # The third argument is called otherwise in ours: the host gives it by its place, as below.
    assert list(inspect.signature(AdaFuseGenerationMixin._validate_generation_mode).parameters)[3] == "mode_kwargs"


@pytest.fixture
def hook_calls(monkeypatch):
    """What `generate()` calls the hooks of a Llama with: name, positional and named arguments, result."""
    calls = []

    def watch(name):
        hook = getattr(LlamaForCausalLM, name)

        def watched(self, *args, **kwargs):
            calls.append([name, args, kwargs, None])
            calls[-1][3] = result = hook(self, *args, **kwargs)
            return result

        monkeypatch.setattr(LlamaForCausalLM, name, watched)

    for name in GENERATION_HOOKS:
        watch(name)
    return calls


def test_generate_calls_the_hooks_in_this_order(hook_calls):
    generate(own())
    assert [name for name, *_ in hook_calls] == list(GENERATION_HOOKS)


def test_generate_passes_on_what_the_hooks_return(hook_calls, monkeypatch):
    assert "_extract_generation_mode_kwargs" in GENERATION_HOOKS
    extract, sample = LlamaForCausalLM._extract_generation_mode_kwargs, LlamaForCausalLM._sample
    marks = []

    def prefix_allowed(row, ids):
        return list(range(300))

    def marked(self, *args, **kwargs):
        return {**extract(self, *args, **kwargs), "mark": "ours"}

    def caught(self, *args, mark, **kwargs):
        marks.append(mark)
        return sample(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "_extract_generation_mode_kwargs", marked)
    monkeypatch.setattr(LlamaForCausalLM, "_sample", caught)
    custom = [RepetitionPenaltyLogitsProcessor(1.5)]
    generate(own(), prefix_allowed_tokens_fn=prefix_allowed, logits_processor=custom)
    assert marks == ["ours"]  # what we put there comes to `_sample` as an argument
    _, validation, processing, sampling = hook_calls
    _, (mode, _, mode_kwargs), named, _ = validation
    assert (mode, mode_kwargs["mark"], named) == ("greedy_search", "ours", {})  # the third by its place
    assert processing[2]["prefix_allowed_tokens_fn"] is prefix_allowed
    assert processing[2]["logits_processor"] == custom
    _, args, kwargs, _ = sampling
    bound = inspect.signature(GenerationMixin._sample).bind(None, *args, **kwargs).arguments
    assert bound["logits_processor"] is processing[3]  # ours hangs on it


def prepared_config(monkeypatch, model, **kwargs):
    """The generation config that `generate()` hands to `_sample`."""
    caught = []

    def catch(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        caught.append(generation_config)
        return input_ids

    monkeypatch.setattr(type(model), "_sample", catch)
    generate(model, **kwargs)
    (config,) = caught
    return config


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, [0, 1]), ({"eos_token_id": 7}, [7]), ({"eos_token_id": [9, 3]}, [9, 3])],
)
def test_the_end_of_sequence_ids_of_a_call_are_prepared(monkeypatch, given, expected):
    assert prepared_eos_ids(prepared_config(monkeypatch, own(), **given)) == expected


def test_the_padding_id_of_a_call_is_prepared(monkeypatch):
    assert prepared_pad_id(prepared_config(monkeypatch, own())) == 2
    assert prepared_pad_id(prepared_config(monkeypatch, own(), pad_token_id=8)) == 8


def test_where_there_are_no_such_ids_none_are_prepared(monkeypatch):
    model = own()
    model.config.eos_token_id = model.config.pad_token_id = None
    model.generation_config = GenerationConfig()
    config = prepared_config(monkeypatch, model)
    assert prepared_eos_ids(config) == [] and prepared_pad_id(config) is None


def test_processors_are_made_of_flags_and_the_ids_that_are_set():
    config = GenerationConfig(min_new_tokens=2, encoder_repetition_penalty=2.0, repetition_penalty=2.0, num_beams=1)
    set_prepared_eos_ids(config, [4, 7], CPU)
    assert prepared_eos_ids(config) == [4, 7]
    processors = make_processors(tiny_model(), config, [1, 2], CPU)
    kinds = (
        EncoderRepetitionPenaltyLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        MinNewTokensLengthLogitsProcessor,
    )
    assert sorted(map(type, processors), key=str) == sorted(kinds, key=str)
    scores = processors(torch.tensor([[1, 2, 3]]), torch.ones(1, 9))[0].tolist()
    # 1 and 2 are of the prompt, which is favoured, but repeated; 3 is only repeated; one new token is not enough.
    assert scores == [1.0, 1.0, 1.0, 0.5, -float("inf"), 1.0, 1.0, -float("inf"), 1.0]
    scores = processors(torch.tensor([[1, 2, 3, 3]]), torch.ones(1, 9))[0].tolist()
    assert scores == [1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_no_ids_are_set():
    config = GenerationConfig(min_new_tokens=2, num_beams=1)
    set_prepared_eos_ids(config, [], CPU)
    assert prepared_eos_ids(config) == []
    assert make_processors(tiny_model(), config, [1, 2], CPU) == []


@pytest.mark.parametrize(("value", "is_kept"), [(True, False), (None, True)])
def test_a_config_derived_from_the_models_forgets_unknown_keys(tmp_path, value, is_kept):
    derived = GenerationConfig.from_model_config(tiny_model().config)
    assert vars(derived)[FROM_MODEL_CONFIG] is True
    settings = {FROM_MODEL_CONFIG: value, "max_new_tokens": 5, "not_of_transformers": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert loaded.max_new_tokens == 5
    assert hasattr(loaded, "not_of_transformers") is is_kept


REPOSITORY = """
import sys
from hf_adafuse.transformers_compat import repository_in_call

def generate(model, inputs=None, **kwargs):
    return repository_in_call(sys._getframe(1))
"""


def test_the_repository_of_a_call_is_found_in_its_frame(tmp_path, monkeypatch):
    (tmp_path / "recipe" / "custom_generate").mkdir(parents=True)
    (tmp_path / "recipe" / "custom_generate" / "generate.py").write_text(REPOSITORY, encoding="utf-8")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = str(tmp_path / "recipe")
    assert generate(own(), custom_generate=folder, trust_remote_code=True) == folder
    custom_generate = folder  # a name like that of the host's, elsewhere
    assert custom_generate and repository_in_call(sys._getframe()) is None


def test_a_function_as_custom_generate_is_no_repository():
    def decode(model, input_ids, **kwargs):
        return repository_in_call(sys._getframe(1))

    assert generate(own(), custom_generate=decode) is None


def test_a_pipeline_samples_where_the_models_generation_config_says_nothing(monkeypatch):
    """What `default_to_greedy` relies on: a pipeline's own `do_sample=True` gives way to the model's `False`."""
    asked = []

    def generate(self, input_ids, generation_config=None, **kwargs):
        asked.append(kwargs.get("do_sample", getattr(generation_config, "do_sample", None)) or False)
        return input_ids

    monkeypatch.setattr(LlamaForCausalLM, "generate", generate)
    for default in (None, False):
        model = own()
        model.generation_config.do_sample = default
        text_pipeline = pipeline("text-generation", model=model, tokenizer=TOKENIZERS["byte_level"](), device=CPU)
        text_pipeline("She")
        text_pipeline("She", do_sample=True)
    assert asked == [True, True, False, True]


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_setting_changes_without_a_trace(is_changed, tmp_path):
    """transformers refuses to save a changed generation config with a temperature and no sampling."""
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}', encoding="utf-8")
    loaded = GenerationConfig.from_pretrained(tmp_path)
    if is_changed:
        loaded.top_p = 0.9
    changed = with_setting(loaded, "do_sample", False)
    assert loaded.do_sample is None and changed.do_sample is False and changed.temperature == 0.5
    if is_changed:
        with pytest.raises(ValueError, match="temperature"):
            changed.save_pretrained(tmp_path)
    else:
        changed.save_pretrained(tmp_path)
        assert GenerationConfig.from_pretrained(tmp_path).do_sample is False


# transformers: models and layers


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_how_a_model_computes_attention(attention):
    assert attention_of(tiny_model(attention=attention)) == attention


def test_a_config_may_say_nothing_of_attention():
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace())
    assert attention_of(SimpleNamespace(config=config)) is None


def test_the_layers_of_gpt2_are_conv1d_with_the_weight_across():
    layer = tiny_model("gpt2").transformer.h[0].attn.c_attn
    assert type(layer) is Conv1D
    inputs = torch.randn(2, 32)
    torch.testing.assert_close(layer(inputs), torch.nn.functional.linear(inputs, layer.weight.t(), layer.bias))


# Releases of transformers


def test_the_range_in_setup_cfg_ends_with_the_newest_release_that_was_tested():
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg", encoding="utf-8")
    (line,) = [one for one in metadata["options"]["install_requires"].splitlines() if one.startswith("transformers")]
    major, minor = map(int, NEWEST_TESTED_TRANSFORMERS.split("."))
    assert line == f"transformers>=5.17,<{major}.{minor + 1}"
    (pin,) = re.findall(r"^transformers==(.*)$", (ROOT / "tests/constraints.txt").read_text("utf-8"), re.MULTILINE)
    assert pin.startswith(f"{NEWEST_TESTED_TRANSFORMERS}.")


@pytest.mark.parametrize("version", ["5.25.0", "6.0.0.dev0", "5.100.1"])
def test_a_newer_release_is_warned_of(version):
    with pytest.warns(UserWarning, match=rf"up to 5\.24, but {re.escape(version)} is installed\. .*pip install"):
        warn_of_untested_release(version)


@pytest.mark.parametrize("version", ["5.24.0", "5.24.7", "5.24.1.dev0", "5.17.0", "4.57.6"])
def test_other_releases_are_not(version):
    warn_of_untested_release(version)  # warnings are errors here


@pytest.mark.slow
def test_importing_the_mixin_warns_of_a_newer_release():
    code = "import transformers; transformers.__version__ = '5.99.0'; import hf_adafuse.generation"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("but 5.99.0 is installed") == 1


def test_what_says_nothing_of_a_text_without_images():
    """A multimodal model is given an empty `mm_encoder_outputs` by `generate()` itself."""
    given, model = [], tiny_with_images("LlavaForConditionalGeneration")
    sample = type(model)._sample

    def spy(self, *args, **kwargs):
        given.append({name: kwargs[name] for name in NO_IMAGES if name in kwargs})
        return sample(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "_sample", spy)
        model.generate(IDS, max_new_tokens=1)
    assert given in ([{NO_IMAGES[0]: {}}], [{}])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, where it is compiled first
def test_where_wrappers_keep_the_model():
    model = own()
    assert [getattr(torch.nn.DataParallel(model), INNER_MODELS[0]), getattr(torch.compile(model), INNER_MODELS[1])] == [
        model,
        model,
    ]


# Caches


def test_the_name_of_the_cache_is_that_of_this_release():
    assert CACHE_NAME in inspect.signature(LlamaForCausalLM.forward).parameters
    cache = generate(own(), return_dict_in_generate=True)[CACHE_NAME]
    assert isinstance(cache, DynamicCache) and cache.get_seq_length() == 4
    assert CACHE_NAME in CACHE_ARGUMENTS


def test_the_argument_that_takes_a_cache_or_a_state():
    assert cache_argument({"input_ids", CACHE_NAME}) == CACHE_NAME
    assert cache_argument({"input_ids", "past_key_values"}) == "past_key_values"  # remote code on any release
    assert cache_argument({"input_ids", "state"}) == "state"
    assert cache_argument({"input_ids"}) is None
    assert takes_keys(CACHE_NAME) and not takes_keys("state") and not takes_keys(None)


def test_the_cache_that_a_model_returns():
    output = tiny_model()(IDS, use_cache=True)
    assert returned_cache(output, CACHE_NAME) is output[CACHE_NAME] is not None
    # A model with remote code that says what older releases said.
    assert returned_cache(SimpleNamespace(past_key_values="old"), "past_key_values") == "old"
    assert returned_cache(SimpleNamespace(state="rwkv"), "state") == "rwkv"
    assert returned_cache(SimpleNamespace(logits=1), "state") is None


def test_the_cache_that_generate_hands_over(monkeypatch):
    caught = []

    def catch(self, input_ids, **kwargs):
        caught.append(given_cache(kwargs))
        return input_ids

    past = DynamicCache()
    for name in ("llama", "mamba"):
        model = copy.deepcopy(tiny_model() if name == "llama" else model_of(name))
        monkeypatch.setattr(type(model), "_sample", catch)
        generate(model)
        generate(model, **with_cache(past) if name == "llama" else {STATE_NAME: past})
    assert [isinstance(cache, DynamicCache) for cache in caught] == [True] * 4
    assert caught[1] is caught[3] is past
    assert given_cache({"attention_mask": IDS}) is None


def filled(cache):
    """A cache after a pass of three tokens through two layers."""
    for index in range(2):
        cache.update(torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8), index)
    return cache


def test_a_dynamic_cache_is_of_dynamic_layers():
    layers = filled(DynamicCache()).layers
    assert [type(layer) for layer in layers] == [DynamicLayer, DynamicLayer]
    assert layers[0].keys.shape == layers[0].values.shape == (1, 2, 3, 8)
    fresh = DynamicLayer()
    assert fresh.is_initialized is False and layers[0].is_initialized is True


def test_whether_a_pipeline_hands_its_defaults_to_generate_in_a_config():
    model, asked = copy.deepcopy(tiny_model()), []
    generate = model.generate
    model.generate = lambda *args, **kwargs: asked.append(kwargs) or generate(*args, **kwargs)
    pipeline("text-generation", model=model, tokenizer=TOKENIZERS["byte_level"]())("She", max_new_tokens=2)
    assert ("generation_config" in asked[0]) is PIPELINES_PASS_A_CONFIG


class FewBitsLayer(cache_utils.QuantizedLayer):
    """What all quantized layers of transformers do, with a quantizer that changes nothing."""

    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, q_tensor):
        return q_tensor


def test_a_quantized_layer_does_not_hold_all_keys():
    layer = FewBitsLayer()
    for number in (3, 2):  # the first ones are quantized, the newest ones are plain
        layer.update(torch.ones(1, 2, number, 8), torch.ones(1, 2, number, 8))
        assert isinstance(layer, DynamicLayer) and not holds_all_keys(layer, layer.get_seq_length())
    assert layer.keys.shape[-2] == 2


class LowBitLayer(DynamicLayer):
    """Keeps the newest two tokens plain, as quantized layers do, under a name that does not say so."""

    def update(self, key_states, value_states, *args, **kwargs):
        keys, values = super().update(key_states, value_states)
        self.keys, self.values = keys[..., -2:, :], values[..., -2:, :]
        return keys, values


def test_layers_at_the_end_that_hold_nothing_by_design():
    class Dummy:
        is_initialized, keys = True, None

    class Stateful:
        """As of recurrent models: it has no such attributes."""

    full = DynamicLayer()
    full.update(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2))
    for layers, number in [
        ([full, Dummy(), Dummy()], 1),
        ([Dummy(), full], 2),
        ([full, Stateful()], 2),
        ([Dummy()], 0),
    ]:
        cache = DynamicCache()
        cache.layers = layers
        assert layers_with_keys(cache) == layers[:number]
    assert layers_with_keys(DynamicCache()) == []


def test_only_a_dynamic_layer_in_use_holds_all_keys():
    layer = filled(DynamicCache()).layers[0]
    assert holds_all_keys(layer, 3) and not holds_all_keys(layer, 4) and not holds_all_keys(layer, 2)
    assert not holds_all_keys(DynamicLayer(), 3)  # nothing yet
    assert not holds_all_keys(filled(StaticCache(tiny_model().config, max_cache_len=8)).layers[0], 3)
    states = getattr(model_of("mamba")(IDS, use_cache=True), STATE_NAME).layers
    assert not any(holds_all_keys(state, IDS.shape[1]) for state in states)
    sliding = cache_utils.DynamicSlidingWindowLayer(sliding_window=3)
    sliding.update(torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 8))
    assert sliding.keys.shape[-2] == 2 and holds_all_keys(sliding, 5)
    sliding.keys = sliding.keys[..., 1:, :]
    assert not holds_all_keys(sliding, 5)


def test_a_layer_that_holds_a_part_of_its_tokens_is_refused_under_any_name():
    cache = DynamicCache()
    cache.layers = [DynamicLayer(), LowBitLayer()]
    for layer in cache.layers:
        layer.update(torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 8))
    with pytest.raises(ValueError, match=r"must be a DynamicCache with the keys of 5 tokens .* but has a LowBitLayer"):
        adopt_cache(cache, 5)


def test_the_length_of_a_cache_of_any_kind():
    assert num_cached(None) == 0
    assert num_cached(DynamicCache()) == 0
    assert num_cached(filled(DynamicCache())) == 3
    assert num_cached(cache_of(tiny_model("mistral")(IDS, use_cache=True))) == 3  # sliding
    assert num_cached(filled(StaticCache(tiny_model().config, max_cache_len=8))) == 3
    assert num_cached(cache_of(model_of("qwen3_next")(IDS, use_cache=True))) == 3  # states and keys


def test_a_cache_of_states_has_no_length_only_something_or_nothing():
    model = model_of("mamba")
    assert num_cached(DynamicCache(config=model.config)) == 0
    assert num_cached(getattr(model(IDS, use_cache=True), STATE_NAME)) == 1


# accelerate


def test_inputs_of_an_offloaded_model_go_where_its_hooks_say():
    model = accelerate.cpu_offload(own(), execution_device=CPU)
    assert model.device.type == "meta"  # what the model itself says
    assert execution_device(model) == CPU
    assert execution_device(tiny_model()) == CPU


def test_the_device_of_a_hook_may_be_a_name_or_missing():
    model = own().to("meta")
    assert execution_device(model) == torch.device("meta")
    add_hook_to_module(model, ModelHook())  # one that knows of no device
    assert execution_device(model) == torch.device("meta")
    add_hook_to_module(model.model, AlignDevicesHook(execution_device="cpu"))
    assert execution_device(model) == CPU


def test_a_model_that_was_placed_has_a_device_map():
    assert has_device_map(accelerate.dispatch_model(own(), device_map={"": "cpu"}, force_hooks=True))
    assert not has_device_map(tiny_model())


def test_a_model_on_several_devices_is_spread_out():
    model = own()
    assert not is_spread_out(model)
    assert not is_spread_out(accelerate.dispatch_model(own(), device_map={"": "cpu"}, force_hooks=True))
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    assert is_spread_out(model)


# torch


def test_the_hooks_on_a_module():
    def before(module, args):
        pass

    def after(module, args, output):
        pass

    module = torch.nn.Linear(2, 2)
    assert hooks_of(module) == []
    handles = module.register_forward_pre_hook(before), module.register_forward_hook(after)
    assert set(hooks_of(module)) == {before, after}
    for handle in handles:
        handle.remove()
    assert hooks_of(module) == []


@pytest.mark.parametrize("how", ["wrapped", "in_place", "forward"])
def test_a_compiled_module_is_told(how):
    module = torch.nn.Linear(2, 2)
    assert not is_compiled(module)
    if how == "wrapped":  # each of them compiles nothing before it is called
        module = torch.compile(module, backend="eager")
        assert "_orig_mod" in modules_inside(module)
    elif how == "in_place":
        module.compile(backend="eager")
    else:
        module.forward = torch.compile(module.forward, backend="eager")
    assert is_compiled(module)
    outer = torch.nn.Sequential(torch.nn.Sequential(module))
    assert has_compiled_parts(outer) and has_compiled_parts(module) and not is_compiled(outer)
    assert not has_compiled_parts(torch.nn.Sequential(torch.nn.Linear(2, 2)))


@pytest.mark.filterwarnings("ignore:.*jit:DeprecationWarning")
def test_whether_torch_watches():
    seen = []

    def look(x):
        seen.append(is_watched())
        return x

    x = torch.ones(2)
    look(x)
    with torch.no_grad(), torch.inference_mode(), torch.device("cpu"):
        look(x)
    assert seen == [False, False]
    with FlopCounterMode(display=False):
        look(x)
    torch.vmap(look)(x)
    torch.func.jvp(look, (x,), (x,))
    torch.jit.trace(look, x, check_trace=False)
    with torch.device("cpu"), BaseTorchFunctionMode(), torch.device("cpu"):
        look(x)
    assert seen[2:] == [True, True, True, True, True] and not is_watched()


def test_a_tensor_is_said_to_stay_where_it_is():
    """As transformers' static cache says it; torch copies what is marked so, but does not compile anew for it."""
    tensor, inside, compiled = torch.ones(2), [], []
    mark_static_address(tensor)

    def backend(module, inputs):
        compiled.append(module)
        inside.extend(node.meta["tensor_dict"] for node in module.graph.nodes if node.op == "placeholder")
        return module

    double = torch.compile(lambda x: 2 * x, backend=backend)
    double(tensor)
    assert ["_dynamo_static_input_type" in one for one in inside] == [True]
    mark_static_address(other := torch.ones(2))
    double(other)
    assert len(compiled) == 1


class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.again = self.first
        self.none = None
        self.register_module("left_out", None)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return self.scale * self.first(x)


def test_the_modules_inside():
    outer = Outer()
    inside = modules_inside(outer)
    assert inside == {"first": outer.first, "again": outer.first, "left_out": None}
    inside.clear()  # a copy
    assert len(modules_inside(outer)) == 3


def test_a_twin_shares_all_but_the_modules_inside():
    class Doubled(Outer):
        def forward(self, x):
            return 2 * super().forward(x)

    outer, other = Outer(), torch.nn.Linear(2, 2)
    outer.kept = "anything"
    twin = with_modules(outer, Doubled, {"first": other})
    assert type(twin) is Doubled and twin.kept == "anything"
    assert twin.first is other and twin.scale is outer.scale and modules_inside(twin) == {"first": other}
    assert modules_inside(outer)["first"] is outer.first is not other
    x = torch.ones(1, 2)
    assert torch.equal(twin(x), 4 * other(x)) and torch.equal(outer(x), 2 * outer.first(x))
    handle = outer.register_forward_hook(lambda module, args, output: output + 1)
    assert torch.equal(twin(x), 4 * other(x) + 1)  # hooks too
    handle.remove()


# PEFT


@pytest.mark.parametrize("native", [False, True], ids=["peft", "native"])
def test_the_adapters_of_a_model(native):
    model = with_adapters(native=native)
    assert adapter_names(model) == adapter_names(base_of(model)) == ("law", "tales")
    assert [config.r for config in adapter_configs(model)] == [4, 4]
    assert adapter_names(tiny_model()) == () and adapter_configs(tiny_model()) == []


def test_the_model_inside_its_wrapper():
    model = with_adapters()
    assert unwrapped(model) is model.get_base_model() is not model
    assert unwrapped(base_of(model)) is base_of(model)
    native, plain = with_adapters(native=True), tiny_model()
    assert unwrapped(native) is native and unwrapped(plain) is plain


@pytest.mark.parametrize("kind", ["same_layers", "other_layers", "embeddings", "embedding_rows"])
def test_a_layer_of_peft_is_told_by_its_switches_and_names_its_adapters(kind):
    model = with_adapters(kind)
    layers = [module for module in model.modules() if is_adapter_layer(module)]
    ours, theirs = set(map(id, layers)), (BaseTunerLayer, AuxiliaryTrainingWrapper)
    assert ours == {
        id(module)
        for module in model.modules()
        if isinstance(module, theirs) and not isinstance(module, torch.nn.ModuleDict)
    }
    # What a layer holds is what its parameters are called.
    for layer in layers:
        names = {name for name in ("law", "tales") for key, _ in layer.named_parameters() if name in key.split(".")}
        assert set(adapters_of(layer)) == names != set()
    assert not any(map(is_adapter_layer, tiny_model().modules()))


def test_a_module_that_passes_on_the_switches_of_another_is_no_layer_of_peft():
    layer = base_of(with_adapters()).model.layers[0].self_attn.q_proj

    class Passing(torch.nn.Module):
        def __getattr__(self, name):
            return getattr(layer, name)

    assert all(hasattr(Passing(), switch) for switch in ADAPTER_SWITCHES)
    assert is_adapter_layer(layer) and not is_adapter_layer(Passing())


def logits_of(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("kind", ["same_layers", "embedding_rows"])
def test_the_switches_do_what_peft_does_with_them(kind):
    active, disabled = ADAPTER_SWITCHES
    model, twin = (with_adapters(kind) for _ in range(2))
    layers = [module for module in model.modules() if is_adapter_layer(module)]
    trained = [parameter.requires_grad for parameter in model.parameters()]
    law = logits_of(model)
    for layer in layers:
        assert getattr(layer, active) in ("law", ["law"]) and getattr(layer, disabled) is False
        setattr(layer, disabled, "tales" not in adapters_of(layer))
        if "tales" in adapters_of(layer):
            setattr(layer, active, ["tales"])
    twin.set_adapter("tales")
    assert torch.equal(logits_of(model), logits_of(twin)) and not torch.equal(law, logits_of(twin))
    for layer in layers:
        setattr(layer, disabled, True)
    with twin.disable_adapter():
        assert torch.equal(logits_of(model), logits_of(twin))
    assert [parameter.requires_grad for parameter in model.parameters()] == trained


def test_an_adapter_for_each_row_hangs_on_a_hook():
    model, seen = with_adapters(), []
    layer = base_of(model).model.layers[0].self_attn.q_proj

    def look(module, args):
        seen.append(has_adapter_of_each_row(layer))

    base_of(model).model.layers[0].register_forward_pre_hook(look)
    model(IDS, adapter_names=["tales"])
    model(IDS)
    assert seen == [True, False]
