"""Exported repositories: in a fresh process and without the package, they give what the package gives."""

from __future__ import annotations

import ast
import copy
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from project import setup_cfg
from tiny import TOKENIZERS, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.dynamic_module_utils import get_imports

from hf_adafuse import AdaFuseConfig, enable_adafuse, export_adafuse
from hf_adafuse.cli import main as command
from hf_adafuse.hub import modeling_adafuse
from hf_adafuse.hub.exported import REQUIREMENTS
from hf_adafuse.hub.generate import generate
from hf_adafuse.hub.repository import Repository

HERE = Path(__file__).parent
NO_PACKAGE = "import sys; sys.modules['hf_adafuse'] = None"  # from there on, importing it fails
MEMBERS = {
    "main": ("gpt_neox", "byte_level", 1),  # its weights are renamed on loading and saving
    "assistant": ("gpt2", "characters", 3),
    "other main": ("qwen3", "sentencepiece", 2),
}
CONFIG = AdaFuseConfig(max_word_tokens=6, num_branches=2)
FLAGS = ["--max-word-tokens", "6", "--branches", "2"]
SHORT = {"max_new_tokens": 12, "do_sample": False}
PROMPTS = ["Once upon a time", "She"]
MESSAGES = [{"role": "user", "content": "Once upon a time"}]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def save_members(root: Path) -> None:
    for name, (architecture, tokenizer_name, seed) in MEMBERS.items():
        tiny_model(architecture, tokenizer_name, seed).save_pretrained(root / name)
        tokenizer = copy.deepcopy(TOKENIZERS[tokenizer_name]())
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
        tokenizer.save_pretrained(root / name)


def put_in_hub_cache(root: Path, folder: str, name: str) -> None:
    """As if it had been downloaded: what `from_pretrained(name)` then finds without a network."""
    place = root / "huggingface" / "hub" / f"models--{name.replace('/', '--')}"
    shutil.copytree(root / folder, place / "snapshots" / COMMIT)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)


