"""The command `hf-adafuse serve`: what it refuses, and that it ends soon after Ctrl-C."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time

import httpx
import pytest

from hf_adafuse.cli import main


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--api-key-env", "HF_ADAFUSE_NO_SUCH_KEY"], "environment variable"),
        (["--max-batch-size", "0"], "--max-batch-size"),
        (["--branches", "0"], "num_branches"),
        (["--assistant", "A"], "--model"),
    ],
    ids=str,
)
def test_refused(flags, match, capsys):
    assert main(["serve", *flags]) == 2
    assert match in capsys.readouterr().err


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
                began = time.monotonic()
                assert "data: [DONE]" in list(lines)
            assert time.monotonic() - began < 10  # of this the most is not the server's
            assert process.wait(30) == 130
        finally:
            process.kill()
