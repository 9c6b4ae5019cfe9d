"""The command `hf-adafuse serve`: what it refuses, and that it ends soon after Ctrl-C."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from support.chats import members

from hf_adafuse import AdaFuseConfig
from hf_adafuse.cli import main


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--api-key-env", "HF_ADAFUSE_NO_SUCH_KEY"], "environment variable"),
        (["--max-batch-size", "0"], "--max-batch-size"),
        (["--branches", "0"], "num_branches"),
        (["--assistant", "A"], "--model"),
        (["--port", "65536"], "--port"),
        (["--port", "-1"], "--port"),
        (["--port", "http"], "--port"),
    ],
    ids=str,
)
def test_refused(flags, match, capsys):
    assert main(["serve", *flags]) == 2
    assert match in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "192.0.2.1", "no host", "a" * 100], ids=str)
def test_an_address_that_cannot_be_listened_on_is_refused_before_models_are_loaded(host, monkeypatch, capsys):
    monkeypatch.setattr("hf_adafuse.cli.members.load_members", lambda *args, **options: pytest.fail("was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        family = socket.getaddrinfo("localhost", number, type=socket.SOCK_STREAM)[0][0]
        if host == "localhost" and family != socket.AF_INET:
            pytest.skip("localhost is another address here")
        assert main(["serve", "--host", host, "--port", str(number)]) == 2
    assert f"`--host` and `--port` must name an address where nobody listens yet, but are '{host}'" in (
        capsys.readouterr().err
    )


FILE = """
ensembles:
  first:
    members: [A, B]
  second:
    members: [A]
    settings: {preset: robust, num_branches: 2}
  third:
    members: [B, A]
    settings: {method: unite, top_k: 4}
"""


def test_several_ensembles_of_a_file(tmp_path, monkeypatch):
    """Each member is loaded once, and served once alone."""
    (tmp_path / "file.yaml").write_text(FILE)
    asked, made = [], []

    def load(model, assistants, **options):
        asked.append([model, *assistants])
        return members()

    monkeypatch.setattr("hf_adafuse.cli.members.load_members", load)
    monkeypatch.setattr("hf_adafuse.serve.server.Server.run", lambda self: made.append(self._service))
    assert main(["serve", "--port", "0", "--ensembles", str(tmp_path / "file.yaml")]) == 0
    assert asked == [["A", "B"]]
    served = made[0].served
    assert [(name, len(one.members)) for name, one in served.items() if one.alone] == [
        ("first", 2), ("second", 1), ("third", 2),
    ]  # fmt: skip
    assert len(served) == 5 and served["third"].alone == served["first"].alone[::-1]
    assert served["second"].config == AdaFuseConfig.robust().changed({"num_branches": 2})
    assert served["third"].config.method == "unite"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("ensembles: [", "YAML"),
        ("a: 1", "`ensembles:`"),
        ("ensembles: {a: {members: A}}", "list of names"),
        ("ensembles: {a: {members: [A], more: 1}}", "list of names"),
        ("ensembles: {a: {members: [A], settings: {num_branches: 0}}}", "num_branches"),
        ("ensembles: {a: {members: [A], settings: {method: none}}}", "method"),
    ],
)
def test_files_that_name_no_ensembles(tmp_path, capsys, text, match):
    (tmp_path / "file.yaml").write_text(text)
    assert main(["serve", "--ensembles", str(tmp_path / "file.yaml")]) == 2
    assert match in capsys.readouterr().err


def test_a_file_stands_alone(tmp_path, capsys):
    (tmp_path / "file.yaml").write_text(FILE)
    for flags in (["--model", "A"], ["--branches", "2"]):
        assert main(["serve", "--ensembles", str(tmp_path / "file.yaml"), *flags]) == 2
        assert "must be left out" in capsys.readouterr().err
    assert main(["serve", "--ensembles", str(tmp_path / "none.yaml")]) == 2
    assert "can be read" in capsys.readouterr().err


def test_settings_of_a_file(tmp_path, monkeypatch, capsys):
    made = []
    monkeypatch.setattr("hf_adafuse.cli.members.load_members", lambda *args, **options: members())
    monkeypatch.setattr("hf_adafuse.serve.server.Server.run", lambda self: made.append(self._service))
    file, flags = tmp_path / "adafuse.json", ["serve", "--port", "0", "--model", "A", "--assistant", "B", "--adafuse"]
    file.write_text('{"num_branches": 2, "max_words": 2}')
    assert main([*flags, str(file), "--branches", "4"]) == 0
    assert made[0].served["ensemble"].config == AdaFuseConfig(num_branches=4, max_words=2)
    file.write_text('{"preset": "robust", "switch_margin": 0.5}')
    assert main([*flags, str(file)]) == 0
    assert made[1].served["ensemble"].config == AdaFuseConfig.robust().changed({"switch_margin": 0.5})
    for text, match in [
        ("{", "JSON"),
        ("[]", "JSON object"),
        ('{"num_branches": 0}', "num_branches"),
        ("\xff", "JSON"),
    ]:
        file.write_text(text)
        assert main([*flags, str(file)]) == 2
        assert match in capsys.readouterr().err
    assert main([*flags, str(tmp_path / "none"), "--preset", "paper"]) == 2
    assert "--preset" in capsys.readouterr().err


def test_without_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve"]) == 2
    assert 'pip install "hf_adafuse[serve]"' in capsys.readouterr().err


@pytest.mark.slow
def test_control_c_ends_it_in_the_middle_of_an_answer():
    """On the demo's members. Answers that have not ended get an error, and the stream its end."""
    command = [sys.executable, "-m", "hf_adafuse", "serve", "--port", "0", "--max-new-tokens", "400"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            url = next(found[0] for line in process.stdout if (found := re.search(r"http://[\d.:]+", line)))
            prompts = [f"Question: what is the capital of country {number}?" for number in range(48)]
            body = {"model": "ensemble", "prompt": prompts, "stream": True, "max_tokens": 400}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
                lines = stream.iter_lines()
                next(lines)
                process.send_signal(signal.SIGINT)
                *_, error, end = (line for line in lines if line)
            assert end == "data: [DONE]" and "shutting_down" in error
            assert process.wait() == -signal.SIGINT
            assert process.stdout.read() == ""
        finally:
            process.kill()
