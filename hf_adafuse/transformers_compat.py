"""Everything private of transformers, accelerate, PEFT and torch that this package leans on: one place each, and why.
`tests/test_transformers_compat.py` has a test for each, which fails by name when a release moves it.

The hooks of `generate()` that `generation.py` overrides are listed here (`GENERATION_HOOKS`): they are methods there.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterator
from dataclasses import fields
from typing import Any

import torch
import torch.utils._device
import transformers
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.pytorch_utils import Conv1D

# These classes are subclassed or replaced. Conv1D and DynamicLayer are not exported at the top of transformers, and
# moved before.
__all__ = ["Conv1D", "DynamicCache", "DynamicLayer"]

# The newest minor release of transformers that the whole test suite has run with. The range in setup.cfg ends with it:
# pip then installs a release that works. A newer one may rename what this module reads, as 5.24 renamed the
# argument `past_key_values` to `cache`.
NEWEST_TESTED_TRANSFORMERS = "5.24"

# The name of the cache as an argument of `generate()` and in what it returns: "cache" from transformers 5.24 on,
# "past_key_values" before.
CACHE_NAME = "cache" if "cache" in {field.name for field in fields(GenerateDecoderOnlyOutput)} else "past_key_values"

# The names under which a model's `forward` takes its cache, or the state that a recurrent model has in place of one.
# From transformers 5.24 on its own models say "cache"; models with remote code may say what older releases said.
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params", "state")

# Arguments that say nothing of a text without images: what a multimodal model's encoder made of them, an empty dict
# that `generate()` adds itself, and which tokens stand for images, all zeros, which processors add.
NO_IMAGES = ("mm_encoder_outputs", "mm_token_type_ids")

# Where torch's wrappers keep the model: those of several devices and processes, and that of `torch.compile`.
INNER_MODELS = ("module", "_orig_mod")

# The methods of GenerationMixin that are overridden, in the order in which `generate()` calls them, with the arguments
# that are relied on. There is no public way to decode otherwise inside `generate()`.
GENERATION_HOOKS = {
    "_extract_generation_mode_kwargs": ("custom_generate", "kwargs", "synced_gpus", "assistant_model", "streamer"),
    "_validate_generation_mode": ("generation_mode", "generation_config", "generation_mode_kwargs"),
    "_get_logits_processor": (
        "generation_config", "input_ids_seq_length", "encoder_input_ids", "prefix_allowed_tokens_fn",
        "logits_processor", "device", "model_kwargs",
    ),
    "_sample": (
        "input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer",
    ),
}  # fmt: skip

# What a layer of PEFT computes with: the names of its active adapters, and whether it leaves them all out. PEFT's own
# `set_adapter` and `enable_adapters` set these too, but turn gradients on and off on the way.
ADAPTER_SWITCHES = ("_active_adapter", "_disable_adapters")

# The key of a generation config that transformers derived from the model's config: while it is set, loading forgets
# every key that transformers does not know.
FROM_MODEL_CONFIG = "_from_model_config"


def warn_of_untested_release(version: str = transformers.__version__) -> None:
    """Warn that a release of transformers is newer than all that were tested."""
    if _minor(version) > _minor(NEWEST_TESTED_TRANSFORMERS):
        warnings.warn(
            f"hf_adafuse was tested with transformers up to {NEWEST_TESTED_TRANSFORMERS}, but {version} is installed. "
            f"If calls fail, install a tested release: pip install 'transformers<={NEWEST_TESTED_TRANSFORMERS}.99'.",
            stacklevel=2,
        )


def _minor(version: str) -> tuple[int, ...]:
    """The first two numbers of a version: `(5, 24)` of `"5.24.0"`."""
    return tuple(int(number) for number in version.split(".")[:2])


# Whether a pipeline hands its defaults to `generate()` in a `generation_config`. From transformers 5.23 on it passes
# them as arguments, and only where the model's generation config says nothing.
PIPELINES_PASS_A_CONFIG = _minor(transformers.__version__) < (5, 23)


def cache_argument(parameters: Collection[str]) -> str | None:
    """The parameter of a model's `forward` that takes its cache or state, or `None` where there is none."""
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)


