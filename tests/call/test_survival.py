"""What is done to models between loading and generating, and what AdaFuse is afterwards: the same.

Copies, pickles and plain offloading are in test_host, test_host_models and test_enabling; adapters in test_peft.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from support.tiny import TOKENIZERS, tiny_model
from tensor_parallel import PROMPTS, decode
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup
from transformers import AutoModelForCausalLM, TorchAoConfig

from hf_adafuse import enable_adafuse

BYTES, CHARS = TOKENIZERS["byte_level"](), TOKENIZERS["characters"]()


def own(*args, **kwargs):
    return copy.deepcopy(tiny_model(*args, **kwargs))


def pair():
    return own(), own("qwen3", "characters", 1)


def same(found, expected):
    assert found["sequences"] == expected["sequences"]
    assert found["scores"] == pytest.approx(expected["scores"], abs=1e-3)


@pytest.fixture(scope="module")
def expected():
    found = decode(*pair())
    assert len(found["scores"]) > 2 * len(PROMPTS)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Both models as a user would have them on disk."""
    path = tmp_path_factory.mktemp("models")
    for name, model in zip(("main", "assistant"), pair(), strict=True):
        enable_adafuse(model).save_pretrained(path / name)
    return path


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half()], ids=["to", "half"])
def test_a_cast_after_enabling(cast):
    assistant = tiny_model("qwen3", "characters", 1)
    main = cast(enable_adafuse(own(), [assistant], [CHARS], BYTES))
    found = decode(main, cast(own("qwen3", "characters", 1)))
    same(found, decode(cast(own()), cast(own("qwen3", "characters", 1))))
    assert assistant.dtype is torch.float32  # what is bound is not moved along


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_offloaded_after_enabling(offload, expected, tmp_path):
    main, assistant = pair()
    enable_adafuse(main)
    for name, model in (("main", main), ("assistant", assistant)):
        if offload == "cpu":
            cpu_offload(model, execution_device=torch.device("cpu"))
        else:
            disk_offload(model, tmp_path / name, execution_device=torch.device("cpu"))
        assert model.device.type == "meta"
    same(decode(main, assistant), expected)


@pytest.mark.parametrize("device_map", ["auto", "split"])
def test_loaded_with_a_device_map(device_map, folder, expected, tmp_path):
    if device_map == "split":
        device_map = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu",
                      "model.layers.1": "disk", "model.norm": "cpu", "lm_head": "disk"}  # fmt: skip
    models = [
        AutoModelForCausalLM.from_pretrained(folder / name, device_map=device_map, offload_folder=tmp_path / name)
        for name in ("main", "assistant")
    ]
    same(decode(*models), expected)


def shallow(model):
    """The model cut to one layer: half the work for the compiler."""
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    return model


@pytest.mark.slow
def test_a_compiled_model():
    main, assistant = map(shallow, pair())
    plain = decode(main, assistant, PROMPTS[:1])
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()  # other tests compile, too
    try:
        # Not torch's own backend, which needs a C++ compiler: the graphs are captured all the same.
        enable_adafuse(main).compile(backend="eager", dynamic=True)
        same(decode(main, assistant, PROMPTS[:1]), plain)
        # One for the prompt, one for a token, one for trees of all sizes.
        assert 1 <= (compiled := graphs["unique_graphs"]) <= 3
        same(decode(main, assistant, PROMPTS[:1]), plain)
        assert graphs["unique_graphs"] == compiled  # nothing is compiled anew
    finally:
        torch._dynamo.reset()


def dequantized(model):
    """The same model in plain weights."""
    plain = own() if model.config.model_type == "llama" else own("qwen3", "characters", 1)
    weights = {name: getattr(weight, "dequantize", lambda w=weight: w)() for name, weight in model.state_dict().items()}
    plain.load_state_dict(weights)
    return plain


@pytest.mark.parametrize(
    "quantization",
    [Int8WeightOnlyConfig(), IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16))],
    ids=["int8", "int4"],
)
def test_quantized_models(quantization, folder, expected):
    main, assistant = (
        AutoModelForCausalLM.from_pretrained(folder / name, quantization_config=TorchAoConfig(quantization))
        for name in ("main", "assistant")
    )
    weight = main.model.layers[0].mlp.up_proj.weight
    assert "torchao" in type(weight).__module__
    found = decode(main, assistant)
    same(found, decode(dequantized(main), dequantized(assistant)))
    assert found["scores"] != pytest.approx(expected["scores"], abs=1e-3)  # the weights did change
    same(decode(copy.deepcopy(main), assistant), found)


@pytest.mark.slow
def test_tensor_parallel(folder, expected):
    script = Path(__file__).with_name("tensor_parallel.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, folder]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((folder / f"{rank}.json").read_text())
        same(found, expected)
        assert found["shares"] == [24, 24]  # half of each model
