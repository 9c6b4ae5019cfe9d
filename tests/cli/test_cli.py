"""The command line as a whole: as a process, its help, its errors and exit codes."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.saved_members import PROMPT, expected, flags

import hf_adafuse
from hf_adafuse import AdaFuseDecodingError
from hf_adafuse.cli import _parser, generate, main, members


@pytest.mark.slow
def test_as_a_process(folders):
    text, _ = expected(folders)
    done = subprocess.run(
        [sys.executable, "-m", "hf_adafuse", *flags(folders)],
        input=PROMPT + "\n",
        capture_output=True,
        encoding="utf-8",
        check=False,
        cwd=Path(hf_adafuse.__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stdout) == (0, text + "\n"), done.stderr
    assert "Loading" not in done.stderr  # no progress bars into a pipe


def test_help_does_not_wait_for_torch():
    # The package stands in empty, so that only what the command line itself imports counts.
    code = f"""
import sys, types
package = types.ModuleType("hf_adafuse")
package.__path__ = [{str(Path(hf_adafuse.__file__).parent)!r}]
sys.modules["hf_adafuse"] = package
from hf_adafuse.cli import main
code = main(["generate", "--help"])
sys.exit(code or 3 * ("torch" in sys.modules or "transformers" in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "only the continuation" in done.stdout
    assert "--threshold" in done.stdout


def test_texts_may_begin_as_options_do():
    """As argparse has it, where there is a space in them."""
    arguments = ["generate", "--stop", "-- end", "--Hello there"]
    args = _parser(arguments).parse_args(arguments)
    assert args.prompt == "--Hello there" and args.stop == ["-- end"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (
            ["generate", "--model", "A", "--assitant", "B", PROMPT],
            "`--assitant` must be an option of `hf-adafuse generate`, but is none. Did you mean --assistant? Correct "
            "it. (see `hf-adafuse generate --help`)",
        ),
        (["--modle=A", "generate", PROMPT], "`--modle` must be an option of `hf-adafuse`, but is none. Leave it out."),
        (
            ["fit", "--dta", "x.jsonl"],
            "`--dta` must be an option of `hf-adafuse fit`, but is none. Did you mean --data?",
        ),
        (["fit", "--model", "A"], "required: --data"),
        (["generate", PROMPT, "more"], "unrecognized arguments: more (see `hf-adafuse generate --help`)"),
        (["generate", "--model", "{root}/missing", PROMPT], "a Hub name or a folder, but there is no '{root}/missing'"),
        (
            ["generate", "--model", "{main}", "--assistant", "{root}/missing", PROMPT],
            "/missing'. Check the path.",
        ),
        (["generate", "--assistant", "{main}", PROMPT], "`--model` must be given with `--assistant`"),
        (["generate", "--model", "{main}"], "standard input is"),
        (["generate", "--model", "{main}", ""], "Pass prompts"),
        (["generate", "--model", "{main}", "--threshold", "-1", PROMPT], "`margin_threshold` must be"),
        (["generate", "--model", "{main}", "--threshold", "high", PROMPT], "invalid float value: 'high'"),
        (["generate", "--model", "{main}", "--weights", "1,x", PROMPT], "numbers with commas between"),
        (["generate", "--model", "{main}", "--weights", "1,2", PROMPT], "`model_weights` must be one per member"),
        (["generate", "--model", "{main}", "--max-new-tokens", "0", PROMPT], "max_new_tokens"),
        (["generate", "--model", "{main}", "--word-boundary", "no", PROMPT], "invalid choice: 'no'"),
    ],
)
def test_errors_of_the_user(arguments, message, folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    names = {"root": str(tmp_path), "main": folders[0]}
    assert main([argument.format(**names) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.split("\n") if line.startswith("hf-adafuse: error: ")]
    assert len(lines) == 1
    assert message.format(**names) in lines[0]
    assert "Traceback" not in err


def test_a_broken_folder_is_an_error_of_the_user(folders, tmp_path, capsys):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in Path(folders[0]).iterdir():
        (broken / file.name).write_bytes(file.read_bytes()[: 99 if file.suffix == ".safetensors" else None])
    assert main(["generate", "--model", str(broken), PROMPT]) == 2
    assert "must be a local folder or a Hub name" in capsys.readouterr().err


def test_a_folder_without_a_tokenizer(folders, tmp_path, capsys):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((Path(folders[0]) / name).read_bytes())
    assert main(["generate", "--model", str(tmp_path), PROMPT]) == 2
    assert "The folder has no tokenizer files. Save the tokenizer there" in capsys.readouterr().err


def test_default_pair(folders, capsys, monkeypatch):
    monkeypatch.setattr(members, "find_spec", lambda name: None)
    assert main(["generate", PROMPT]) == 2
    assert "`--model` must be given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, ""),
        (AdaFuseDecodingError("assistant 1", "out of memory", 3, [], []), 1, "hf-adafuse: error: assistant 1 failed"),
    ],
)
def test_exit_codes(error, code, message, folders, capsys, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(generate, "answer", fail)
    assert main(flags(folders, PROMPT)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err if message else "hf-adafuse" not in err


def test_a_bug_keeps_its_traceback(folders, monkeypatch):
    monkeypatch.setattr(generate, "answer", lambda *_: [][0])
    with pytest.raises(IndexError):
        main(flags(folders, PROMPT))


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hf-adafuse {hf_adafuse.__version__}\n"