def environment(root: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_", "COV"))}
    return {**kept, "HF_HOME": str(root / "huggingface"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


class Members:
    """The same ensembles by the package, in this process."""

    def __init__(self, root: Path) -> None:
        self.models = {name: AutoModelForCausalLM.from_pretrained(root / name) for name in MEMBERS}
        self.tokenizers = {name: AutoTokenizer.from_pretrained(root / name) for name in MEMBERS}

    def inputs(self, name, prompts=PROMPTS):
        return self.tokenizers[name](prompts, padding=True, return_tensors="pt", return_token_type_ids=False)

    def generate(self, main="main", prompts=PROMPTS, config=CONFIG, **kwargs):
        options = {**SHORT, "adafuse_config": config, "tokenizer": self.tokenizers[main], **kwargs}
        assistants = [self.models["assistant"]], [self.tokenizers["assistant"]]
        model = enable_adafuse(copy.copy(self.models[main]))
        inputs = self.inputs(main, prompts)
        return model.generate(**inputs, assistant_models=assistants[0], assistant_tokenizers=assistants[1], **options)

    def text(self, main="main", prompt=PROMPTS[0], config=CONFIG, **kwargs):
        output = self.generate(main, [prompt], config, **kwargs)
        return self.tokenizers[main].decode(output[0], skip_special_tokens=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    save_members(root)
    return root


@pytest.fixture(scope="module")
def members(root):
    return Members(root)


@pytest.mark.slow
def test_repositories_work_without_the_package(root, members, capsys, monkeypatch):
    monkeypatch.chdir(root)
    assert command(["export", "full", "--model", "main", "--assistant", "assistant", *FLAGS]) == 0
    assert command(["export", "method", "--method-only", *FLAGS]) == 0
    put_in_hub_cache(root, "full", "tiny/full")
    put_in_hub_cache(root, "assistant", "tiny/assistant")
    # Only the child finds this name in its cache; here the check that it exists is left out.
    monkeypatch.setattr("hf_adafuse.hub.export.AutoConfig", SimpleNamespace(from_pretrained=lambda name: None))
    export_adafuse("names", "main", assistant_models=["tiny/assistant"], adafuse_config=CONFIG, assistants="names")
    assert not any(Path("names").glob("assistant*"))
    code = f"{NO_PACKAGE}; import runpy; runpy.run_path({os.fspath(HERE / 'hub_child.py')!r})"
    started = [sys.executable, "-W", "error", "-c", code]
    child = subprocess.run(started, cwd=root, env=environment(root), capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    results = json.loads(child.stdout)

    whole = members.generate(return_dict_in_generate=True)
    ensemble, plain = whole.sequences.tolist(), members.models["main"].generate(**members.inputs("main"), **SHORT)
    other = members.generate("other main").tolist()
    assert ensemble != plain.tolist()  # else nothing below says anything
    texts = members.tokenizers["main"].batch_decode(ensemble, skip_special_tokens=True)
    cards = [members.text(max_new_tokens=32)] * 2 + [members.text("other main", max_new_tokens=32)] * 2
    flat = {path.name for path in Path("full").glob("*.py")}
    custom = [f"custom_generate/{name}" for name in {*flat, "requirements.txt"} - {"modeling_adafuse.py"}]
    member = {path.name for path in Path("assistant").iterdir()}
    saved = [*flat, *member, "custom_generate", *custom, "assistant_1", *(f"assistant_1/{name}" for name in member)]
    assert results == {
        "import": "import of hf_adafuse halted; None in sys.modules",
        "modules": [],
        "class": ["GPTNeoXForCausalLM", "transformers_modules"],
        "auto": ensemble,
        "auto: rounds": [[committed.text for committed in row] for row in whole.rounds],
        "off": plain.tolist(),
        "settings of the call": members.generate(config=AdaFuseConfig(max_words=1, max_word_tokens=6)).tolist(),
        "deepcopy": ensemble,
        "pickle": ensemble,
        "loaded once": [1, True],
        "dtype": ["torch.bfloat16"],
        "saved again": ensemble,
        "saved again: files": sorted(saved),
        "plain": plain.tolist(),
        "plain: class": "transformers.models.gpt_neox.modeling_gpt_neox",
        "custom_generate, own main": ensemble,
        "pipeline": texts,
        "custom_generate": other,
        "method": other,
        "hub, custom_generate": other,
        "unchanged": True,
        "hub, folders": ensemble,
        "hub, names": ensemble,
        "cards": cards,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while True:
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        try:
            with urllib.request.urlopen(address):
                return
        except urllib.error.URLError:
            time.sleep(0.2)


@pytest.mark.slow
def test_transformers_serve_answers_an_openai_client(root, members, tmp_path):
    from openai import OpenAI

    folder = str(export_adafuse(tmp_path / "served", root / "main", None, [root / "assistant"], None, CONFIG))
    port, log = free_port(), tmp_path / "log"
    options = ["--trust-remote-code", "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    code = f"{NO_PACKAGE}; from transformers.cli.transformers import main; main()"
    started = [sys.executable, "-c", code, "serve", folder, *options]
    with log.open("w") as output:
        server = subprocess.Popen(started, cwd=tmp_path, env=environment(root), stdout=output, stderr=output)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, log)
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            length = {"max_tokens": 11}  # not within a character, which the server's streamer would keep to itself
            request = {"model": folder, "messages": MESSAGES, **length}
            answer = client.chat.completions.create(**request)
            chunks = [
                chunk.choices[0].delta.content for chunk in client.chat.completions.create(**request, stream=True)
            ]
            off = json.dumps({"adafuse_config": False, "do_sample": False})
            plain = client.chat.completions.create(**request, extra_body={"generation_config": off})
    finally:
        server.terminate()
        server.wait(20)
    tokenizer = members.tokenizers["main"]
    prompt = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    short = {"max_new_tokens": 11, "do_sample": False}
    expected = members.text(prompt=prompt, **short).removeprefix(prompt)
    assert answer.choices[0].message.content == expected, log.read_text()
    assert "".join(chunk or "" for chunk in chunks) == expected
    assert sum(bool(chunk) for chunk in chunks) > 2
    alone = members.models["main"].generate(**members.inputs("main", [prompt]), **short)
    assert plain.choices[0].message.content == tokenizer.decode(alone[0], skip_special_tokens=True).removeprefix(prompt)
    assert plain.choices[0].message.content != expected


def test_code_in_a_repository_needs_transformers_and_torch_only(tmp_path):
    folder = export_adafuse(tmp_path / "method", adafuse_config={"word_boundary": "unicode"})
    requirements = (folder / "custom_generate" / "requirements.txt").read_text().splitlines()
    known = [line for line in setup_cfg()["options"]["install_requires"].splitlines() if line]
    assert set(REQUIREMENTS) <= set(known)
    assert requirements == [*REQUIREMENTS, setup_cfg()["options.extras_require"]["unicode"].strip()]
    files = {path.stem: path for path in (folder / "custom_generate").glob("*.py")}
    assert {"generate", "decoder", "words"} <= set(files) and not {"export", "__init__"} & set(files)
    for path in files.values():
        assert {name for name in get_imports(path) if name not in sys.stdlib_module_names} <= {"torch", "transformers"}
        nodes = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
        assert {node.module for node in nodes if node.level} <= set(files), path.name


def test_generation_config_keeps_what_it_held(tmp_path, root):
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


def test_settings_come_from_the_nearest_place(root, members):
    model = AutoModelForCausalLM.from_pretrained(root / "main")
    call = {**members.inputs("main"), **SHORT}
    by_name = generate(**call, model=model, assistant_models=[root / "assistant"], adafuse_config=CONFIG)
    assert by_name.tolist() == members.generate().tolist()
    model.generation_config.assistant_models = [str(root / "assistant")]
    model.generation_config.adafuse_config = CONFIG.to_dict()
    assert generate(**call, model=model).tolist() == members.generate().tolist()
    assert generate(**call, model=model, adafuse_config={"num_branches": 1, "max_word_tokens": 6}).tolist() == (
        members.generate(config=AdaFuseConfig(num_branches=1, max_word_tokens=6)).tolist()
    )
    twin = members.models["main"], members.tokenizers["main"]
    bound = enable_adafuse(copy.copy(model), [twin[0]], [twin[1]], twin[1], CONFIG)
    assert generate(**call, model=bound).tolist() == bound.generate(**call).tolist() != members.generate().tolist()
    model.generation_config.assistant_models = ["./missing"]
    with pytest.raises(ValueError, match=re.escape("`assistant_models[0]` must be a model, its Hub name or a folder")):
        generate(**call, model=model)


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


def with_adapter():
    model = copy.copy(tiny_model())
    model._hf_peft_config_loaded = True
    return model


@pytest.mark.parametrize(
    ("name", "place"),
    [("./a", ("org/name", {"subfolder": "a", "revision": "x"})), ("org/a", ("org/a", {})), ("/a/b", ("/a/b", {}))],
)
def test_names_are_looked_up_in_the_repository(name, place):
    assert Repository("org/name", {"revision": "x"}).locate(name) == place


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(assistants="all"), r"`assistants` must be one of \['names', 'folders'\], but is 'all'"),
        (dict(adafuse_config=False), "`adafuse_config` must be settings, but is False"),
        (dict(assistant_models=[tiny_model()], assistants="names"), "must be Hub names .* but has 'LlamaForCausalLM'"),
        (dict(assistant_models=["tiny/none"]), "'tiny/none' must be a local folder or a Hub name that loads"),
        (dict(model="tiny/none"), "'tiny/none' must be a local folder or a Hub name that loads"),
        (dict(model=torch.nn.Linear(1, 1)), "`model` must be of a class of transformers' own"),
        (dict(model=tiny_model(), adafuse_config={"model_weights": [1, 2]}), "but is 2 for 1 members"),
        (dict(model=with_adapter(), tokenizer=TOKENIZERS["byte_level"]()), "the main model has a PEFT adapter"),
        (dict(model=tiny_model()), "`tokenizer` must be a tokenizer, but is None"),
        (dict(assistant_tokenizers=[None]), "must be one per assistant model, but is 1 for 0"),
    ],
)
def test_refusals_leave_no_folder(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        export_adafuse(tmp_path / "new", **arguments)
    assert not (tmp_path / "new").exists()


def test_a_folder_in_use_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert command(["export", str(tmp_path), "--method-only"]) == 2
    assert "`folder` must be new or empty" in capsys.readouterr().err
    assert command(["export", str(tmp_path / "new"), "--method-only", "--model", "A"]) == 2
    assert "`--model` must be left out with `--method-only`" in capsys.readouterr().err
