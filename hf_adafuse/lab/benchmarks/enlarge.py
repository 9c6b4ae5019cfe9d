"""A small trained model at a large one's cost, computing the same logits.

Every hidden value is held `times` over: what reads it reads the mean of the copies, what writes it writes all of them,
so that RMSNorm and LayerNorm see the same mean and variance. Added heads and neurons are read by nobody (zero columns),
added layers write nothing (zero output projections).
"""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import torch

# How many hidden values a layer count goes with, in models of the common kind (768 / 12, 4096 / 32 ...).
_WIDTH_PER_LAYER = 80
# Real layers are of round sizes, which fall into equal parts for `small_batch_linear`.
_NEURON_MULTIPLE = 32

# What each part of a layer does with the hidden values: reads them, writes them, or scales each of them.
_READS = r"(q_proj|k_proj|v_proj|query_key_value|gate_proj|up_proj|dense_h_to_4h|lm_head|embed_out)\."
_WRITES = r"(o_proj|down_proj|attention\.dense|dense_4h_to_h)\."
_EMBEDS = r"(embed_tokens|embed_in)\."
_SCALES = r"(input_layernorm|post_attention_layernorm|final_layer_norm|model\.norm)\."
_ARCHITECTURES = ("llama", "qwen3", "gpt_neox")


def enlarge(model: Any, num_parameters: int) -> Any:
    """
    A larger model with the same logits (within 1e-4 in float32; in half precision they differ by its rounding), for
    measuring speed without large weights. Its added weights are random but the same every time.

    Args:
        model (`PreTrainedModel`): a Llama, Qwen3 or GPT-NeoX causal language model; not changed.
        num_parameters (`int`): about how many parameters the new model has (within some percent, from twice the model's
            own on).

    Returns:
        `PreTrainedModel`: on the model's device, in its dtype, its output layer not tied to its embedding.

    Raises:
        ValueError: another architecture, or fewer than twice the model's parameters.
    """
    if model.config.model_type not in _ARCHITECTURES:
        raise ValueError(
            f"`model` must be one of {list(_ARCHITECTURES)}, but is {model.config.model_type!r}. Choose another model."
        )
    if num_parameters < 2 * model.num_parameters():
        raise ValueError(
            f"`num_parameters` must be at least twice the model's own {model.num_parameters()}, but is "
            f"{num_parameters}. Ask for more."
        )
    config, times = _larger_config(model.config, num_parameters)
    default = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.device(model.device):
        torch.manual_seed(0)
        torch.set_default_dtype(model.dtype)  # else it would be made in float32 first, at twice the memory
        try:
            larger = type(model)(config).eval()
        finally:
            torch.set_default_dtype(default)
    with torch.no_grad():
        small = model.state_dict()
        for name, parameter in larger.named_parameters():
            _fill(name, parameter, small.get(name), times)
    larger.generation_config = copy.deepcopy(model.generation_config)
    return larger


def _larger_config(config: Any, num_parameters: int) -> tuple[Any, int]:
    """The configuration nearest to the size and to the usual shape, and how many times each hidden value is held."""
    shapes = []
    for times in range(1, 2 + math.isqrt(num_parameters) // config.hidden_size):
        embeddings, layer, gap = _count(config, times)
        num_layers = max(config.num_hidden_layers, round((num_parameters - embeddings) / layer))
        size = embeddings + num_layers * layer
        if times == 1 or abs(size - num_parameters) < 0.5 * layer + gap:
            shape = abs(math.log(times * config.hidden_size / num_layers / _WIDTH_PER_LAYER))
            shapes.append((shape, times, num_layers))
    _, times, num_layers = min(shapes)
    larger = copy.deepcopy(config)
    embeddings, layer, _ = _count(config, times)
    num_added = (num_parameters - embeddings - num_layers * layer) // (
        num_layers * _matrices(config) * times * config.hidden_size
    )
    larger.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    larger.hidden_size = times * config.hidden_size
    num_neurons = round((times * config.intermediate_size + num_added) / _NEURON_MULTIPLE) * _NEURON_MULTIPLE
    larger.intermediate_size = max(config.intermediate_size, num_neurons)
    larger.num_attention_heads = times * config.num_attention_heads
    if getattr(config, "num_key_value_heads", None):
        larger.num_key_value_heads = times * config.num_key_value_heads
    larger.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        larger.layer_types = [*config.layer_types, *[config.layer_types[-1]] * (num_layers - config.num_hidden_layers)]
    larger.tie_word_embeddings = False
    return larger, times


def _count(config: Any, times: int) -> tuple[int, int, int]:
    """About how many parameters the embeddings and one layer have, and how far the neurons can close a gap."""
    hidden = times * config.hidden_size
    heads = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    kv_share = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) / config.num_attention_heads
    attention = hidden * times * heads * (2 + 2 * kv_share)
    mlp = _matrices(config) * hidden * times * config.intermediate_size
    return 2 * config.vocab_size * hidden, int(attention + mlp), int(mlp)


def _matrices(config: Any) -> int:
    return 2 if config.model_type == "gpt_neox" else 3


def _fill(name: str, parameter: torch.Tensor, small: torch.Tensor | None, times: int) -> None:
    """Give one parameter of the larger model its values; `small` is the same of the small one, if it has it."""
    is_write = re.search(_WRITES, name) is not None
    if small is None:  # in an added layer, which must write nothing
        if is_write:
            parameter.zero_()
        return
    if re.search(_SCALES, name) or (is_write and small.dim() == 1):
        parameter.copy_(small.repeat(times))
    elif re.search(_EMBEDS, name):
        parameter.copy_(small.repeat(1, times))
    elif is_write:
        parameter.zero_()
        parameter[:, : small.shape[1]] = small.repeat(times, 1)
    elif re.search(_READS, name):
        wide = small.repeat(1, times) / times if small.dim() == 2 else small
        parameter[: len(small)] = wide
    else:
        parameter.copy_(small)
