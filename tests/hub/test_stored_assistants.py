"""The assistants that a generation config names, as an exported one does, take part in this package too; and a model
that was loaded with the code of its repository is one like others.
"""

from __future__ import annotations

import copy
import functools
import pickle
from types import SimpleNamespace

import pytest
import torch
from support.calls import no_forward
from support.tiny import TOKENIZERS, eos_ids, tiny_model
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM, pipeline

from hf_adafuse import (
    AdaFuseConfig,
    AdaFuseEnsemble,
    AdaFuseGenerationMixin,
    AdaFusePipeline,
    disable_adafuse,
    enable_adafuse,
    export_adafuse,
)
from hf_adafuse.call.arguments import EnsembleArguments
from hf_adafuse.hub import modeling_adafuse
from hf_adafuse.hub.generate import generate
from hf_adafuse.members import loading
from hf_adafuse.serve.ensembles import serve_members

BYTES, CHARS = TOKENIZERS["byte_level"](), TOKENIZERS["characters"]()
CONFIG = AdaFuseConfig(max_word_tokens=6, num_branches=2)
SHORT = {"max_new_tokens": 12, "do_sample": False}
PROMPT = "Once upon a time"
INPUTS = dict(BYTES([PROMPT], return_tensors="pt", return_token_type_ids=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    members = tiny_model(), BYTES, [tiny_model("gpt2", "characters", 3)], [CHARS]
    return str(export_adafuse(tmp_path_factory.mktemp("exports") / "ensemble", *members, CONFIG))


@pytest.fixture(scope="module")
def expected():
    members = [(tiny_model(), BYTES), (tiny_model("gpt2", "characters", 3), CHARS)]
    text = AdaFuseEnsemble(members, CONFIG).texts(PROMPT, **SHORT)[0]
    assert text != AdaFuseEnsemble(members[:1], CONFIG).texts(PROMPT, **SHORT)[0]  # else nothing below says anything
    return text


def text_of(model, **given):
    output = model.generate(**INPUTS, **({} if "generation_config" in given else SHORT), **given)
    return BYTES.decode(output[0, INPUTS["input_ids"].shape[1] :], skip_special_tokens=True)


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def test_every_way_of_the_package_loads_them(folder, expected):
    assert text_of(enable_adafuse(load(folder))) == expected
    for members in ([folder], [load(folder)], [(load(folder), BYTES)]):
        ensemble = AdaFuseEnsemble(members)
        assert ensemble.texts(PROMPT, **SHORT) == [expected]
        assert [len(one.get_vocab()) for one in ensemble.tokenizers] == [len(BYTES), len(CHARS)]
    pipe = pipeline("text-generation", model=folder, pipeline_class=AdaFusePipeline)
    assert pipe(PROMPT, return_full_text=False, **SHORT)[0]["generated_text"] == expected


def test_they_come_in_the_main_models_dtype_and_once(folder):
    model = enable_adafuse(load(folder).to(torch.bfloat16))
    outputs = [model.generate(**INPUTS, **SHORT, return_dict_in_generate=True) for _ in range(2)]
    assert all(len(output.stats["members"]) == 2 for output in outputs)
    (assistant,) = [loaded for (kind, *_), loaded in loading._ASSISTANTS[model].items() if kind == "model"]
    assert assistant.dtype is torch.bfloat16
    ensemble = AdaFuseEnsemble([folder], dtype=torch.bfloat16)
    assert [one.model.dtype for one in ensemble.handles] == [torch.bfloat16] * 2


def test_what_the_call_or_the_binding_names_comes_before_them(folder, expected):
    model = enable_adafuse(load(folder))
    alone = text_of(enable_adafuse(load(folder), [], None, None, CONFIG))
    assert text_of(model, assistant_models=[]) == alone != expected
    assert AdaFuseEnsemble([folder]).texts(PROMPT, assistant_models=[], **SHORT) == [alone]
    assert text_of(model, adafuse_config=False) == text_of(load(folder))
    other = [tiny_model("llama", "byte_level", 1)], [BYTES]
    by_call = text_of(model, assistant_models=other[0], assistant_tokenizers=other[1])
    assert by_call == text_of(enable_adafuse(load(folder), *other, BYTES)) not in (alone, expected)
    assert AdaFuseEnsemble([folder, (other[0][0], BYTES)]).texts(PROMPT, **SHORT) == [by_call]
    # Tokenizers without models are for the models that the config names.
    enable_adafuse(model, assistant_tokenizers=["no/tokenizer"])
    with no_forward(model), pytest.raises(ValueError, match=r"`assistant_tokenizers\[0\]` must be a tokenizer"):
        text_of(model)


def test_the_config_of_a_call_names_them_too(folder, expected):
    model = enable_adafuse(copy.copy(tiny_model()), tokenizer=BYTES)
    model.name_or_path = folder
    for named in ("./assistant_1", f"{folder}/assistant_1"):
        passed = GenerationConfig(
            adafuse_config=CONFIG.to_dict(),
            assistant_models=[named],
            eos_token_id=eos_ids(BYTES),
            pad_token_id=2,
            **SHORT,
        )
        assert text_of(model, generation_config=passed) == expected
    passed.return_dict_in_generate = True
    assert AdaFuseEnsemble([(model, BYTES)]).texts(PROMPT, generation_config=passed) == [expected]
    passed.assistant_models = ["./missing"]
    with no_forward(model), pytest.raises(ValueError, match=r"`assistant_models\[0\]` must be a model.*'./missing'"):
        text_of(model, generation_config=passed)


def test_the_code_of_a_repository_reads_what_an_older_package_has_bound():
    bound = SimpleNamespace(**vars(EnsembleArguments([tiny_model()], [BYTES], adafuse_config=True)))
    del bound.repository
    completed = EnsembleArguments(max_batch_size=2).over(bound)
    assert completed == EnsembleArguments([tiny_model()], [BYTES], adafuse_config=True, max_batch_size=2)


def test_a_server_of_one_has_its_members_alone_too(folder):
    ensemble, *alone = serve_members("all", [(load(folder), BYTES)])
    assert ensemble.members == [one.name for one in alone] and len(ensemble.lengths) == 2
    assert [len(one.ensemble.handles) for one in (ensemble, *alone)] == [2, 1, 1]


def test_an_export_of_one_says_that_they_would_be_left_out(folder, tmp_path):
    with pytest.raises(ValueError, match="`assistant_models` must be given for this main model"):
        export_adafuse(tmp_path / "again", load(folder), BYTES)
    assert export_adafuse(tmp_path / "none", load(folder), BYTES, []).exists()
    again = export_adafuse(tmp_path / "again", AdaFuseEnsemble([folder]).model)
    assert (again / "assistant_1" / "model.safetensors").exists()


def with_code():
    """A model as `from_pretrained` with `trust_remote_code=True` loads it from an exported repository."""
    model = modeling_adafuse.LlamaForCausalLM(tiny_model().config).eval()
    model.load_state_dict(tiny_model().state_dict())
    model.generation_config = copy.deepcopy(tiny_model().generation_config)
    model.generate = functools.partial(generate, model=model)
    return model


def test_the_code_of_a_repository_is_set_aside_and_comes_back(expected):
    model = with_code()
    own, its_generate = type(model), model.generate
    assert disable_adafuse(model) is model and type(model) is own  # it was not enabled
    assert enable_adafuse(model) is model
    assert isinstance(model, AdaFuseGenerationMixin) and "generate" not in vars(model)
    assert not isinstance(model, modeling_adafuse.AdaFuseRepositoryGenerationMixin)
    assert torch.equal(model.generate(**INPUTS, **SHORT), tiny_model().generate(**INPUTS, **SHORT))
    enable_adafuse(model, [tiny_model("gpt2", "characters", 3)], [CHARS], BYTES, CONFIG)
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert text_of(twin) == expected and type(twin) is type(model)
    assert disable_adafuse(model) is model
    assert type(model) is own and model.generate is its_generate
    assert "_adafuse_generate" not in vars(model)


def test_a_generate_that_is_not_of_an_export_stays():
    model, seen = copy.copy(tiny_model()), []
    model.generate = lambda **kwargs: seen.append(kwargs)
    enable_adafuse(model)
    model.generate(a=1)
    assert seen == [{"a": 1}] and type(disable_adafuse(model)) is LlamaForCausalLM


def test_members_with_the_code_of_a_repository(expected):
    model, other = with_code(), (tiny_model("gpt2", "characters", 3), CHARS)
    before = type(model), sorted(vars(model))
    assert AdaFuseEnsemble([(model, BYTES), other], CONFIG).texts(PROMPT, **SHORT) == [expected]
    assert (type(model), sorted(vars(model))) == before
    pipe = pipeline("text-generation", model=model, tokenizer=BYTES, pipeline_class=AdaFusePipeline)
    members = {"assistant_models": [other[0]], "assistant_tokenizers": [CHARS], "adafuse_config": CONFIG}
    assert pipe(PROMPT, return_full_text=False, **members, **SHORT)[0]["generated_text"] == expected