def returned_cache(output: Any, argument: str) -> Any:
    """The cache or state in a model's output; `argument` is the parameter that takes it. `None` where there is none."""
    # An output of this release holds it under the release's name; transformers 5.24 warns where an old one is read.
    return getattr(output, CACHE_NAME if hasattr(output, CACHE_NAME) else argument, None)


def takes_keys(argument: str | None) -> bool:
    """Whether `generate()` hands a cache of keys and values to a `forward` that takes its cache under this name."""
    return argument in ("cache", "past_key_values")


def given_cache(model_kwargs: dict[str, Any]) -> Any:
    """The cache among the arguments that `generate()` hands to its decoding method, or `None`."""
    return next((model_kwargs[name] for name in CACHE_ARGUMENTS if model_kwargs.get(name) is not None), None)


def prepared_eos_ids(generation_config: Any) -> list[int]:
    """The end-of-sequence ids of a call: `generate()` resolves them, and keeps them only here."""
    eos = generation_config._eos_token_tensor
    return [] if eos is None else list(eos.flatten().tolist())


def set_prepared_eos_ids(generation_config: Any, eos_ids: list[int], device: torch.device) -> None:
    """What `_get_logits_processor` reads in a config that `generate()` has not prepared."""
    generation_config._eos_token_tensor = torch.tensor(eos_ids, device=device) if eos_ids else None


def prepared_pad_id(generation_config: Any) -> int | None:
    """The padding id of a call: resolved by `generate()` likewise."""
    pad = generation_config._pad_token_tensor
    return None if pad is None else int(pad)


def with_setting(generation_config: Any, name: str, value: Any) -> Any:
    """A copy of a generation config with one setting changed, which counts as changed only where the original does:
    `save_pretrained` refuses changed configs that it would save unchanged (that of Llama 2)."""
    changed = copy.deepcopy(generation_config)
    setattr(changed, name, value)
    if getattr(generation_config, "_original_object_hash", None) == hash(generation_config):
        changed._original_object_hash = hash(changed)
    return changed


def make_processors(model: Any, generation_config: Any, prompt: list[int], device: torch.device) -> Any:
    """The logits processors of a config's flags: transformers makes them in a method of the mixin alone."""
    return model._get_logits_processor(
        generation_config=generation_config,
        input_ids_seq_length=len(prompt),
        encoder_input_ids=torch.tensor([prompt], device=device),
        device=device,
        model_kwargs={},
    )


def attention_of(model: Any) -> str | None:
    """How a model computes attention: the public `attn_implementation` is an argument of loading, not an attribute."""
    return getattr(model.config.get_text_config(), "_attn_implementation", None)


