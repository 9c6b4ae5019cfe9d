"""Exported repositories: in a fresh process and without the package, they give what the package gives."""

from __future__ import annotations

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
from support.tiny import TOKENIZERS, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_adafuse
from hf_adafuse import AdaFuseConfig, enable_adafuse, export_adafuse
from hf_adafuse.cli import main as command
from hf_adafuse.hub.generate import generate

HERE = Path(__file__).parent
PACKAGE = os.fspath(Path(hf_adafuse.__file__).parents[1])
CHILD_WITH_PACKAGE = os.fspath(HERE / "package_child.py")
NO_PACKAGE = "import sys; sys.modules['hf_adafuse'] = None"  # from there on, importing it fails
MEMBERS = {
    "main": ("gpt_neox", "byte_level", 1),  # its weights are renamed on loading and saving
    "assistant": ("gpt2", "characters", 3),
    "other main": ("qwen3", "sentencepiece", 2),
}
CONFIG = AdaFuseConfig(max_word_tokens=6, num_branches=2)
FLAGS = ["--preset", "paper", "--max-word-tokens", "6", "--branches", "2"]
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
    assert not list(Path("full").glob("*.py"))  # the code is there once
    custom = [f"custom_generate/{path.name}" for path in Path("full/custom_generate").iterdir()]
    assert {"custom_generate/modeling_adafuse.py", "custom_generate/requirements.txt"} <= set(custom)
    member = {path.name for path in Path("assistant").iterdir()}
    saved = [*member, "custom_generate", *custom, "assistant_1", *(f"assistant_1/{name}" for name in member)]
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
        "pipeline, its own defaults": texts,
        "custom_generate": other,
        "method": other,
        "hub, custom_generate": other,
        "unchanged": True,
        "hub, folders": ensemble,
        "hub, names": ensemble,
        "cards": cards,
    }


@pytest.mark.slow
def test_the_package_runs_a_repository_as_its_code_does(root, members):
    """Loaded with that code and without."""
    folder = export_adafuse(root / "packaged", root / "main", None, [root / "assistant"], None, CONFIG)
    assert folder.name == "packaged"
    code = f"import sys; sys.path.insert(0, {PACKAGE!r}); import runpy; runpy.run_path({CHILD_WITH_PACKAGE!r})"
    started = [sys.executable, "-W", "error", "-c", code]
    child = subprocess.run(started, cwd=root, env=environment(root), capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    results = json.loads(child.stdout)
    ensemble = members.text()
    alone = members.models["main"].generate(**members.inputs("main", PROMPTS[:1]), **SHORT)
    assert ensemble != members.tokenizers["main"].decode(alone[0], skip_special_tokens=True)
    own = [results.pop("with B"), results.pop("with B, trusted"), results.pop("with B, by hand")]
    assert own[0] == own[1] == own[2] != ensemble
    assert results.pop("package") == PACKAGE
    assert results == dict.fromkeys(results, ensemble) and len(results) == 8


def test_a_tokenizer_of_the_call_is_taken_before_that_of_a_folder(root, members, tmp_path):
    """It takes the place of one that does not load."""
    members.models["assistant"].save_pretrained(tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").write_text("broken")
    model = AutoModelForCausalLM.from_pretrained(root / "main")
    call = {**members.inputs("main"), **SHORT, "model": model, "adafuse_config": CONFIG}
    given = {"assistant_models": [tmp_path / "bare"], "assistant_tokenizers": [TOKENIZERS["characters"]()]}
    assert generate(**call, **given).tolist() == members.generate().tolist()
    with pytest.raises(ValueError, match=r"`assistant_tokenizers` must be one per assistant model, but is 2 for 1"):
        generate(**call, **{**given, "assistant_tokenizers": [None, None]})


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


@pytest.mark.slow
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
    copied = copy.deepcopy(model.generation_config)  # asks for nothing, also where the package has bound others
    copied.max_new_tokens = SHORT["max_new_tokens"]
    given = {**members.inputs("main"), "generation_config": copied}
    assert generate(**given, model=bound).tolist() == bound.generate(**call).tolist()
    model.generation_config.assistant_models = ["./missing"]
    with pytest.raises(ValueError, match=re.escape("`assistant_models[0]` must be a model, its Hub name or a folder")):
        generate(**call, model=model)
