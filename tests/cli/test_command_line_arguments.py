"""Flags that several commands share, read by the real parser: they mean the same in each."""

from __future__ import annotations

import ast
import json
import math
import types
from collections import Counter
from pathlib import Path

import pytest

import hf_adafuse
from hf_adafuse import AdaFuseConfig
from hf_adafuse.cli import _parser, main
from hf_adafuse.cli.config_flags import adafuse_config, given_settings, take_members
from hf_adafuse.cli.member_flags import member_names
from hf_adafuse.config import PRESETS
from hf_adafuse.lab.evaluation.candidates import RULES

pytestmark = pytest.mark.fast

REQUIRED = {
    "generate": ["Who?"],
    "run": ["in.jsonl", "--output", "out"],
    "fit": ["--data", "in.jsonl"],
    "eval": ["--tasks", "nq"],
}
# What a generation config may say, and a printed command must not take over.
STORED = types.SimpleNamespace(
    generation_config=types.SimpleNamespace(adafuse_config={"max_words": 7, "horizon": True, "switch_margin": 9.0})
)


# Where a setting's flag has another name than its field.
RENAMED = {
    "margin_threshold": "threshold", "num_branches": "branches", "model_weights": "weights",
    "certainty_gate": "gate", "do_sample": "sample",
}  # fmt: skip


def as_flags(settings):
    """The fields of a config as somebody would type them, over the paper's preset."""
    flags = ["--preset", "paper"]
    for name, value in settings.items():
        if name == "method_options":
            flags += [part for one, given in value.items() for part in ("--option", f"{one}={json.dumps(given)}")]
            continue
        flags.append(f"--{RENAMED.get(name, name).replace('_', '-')}")
        if value is not True:  # a switch stands alone
            flags.append(",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))
    return flags


def read(command, *flags):
    return _parser([command]).parse_args([command, *REQUIRED[command], *flags])


@pytest.mark.parametrize("command", ["generate", "run", "fit"])
@pytest.mark.parametrize(
    ("typed", "read_as"),
    [(r"\n", "\n"), (r"a\tb", "a\tb"), (r"\\n", r"\n"), (r"\d\\", "\\d\\"), ("\n", "\n"), ("x\\", "x\\"), ("é", "é")],
)
def test_escapes_in_texts_to_stop_after(command, typed, read_as):
    """A shell passes `"\\n"` on as a backslash and an n."""
    assert read(command, "--stop", typed, "--stop", "x").stop == [read_as, "x"]


@pytest.mark.parametrize("command", ["generate", "run", "fit"])
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
        {"commitment": "fixed", "nll_normalization": "byte", "do_sample": True},
        {"exploration": "beam", "method_options": {"length_exponent": 0.5}},
        {"method": "unite", "method_options": {"top_k": 3}},
        {},
    ],
    ids=str,
)
def test_settings_as_flags_give_the_settings_back(settings):
    for command in ("generate", "run", "eval"):
        args = read(command, *as_flags(settings))
        assert adafuse_config(args, STORED) == AdaFuseConfig(**settings)


def test_a_file_of_settings_is_read_once(tmp_path, monkeypatch):
    """For its members, its settings, and the record of what a job was asked with."""
    path, opened = tmp_path / "adafuse.json", []
    path.write_text(json.dumps({"adafuse_config": {"preset": "paper", "max_words": 2}, "members": ["A", "B"]}))
    from_file = AdaFuseConfig.from_file
    monkeypatch.setattr(AdaFuseConfig, "from_file", lambda given: opened.append(given) or from_file(given))
    args = read("run", "--adafuse", str(path))
    take_members(args)
    assert (args.model, args.assistant) == ("A", ["B"])
    assert adafuse_config(args, STORED) == adafuse_config(args) == AdaFuseConfig(max_words=2)
    assert given_settings(args)["adafuse"] == AdaFuseConfig(max_words=2).to_dict()
    assert opened == [str(path)]


@pytest.mark.parametrize("command", ["run", "fit", "eval"])
def test_flags_of_every_job(command):
    args = read(command)
    assert (args.batch_size, args.overwrite, args.progress) == (8, False, None)
    args = read(command, "--batch-size", "3", "--overwrite", "--no-progress")
    assert (args.batch_size, args.overwrite, args.progress) == (3, True, False)
    assert read(command, "--progress").progress is True


def test_names_of_members(tmp_path, monkeypatch):
    names = ["org/a", "b/a", "vllm:http://host:8000#m", "folder/"]
    assert member_names(names) == ["a (1)", "a (2)", "host:8000#m", "folder"]
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert member_names([".", "../other", "/"]) == ["mine", "other", "/"]


def test_no_two_jobs_declare_the_same_flag():
    """What several have in common is declared in one place, so that it stays the same."""
    declared = Counter()
    for name in ("cli/run", "lab/cli/fit_arguments", "lab/cli/eval"):
        source = (Path(hf_adafuse.__file__).parent / f"{name}.py").read_text(encoding="utf-8")
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        added = [call for call in calls if getattr(call.func, "attr", "") == "add_argument"]
        assert len(added) > 3
        declared.update(ast.unparse(call) for call in added)
    assert [call for call, number in declared.items() if number > 1] == []


def test_help_shows_the_defaults_of_the_preset_in_use(capsys):
    """Without `--preset` the settings are those of `robust`."""
    assert main(["generate", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "(default: words, as the preset robust has it; with --preset paper: adafuse)" in shown
        and "(default: 1.0; with --preset paper: 0.0)" in shown
    )
    assert "tried at an uncertain word (default: 3)" in shown
