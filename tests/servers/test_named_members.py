"""Members by the names of their servers: what is said of them beside the name, and what takes no such name."""

from __future__ import annotations

import copy
import json

import pytest
from support.cases import PROMPTS
from support.stand_in import StandIn, serving
from support.tiny import TOKENIZERS, tiny_model

from hf_adafuse import AdaFuseEnsemble, AdaFusePredictor, ServedModel, enable_adafuse
from hf_adafuse.cli import main as command
from hf_adafuse.servers.queries import ServerError

URL = "vllm:http://gpu-node:8000#m"


@pytest.fixture(scope="module")
def member():
    return tiny_model("llama", "sentencepiece", 1), TOKENIZERS["sentencepiece"]()


@pytest.fixture
def made(monkeypatch):
    """With what models behind servers are made."""
    found = []

    def from_name(name, **options):
        found.append((name, options))
        raise ServerError("enough")

    monkeypatch.setattr(ServedModel, "from_name", from_name)
    return found


@pytest.mark.parametrize("kind", [AdaFuseEnsemble, AdaFusePredictor])
def test_options_reach_the_member_that_knows_them(member, made, tmp_path, kind):
    for one in member:
        one.save_pretrained(tmp_path)
    options = {"allow_http": True, "api_key_env": "TINY_KEY", "deadline": 5.0, "trust_remote_code": False}
    with pytest.raises(ValueError, match=r"`members\[1\]` must be .*enough"):
        kind([str(tmp_path), URL], attn_implementation="eager", **options)
    assert made == [(URL, options)]


def test_an_option_that_no_member_takes_is_named(member, tmp_path):
    for one in member:
        one.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`members\[0\]` must be .*'foo'.*Check the name, and the options"):
        AdaFuseEnsemble([str(tmp_path)], foo=3)


@pytest.mark.parametrize("members", [["A", "B"], [("A", "B")]])
def test_options_for_servers_without_one_are_refused(members):
    with pytest.raises(ValueError, match="`allow_http` must be left out where no member is the name of a server"):
        AdaFuseEnsemble(members, allow_http=True)


@pytest.fixture
def code_of_its_own(member, tmp_path):
    """A folder with a tokenizer whose class is code of the folder."""
    member[1].save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings |= {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}, "tokenizer_class": "OwnTokenizer"}
    path.write_text(json.dumps(settings))
    (tmp_path / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\nclass OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    return str(tmp_path)


def test_a_tokenizer_with_code_of_its_own(member, code_of_its_own, capsys):
    eos = member[1].eos_token_id
    with serving(StandIn(*member)) as url:
        name = f"vllm:{url}"
        loaded = {
            "ServedModel": ServedModel(
                url, tokenizer=code_of_its_own, eos_token_id=eos, trust_remote_code=True
            ).tokenizer,
            "options": AdaFuseEnsemble(
                [member, name], tokenizer=code_of_its_own, eos_token_id=eos, trust_remote_code=True
            ).tokenizers[1],
            "pair": AdaFuseEnsemble(
                [member, (name, code_of_its_own)], eos_token_id=eos, trust_remote_code=True
            ).tokenizers[1],
        }
        assert {way: type(one).__name__ for way, one in loaded.items()} == dict.fromkeys(loaded, "OwnTokenizer")
        flags = ["generate", "a", "--model", name, "--served-tokenizer", code_of_its_own, "--max-new-tokens", "2"]
        flags += ["--served-option", f"eos_token_id={eos}"]
        assert command([*flags, "--trust-remote-code"]) == 0
        capsys.readouterr()
        assert command(flags) == 2
        assert "contains custom code" in capsys.readouterr().err
        with pytest.raises(
            ValueError, match=r"(?s)does not load \(ValueError: .*contains custom code.*\)\. Check the name"
        ):
            ServedModel(url, tokenizer=code_of_its_own)


def test_the_server_does_not_choose_whose_code_runs(member, code_of_its_own):
    with (
        serving(StandIn(*member, name=code_of_its_own)) as url,
        pytest.raises(ValueError, match=r"(?s)none loads from the server's name of the model.*contains custom code"),
    ):
        ServedModel(url, trust_remote_code=True)


def test_a_local_tokenizer_with_code_of_its_own(member, code_of_its_own):
    member[0].save_pretrained(code_of_its_own)
    for given in (code_of_its_own, (member[0], code_of_its_own), (code_of_its_own, code_of_its_own)):
        ensemble = AdaFuseEnsemble([code_of_its_own, given], trust_remote_code=True)
        assert [type(one).__name__ for one in ensemble.tokenizers] == ["OwnTokenizer"] * 2


def test_a_pair_of_a_server_and_a_tokenizer(member):
    """Nothing that the server says of where it has its model from need load here."""
    with serving(StandIn(*member, name="/srv/model")) as url:
        ensemble = AdaFuseEnsemble([member, (f"vllm:{url}", member[1])], num_steps=2, eos_token_id=2)
        assert ensemble.tokenizers[1] is member[1]
        assert ensemble.texts(PROMPTS[0], max_new_tokens=3)


def test_generate_takes_a_server_by_name_with_its_tokenizer(member):
    main = enable_adafuse(copy.copy(tiny_model("llama", "sentencepiece", 0)))
    call = dict(tokenizer=member[1], assistant_tokenizers=[member[1]], adafuse_config=True, max_new_tokens=5)
    ids = member[1](PROMPTS[0], return_tensors="pt").input_ids
    expected = main.generate(ids, assistant_models=[member[0]], **call).tolist()
    with serving(StandIn(*member, name="/srv/model")) as url, pytest.warns(UserWarning, match="No generation config"):
        assert main.generate(ids, assistant_models=[f"vllm:{url}"], **call).tolist() == expected
    with pytest.raises(ValueError, match=r"`assistant_models\[0\]` must be a server .*allow_http.*`ServedModel\("):
        main.generate(ids, assistant_models=[URL], **call)
    for wrong in (5, ["x"], "no/such-tokenizer"):
        with pytest.raises(ValueError, match=r"`assistant_tokenizers\[0\]` must be a tokenizer"):
            main.generate(ids, assistant_models=[URL], **call | {"assistant_tokenizers": [wrong]})


@pytest.mark.parametrize("flags", [["--model", URL], ["--model", "A", "--assistant", URL]])
@pytest.mark.parametrize("arguments", [["bench"], ["export", "{}"]])
def test_commands_that_need_weights_refuse_servers(made, flags, arguments, tmp_path, capsys):
    assert command([one.format(tmp_path / "new") for one in arguments] + flags) == 2
    err = capsys.readouterr().err
    assert f"`{flags[-2]}` must be a model with its weights here for `{arguments[0]}`, but '{URL}'" in err
    assert err.count("\n") == 1 and not made
