"""Flags that several commands share, read by the real parser: they mean the same in each."""

from __future__ import annotations

import math
import types

import pytest

from hf_adafuse import AdaFuseConfig
from hf_adafuse.cli import _parser
from hf_adafuse.cli.arguments import adafuse_config, as_flags
from hf_adafuse.config import PRESETS
from hf_adafuse.evaluation.candidates import RULES

REQUIRED = {
    "generate": ["Who?"],
    "run": ["in.jsonl", "--output", "out"],
    "tune": ["--data", "in.jsonl", "--output", "out"],
    "eval": ["--tasks", "nq"],
}
# What a generation config may say, and a printed command must not take over.
STORED = types.SimpleNamespace(
    generation_config=types.SimpleNamespace(adafuse_config={"max_words": 7, "fusion": "horizon", "switch_margin": 9.0})
)


def read(command, *flags):
    return _parser().parse_args([command, *REQUIRED[command], *flags])


@pytest.mark.parametrize("command", ["generate", "run", "tune"])
@pytest.mark.parametrize(
    ("typed", "read_as"),
    [(r"\n", "\n"), (r"a\tb", "a\tb"), (r"\\n", r"\n"), (r"\d\\", "\\d\\"), ("\n", "\n"), ("x\\", "x\\"), ("é", "é")],
)
def test_escapes_in_texts_to_stop_after(command, typed, read_as):
    """A shell passes `"\\n"` on as a backslash and an n."""
    assert read(command, "--stop", typed, "--stop", "x").stop == [read_as, "x"]


@pytest.mark.parametrize("command", ["generate", "run", "tune"])
def test_escapes_are_documented_and_an_empty_text_is_refused(command, capsys):
    with pytest.raises(ValueError, match="argument --stop: must be a text, but is empty"):
        read(command, "--stop", "")
    with pytest.raises(SystemExit):
        read(command, "--help")
    assert r"where \n is a newline, \t a tab and \\ a backslash" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "settings",
    [
        *RULES.values(),
        *PRESETS.values(),
        {"model_weights": (1 / 3, 2.0, 1e-9), "margin_threshold": 0.1 + 0.2, "online_rate": 1e-7},
        {"switch_margin": math.inf, "certainty_gate": 1.0, "max_word_tokens": 12345678},
        {"commitment": "fixed", "exploration": "beam", "nll_normalization": "byte", "do_sample": True},
    ],
    ids=str,
)
def test_settings_as_flags_give_the_settings_back(settings):
    for command in ("generate", "run", "eval"):
        args = read(command, *as_flags(settings))
        assert adafuse_config(args, STORED) == AdaFuseConfig(**settings)
