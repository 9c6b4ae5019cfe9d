"""`enlarge`: makes a larger model that computes the logits of a small trained one, at the cost of its size.

Every hidden value is held `times` times. A matrix that reads it reads the mean of the copies, and a matrix that writes
it writes all of them, so RMSNorm and LayerNorm see the same mean and variance. Nothing reads the added heads and
neurons (their columns are zero), and added layers write nothing (their output projections are zero).
"""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import torch

# The hidden size over the number of layers, in models of usual shapes: 768 / 12 = 64, 4096 / 32 = 128.
_WIDTH_PER_LAYER = 80
# The neurons of a layer are a multiple of this, as in real models: then they fall into equal parts for
# `small_batch_linear`.
_NEURON_MULTIPLE = 32

# The parameters whose modules read the hidden values, write them, look them up, and scale each of them.
_READS = r"(q_proj|k_proj|v_proj|query_key_value|gate_proj|up_proj|dense_h_to_4h|lm_head|embed_out)\."
_WRITES = r"(o_proj|down_proj|attention\.dense|dense_4h_to_h)\."
_EMBEDS = r"(embed_tokens|embed_in)\."
_SCALES = r"(input_layernorm|post_attention_layernorm|final_layer_norm|model\.norm)\."
_ARCHITECTURES = ("llama", "qwen3", "gpt_neox")


def enlarge(model: Any, num_parameters: int) -> Any:
    """
    A larger model with the same logits, for measuring speed without large weights. The logits are equal within 1e-4 in
    float32; in half precision they differ by its rounding. The added weights are random, but the same every time.

    Args:
        model (`PreTrainedModel`): a Llama, Qwen3 or GPT-NeoX causal language model. It is not changed.
        num_parameters (`int`): the number of parameters of the new model, which it meets within some per cent. At least
            twice the model's own number.

    Returns:
        `PreTrainedModel`: on the model's device and in its dtype. Its output layer is not tied to its embedding.

    Raises:
        ValueError: the model has another architecture, or twice its own parameters are more than `num_parameters`.
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
        torch.set_default_dtype(model.dtype)  # a model that is made in float32 first takes twice the memory
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
    """The configuration nearest to the wanted size and a usual shape, and how many times it holds each hidden value."""
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
    """The approximate numbers of parameters of both embeddings, of one layer, and of the neurons in a layer, whose
    number can be changed to come closer to a wanted size."""
    hidden = times * config.hidden_size
    heads = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    kv_share = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) / config.num_attention_heads
    attention = hidden * times * heads * (2 + 2 * kv_share)
    mlp = _matrices(config) * hidden * times * config.intermediate_size
    return 2 * config.vocab_size * hidden, int(attention + mlp), int(mlp)


def _matrices(config: Any) -> int:
    """The number of weight matrices in the feed-forward part of a layer."""
    return 2 if config.model_type == "gpt_neox" else 3


def _fill(name: str, parameter: torch.Tensor, small: torch.Tensor | None, times: int) -> None:
    """Give one parameter of the larger model its values. `small`: the same parameter of the small model; `None` where
    that lacks it."""
    is_write = re.search(_WRITES, name) is not None
    if small is None:  # this is an added layer, which must write nothing
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
