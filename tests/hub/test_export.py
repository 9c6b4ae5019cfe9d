"""What an export writes, keeps and needs, and what it refuses without leaving a folder."""

from __future__ import annotations

import ast
import copy
import json
import math
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.adapted import PEFT_WARNINGS, base_of, merged, with_adapters
from support.project import setup_cfg
from support.tiny import TOKENIZERS, tiny_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.dynamic_module_utils import get_imports

from hf_adafuse import AdaFuseConfig, AdaFuseEnsemble, enable_adafuse, export_adafuse
from hf_adafuse.cli import main as command
from hf_adafuse.hub import export, modeling_adafuse
from hf_adafuse.hub.exported import REQUIREMENTS
from hf_adafuse.hub.repository import Repository

pytestmark = PEFT_WARNINGS


def test_code_in_a_repository_needs_transformers_and_torch_only(tmp_path):
    folder = export_adafuse(tmp_path / "method", adafuse_config={"word_boundary": "unicode"})
    requirements = (folder / "custom_generate" / "requirements.txt").read_text().splitlines()
    known = [line for line in setup_cfg()["options"]["install_requires"].splitlines() if line]
    assert set(REQUIREMENTS) <= set(known)
    assert requirements == [*REQUIREMENTS, setup_cfg()["options.extras_require"]["unicode"].strip()]
    files = {path.stem: path for path in (folder / "custom_generate").glob("*.py")}
    assert {"generate", "decoder", "words"} <= set(files) and not {"export", "__init__"} & set(files)
    for path in files.values():
        assert {name for name in get_imports(path) if name not in sys.stdlib_module_names} <= {
            "numpy",
            "torch",
            "transformers",
        }
        nodes = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
        assert {node.module for node in nodes if node.level} <= set(files), path.name


def test_generation_config_keeps_what_it_held(tmp_path):
    model = copy.deepcopy(tiny_model())
    model.generation_config.temperature = 0.6  # as in Llama 2: loads, but is refused by a strict save
    model.generation_config._original_object_hash = hash(model.generation_config)
    folder = export_adafuse(tmp_path / "full", model, TOKENIZERS["byte_level"](), adafuse_config={"max_words": 2})
    stored = AutoModelForCausalLM.from_pretrained(folder).generation_config
    assert (stored.temperature, stored.adafuse_config["max_words"], stored.assistant_models) == (0.6, 2, [])
    card = (folder / "README.md").read_text("utf-8")
    head = dict(re.findall(r"^(\w+): (.+)$", card.split("---")[1], flags=re.MULTILINE))
    assert json.loads(head["library_name"]) == "transformers"
    assert json.loads(head["pipeline_tag"]) == "text-generation"
    assert "custom_generate" in json.loads(head["tags"])