def execution_device(model: Any) -> torch.device:
    """Where a model's inputs go; of an offloaded one accelerate's hooks on its modules know it, `model.device` not."""
    for module in model.modules():
        device = getattr(vars(module).get("_hf_hook"), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return torch.device(model.device)


def has_device_map(model: Any) -> bool:
    """Whether accelerate has placed a model: it must not be moved then."""
    return hasattr(model, "hf_device_map")


def is_spread_out(model: Any) -> bool:
    """Whether accelerate has placed the parts of a model on several devices."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """The forward hooks on a module: torch has no public list of them."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def is_compiled(module: Any) -> bool:
    """Whether torch compiles a module: wrapped, by `module.compile()`, or with a compiled `forward`."""
    return (
        "_orig_mod" in module._modules
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def has_compiled_parts(model: Any) -> bool:
    """Whether torch compiles a model or something inside it."""
    return any(map(is_compiled, model.modules()))


def is_watched() -> bool:
    """Whether torch records or replaces operations just now, by a mode, a transform or a trace: what calls none of its
    operations would be overlooked. The context of a device does not count: it acts on what makes tensors."""
    function_modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    has_mode = torch._C._len_torch_dispatch_stack() > 0 or any(
        not isinstance(mode, torch.utils._device.DeviceContext) for mode in function_modes
    )
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return has_mode or is_transformed or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]


def mark_static_address(tensor: torch.Tensor) -> None:
    """A CUDA graph may read and write a tensor where it is, without a copy; the address may change."""
    torch._dynamo.mark_static_address(tensor)


def with_modules(module: Any, kind: type, modules: dict[str, Any]) -> Any:
    """A second module of class `kind` that shares all but the modules inside: torch copies no module without them."""
    twin: Any = object.__new__(kind)
    vars(twin).update(vars(module), _modules=modules)
    return twin


def modules_inside(module: Any) -> dict[str, Any]:
    """The modules directly inside, `None` where one is left out: `named_children` skips those and repeats."""
    return dict(module._modules)


def layers_with_keys(cache: Any) -> list[Any]:
    """The layers of a cache but for those at its end that hold nothing by design: the model's last layers may share the
    keys of earlier ones."""
    layers = list(cache.layers)
    while layers and getattr(layers[-1], "is_initialized", False) and getattr(layers[-1], "keys", layers) is None:
        layers.pop()
    return layers


def holds_all_keys(layer: Any, num_tokens: int) -> bool:
    """Whether a cache's layer holds the plain keys and values of `num_tokens` tokens, one column a token, or, where it
    slides, of those in its window. A layer that stores keys in another form as well, in few bits say, does not."""
    if not isinstance(layer, DynamicLayer) or not layer.is_initialized:
        return False
    needed = min(num_tokens, layer.sliding_window - 1) if layer.is_sliding else num_tokens
    return all(tensor.dim() == 4 and needed <= tensor.shape[-2] <= num_tokens for tensor in (layer.keys, layer.values))


def num_cached(cache: Any) -> int:
    """The number of tokens of a caller's cache, of whatever kind; 0 for none. A cache of states has no length."""
    if cache is None or not cache.layers:
        return 0
    holds_keys = any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)
    return int(cache.get_seq_length() if holds_keys else cache.has_previous_state())


def adapter_configs(model: Any) -> list[Any]:
    """The configs of a model's PEFT adapters, or none."""
    return list((getattr(model, "peft_config", None) or {}).values())


def adapter_names(model: Any) -> tuple[str, ...]:
    """The names of a model's PEFT adapters."""
    return tuple(getattr(model, "peft_config", None) or {})


def unwrapped(model: Any) -> Any:
    """The model inside PEFT's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def is_adapter_layer(module: torch.nn.Module) -> bool:
    """Whether a module is a layer of PEFT, by its switches: nothing need be installed to ask."""
    # Not `hasattr`: some of PEFT's modules pass on the attributes of the module inside.
    return all(switch in vars(module) or hasattr(type(module), switch) for switch in ADAPTER_SWITCHES)


def adapters_of(layer: Any) -> Iterator[str]:
    """The names of the adapters whose weights a layer of PEFT holds."""
    if "_adapters" in vars(layer):  # a whole module trained, or some rows of an embedding
        yield from layer._adapters
        return
    for name in layer.adapter_layer_names:
        weights = getattr(layer, name, {})
        yield from weights.keys() if hasattr(weights, "keys") else ()


def has_adapter_of_each_row(module: torch.nn.Module) -> bool:
    """Whether PEFT's `adapter_names` is in force: it hangs on a hook."""
    hooks = module._forward_pre_hooks.values()
    return any("adapter_names" in (getattr(hook, "keywords", None) or {}) for hook in hooks)


def repository_in_call(frame: Any) -> str | None:
    """The name that `generate(custom_generate=...)` was given, in the frame that called the repository's code:
    transformers does not pass it on."""
    name = frame.f_locals.get("custom_generate")
    is_host = frame.f_globals.get("__name__") == "transformers.generation.utils"
    return name if is_host and isinstance(name, str) else None
