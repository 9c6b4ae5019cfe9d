"""The assistants that only a generation config names, as an exported one does, are refused and never loaded; and a
model that was loaded with the code of its repository is one like others.
"""

from __future__ import annotations

import copy
import functools
import pickle
from types import SimpleNamespace

import pytest
import torch
from support.calls import no_forward
from support.tiny import TOKENIZERS, tiny_model
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
from hf_adafuse.ensemble import logger
from hf_adafuse.hub import modeling_adafuse
from hf_adafuse.hub.generate import generate

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


REFUSED = r"`assistant_models` must be passed or bound, but only the generation config names \['./assistant_1'\]"


def test_what_only_a_config_names_is_not_loaded_and_not_left_out_in_silence(folder, monkeypatch):
    """A file of a repository does not say what else is loaded, or which server is asked."""
    for name in ("load_assistant", "load_tokenizer"):
        monkeypatch.setattr(f"hf_adafuse.call.arguments.{name}", lambda *_, **__: pytest.fail("something is loaded"))
    model = enable_adafuse(load(folder), tokenizer=BYTES)
    with no_forward(model), pytest.raises(ValueError, match=REFUSED):
        text_of(model)
    pipe = pipeline("text-generation", model=load(folder), tokenizer=BYTES, pipeline_class=AdaFusePipeline)
    with pytest.raises(ValueError, match=REFUSED):
        pipe(PROMPT, **SHORT)
    other = enable_adafuse(copy.copy(tiny_model()), tokenizer=BYTES)
    passed = GenerationConfig(adafuse_config={}, assistant_models=["vllm:http://127.0.0.1:9"], **SHORT)
    with no_forward(other), pytest.raises(ValueError, match="only the generation config names"):
        text_of(other, generation_config=passed)
    passed.assistant_models = []
    assert text_of(other, generation_config=passed)


def test_an_ensemble_of_an_export_alone_warns(folder, caplog):
    logger.warning_once.cache_clear()
    ensemble = AdaFuseEnsemble([load(folder)])
    assert "names ['./assistant_1'], which take no part" in caplog.text and len(ensemble.handles) == 1
    alone = text_of(enable_adafuse(load(folder), [], None, BYTES, CONFIG))
    assert ensemble.texts(PROMPT, **SHORT) == [alone]


def test_what_the_call_or_the_binding_names_takes_part(folder, expected):
    assistant = f"{folder}/assistant_1"
    model = enable_adafuse(load(folder))
    assert text_of(model, assistant_models=[assistant]) == expected
    assert text_of(enable_adafuse(load(folder), [assistant])) == expected
    assert AdaFuseEnsemble([folder, assistant]).texts(PROMPT, **SHORT) == [expected]
    pipe = pipeline("text-generation", model=folder, pipeline_class=AdaFusePipeline, assistant_models=[assistant])
    assert pipe(PROMPT, return_full_text=False, **SHORT)[0]["generated_text"] == expected
    alone = text_of(enable_adafuse(load(folder), [], None, None, CONFIG))
    assert text_of(model, assistant_models=[]) == alone != expected
    assert text_of(model, adafuse_config=False) == text_of(load(folder))


def test_the_code_of_a_repository_reads_what_an_older_package_has_bound():
    bound = SimpleNamespace(**vars(EnsembleArguments([tiny_model()], [BYTES], adafuse_config=True)))
    del bound.on_answer
    completed = EnsembleArguments(max_batch_size=2).over(bound)
    assert completed == EnsembleArguments([tiny_model()], [BYTES], adafuse_config=True, max_batch_size=2)


def test_an_export_of_one_says_that_they_would_be_left_out(folder, tmp_path):
    with pytest.raises(ValueError, match="`assistant_models` must be given for this main model"):
        export_adafuse(tmp_path / "again", load(folder), BYTES)
    assert export_adafuse(tmp_path / "none", load(folder), BYTES, []).exists()
    again = export_adafuse(tmp_path / "again", AdaFuseEnsemble([folder, f"{folder}/assistant_1"]).model)
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