def test_auto_map_serves_transformers_classes_only(tmp_path):
    cls = modeling_adafuse.LlamaForCausalLM
    assert (
        cls is modeling_adafuse.LlamaForCausalLM and issubclass(cls, LlamaForCausalLM) and cls is not LlamaForCausalLM
    )
    assert cls.__name__ == "LlamaForCausalLM" and cls.__module__ == modeling_adafuse.__name__
    for name in ("LlamaConfig", "_private", "Unknown"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(modeling_adafuse, name)
    with pytest.raises(ValueError, match="`push_to_hub` must be False here"):
        cls(tiny_model().config).save_pretrained(tmp_path / "new", push_to_hub=True)


@pytest.mark.parametrize(
    ("name", "place"),
    [("./a", ("org/name", {"subfolder": "a", "revision": "x"})), ("org/a", ("org/a", {})), ("/a/b", ("/a/b", {}))],
)
def test_names_are_looked_up_in_the_repository(name, place):
    assert Repository("org/name", {"revision": "x"}).locate(name) == place


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(folder=None), "`folder` must be the name of a folder, but is None"),
        (dict(repo_id=5), "`repo_id` must be a name like 'me/my-ensemble', but is 5"),
        (dict(assistants=np.array(["names", "folders"])), r"`assistants` must be one of .*, but is array"),
        (dict(assistants="all"), r"`assistants` must be one of \['names', 'folders'\], but is 'all'"),
        (dict(adafuse_config=False), "`adafuse_config` must be settings, but is False"),
        (dict(assistant_models=[tiny_model()], assistants="names"), "must be Hub names .* but has 'LlamaForCausalLM'"),
        (dict(assistant_models=["tiny/none"]), "'tiny/none' must be a local folder or a Hub name that loads"),
        (dict(model="tiny/none"), "'tiny/none' must be a local folder or a Hub name that loads"),
        (dict(model=torch.nn.Linear(1, 1)), "`model` must be of a class of transformers' own"),
        (dict(model=tiny_model(), adafuse_config={"model_weights": [1, 2]}), "but is 2 for 1 members"),
        (dict(model=tiny_model()), "`tokenizer` must be a tokenizer, but is None"),
        (dict(assistant_tokenizers=[None]), "must be one per assistant model, but is 1 for 0"),
    ],
)
def test_refusals_leave_no_folder(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        export_adafuse(**{"folder": tmp_path / "new", **arguments})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("native", [False, True], ids=["peft", "native"])
def test_adapters_are_refused_until_they_are_merged(tmp_path, native):
    """Their keys are no keys of the base model: it would be loaded with random weights, without a word."""
    model, tokenizer = with_adapters(native=native), TOKENIZERS["byte_level"]()
    bound = enable_adafuse(copy.copy(tiny_model()), [(model, "tales")], [tokenizer], tokenizer)
    for argument, given in [
        ("model", [model]),
        ("model", [base_of(model)]),
        ("assistant_models[0]", [tiny_model(), tokenizer, [model], [tokenizer]]),
        ("assistant_models[0]", [tiny_model(), tokenizer, [base_of(model)], [tokenizer]]),
        ("assistant_models[0]", [tiny_model(), tokenizer, [(model, "tales")], [tokenizer]]),
        ("assistant_models[0]", [None, None, [(model, None)], [tokenizer]]),
        ("assistant_models[0]", [bound]),
    ]:
        with pytest.raises(ValueError, match=re.escape(f"`{argument}` must have no PEFT adapters in its layers, but")):
            export_adafuse(tmp_path / "new", *given)
    tales = merged("same_layers", "tales")
    folder = export_adafuse(tmp_path / "merged", tiny_model(), tokenizer, [tales], [tokenizer])
    loaded = AutoModelForCausalLM.from_pretrained(folder / "assistant_1")
    ids = torch.tensor([[5, 6, 7]])
    assert torch.allclose(loaded(ids).logits, tales(ids).logits, atol=1e-5)


def test_a_model_with_code_of_its_own_is_refused(tmp_path):
    """As loaded with `trust_remote_code=True`: whoever loads the repository would have to have that code."""

    class Own(LlamaForCausalLM):
        pass

    own, tokenizer = Own(tiny_model().config), TOKENIZERS["byte_level"]()
    for argument, given in [
        ("model", [own, tokenizer]),
        ("assistant_models[1]", [tiny_model(), tokenizer, [tiny_model(), own], [tokenizer] * 2]),
        ("assistant_models[0]", [None, None, [own], [tokenizer]]),
    ]:
        with pytest.raises(ValueError, match=re.escape(f"`{argument}` must be of a class of transformers' own, but")):
            export_adafuse(tmp_path / "new", *given)


@pytest.mark.parametrize("was_there", [False, True])
def test_a_failed_export_leaves_the_folder_as_it_was(tmp_path, monkeypatch, was_there):
    def fail(*args):
        raise OSError("no space left")

    monkeypatch.setattr(export, "model_card", fail)
    folder = tmp_path / "new"
    if was_there:
        folder.mkdir()
    with pytest.raises(OSError, match="no space left"):
        export_adafuse(folder)
    assert folder.exists() is was_there and not (was_there and any(folder.iterdir()))


def test_a_folder_in_use_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert command(["export", str(tmp_path), "--method-only"]) == 2
    assert "`folder` must be new or empty" in capsys.readouterr().err
    assert command(["export", str(tmp_path / "new"), "--method-only", "--model", "A"]) == 2
    assert "`--model` must be left out with `--method-only`" in capsys.readouterr().err


@pytest.mark.parametrize(
    "settings",
    [
        {"margin_threshold": np.float64(0.5)},
        {"switch_margin": math.inf},
        {"method": "adafuse", "length_exponent": np.float64(0.5), "model_weights": np.array([1.0, 2.0])},
        {"method": np.str_("gac")},
    ],
)
def test_settings_of_any_number_are_exported(tmp_path, settings):
    """`exported.py` is Python that runs, and holds the values of the generation config."""
    tokenizer, assistant = TOKENIZERS["byte_level"](), tiny_model("gpt2", "byte_level", 1)
    folder = export_adafuse(tmp_path / "x", tiny_model(), tokenizer, [assistant], [tokenizer], settings)
    values = {}
    exec((folder / "custom_generate" / "exported.py").read_text("utf-8"), values)
    stored = json.loads((folder / "generation_config.json").read_text("utf-8"))["adafuse_config"]
    assert values["ADAFUSE_CONFIG"] == stored == AdaFuseConfig.from_dict(settings).to_dict()


def test_a_single_assistant_is_no_list(tmp_path):
    given, tokenizer = [tmp_path / "x", tiny_model(), TOKENIZERS["byte_level"]()], TOKENIZERS["byte_level"]()
    for assistant, shown in [("one/name", "'one/name'"), (tiny_model(), "LlamaForCausalLM")]:
        with pytest.raises(ValueError, match=f"`assistant_models` must be a list, but is {shown}"):
            export_adafuse(*given, assistant)
    with pytest.raises(ValueError, match="`assistant_tokenizers` must be a list, but is a tokenizer"):
        export_adafuse(*given, [tiny_model()], tokenizer)


def test_no_assistants_are_none_or_an_empty_list(tmp_path):
    tokenizer = TOKENIZERS["byte_level"]()
    bound = enable_adafuse(copy.copy(tiny_model()), [tiny_model("gpt2")], [tokenizer], tokenizer)
    for place, given, expected in [
        ("none", [tiny_model(), tokenizer, None], []),
        ("bound", [bound, tokenizer, None], ["./assistant_1"]),
        ("empty", [bound, tokenizer, []], []),
    ]:
        folder = export_adafuse(tmp_path / place, *given)
        assert json.loads((folder / "generation_config.json").read_text("utf-8"))["assistant_models"] == expected


def test_a_tokenizer_for_an_assistant_on_the_hub_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "AutoConfig", SimpleNamespace(from_pretrained=lambda name: None))
    tokenizer = TOKENIZERS["byte_level"]()
    given = [tmp_path / "x", tiny_model(), tokenizer, [tiny_model(), "org/model"]]
    with pytest.raises(ValueError, match=r"`assistant_tokenizers\[1\]` must be None for an assistant that stays"):
        export_adafuse(*given, [tokenizer, "org/fixed-tokenizer"])
    assert export_adafuse(*given, [tokenizer, None]).exists()


def test_what_is_bound_is_exported(tmp_path):
    assistant, chars = tiny_model("gpt2", "characters"), TOKENIZERS["characters"]()
    main, tokenizer = copy.copy(tiny_model()), TOKENIZERS["byte_level"]()
    bound = enable_adafuse(main, [assistant], [chars], tokenizer, {"preset": "robust", "num_branches": 1})
    ensemble = AdaFuseEnsemble([(tiny_model(), tokenizer), (assistant, chars)], {"preset": "robust", "num_branches": 1})
    for place, model in [("bound", bound), ("ensemble", ensemble.model)]:
        folder = export_adafuse(tmp_path / place, model)
        stored = json.loads((folder / "generation_config.json").read_text("utf-8"))
        assert stored["assistant_models"] == ["./assistant_1"] and stored["adafuse_config"]["num_branches"] == 1
        assert (folder / "assistant_1" / "model.safetensors").exists() and (folder / "tokenizer.json").exists()
    other = export_adafuse(tmp_path / "other", bound, tokenizer, [tiny_model("llama", "byte_level", 1)], [tokenizer])
    assert (AutoModelForCausalLM.from_pretrained(other / "assistant_1").config.model_type) == "llama"
