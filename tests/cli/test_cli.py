"""The command line, on tiny saved models: what it writes is what `generate()` gives."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.trainers import BpeTrainer, UnigramTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hf_adafuse
from hf_adafuse import AdaFuseCandidate, AdaFuseConfig, AdaFuseDecodingError, AdaFuseRound, enable_adafuse
from hf_adafuse.cli import generate, main, members
from hf_adafuse.cli.streaming import TextWriter
from hf_adafuse.rounds.trace_text import bracketed, format_trace

SENTENCES = [
    "Once upon a time there was a little cat.",
    "The cat sat on the tree, and the tree was big.",
    "She said: what a time to sit in a tree!",
    "abcdef was a cat, abcdef and the tree.",
]
PROMPT = "Once upon a time"
SHORT = ["--max-new-tokens", "20", "--max-word-tokens", "6"]  # random models make long words
CONFIG = AdaFuseConfig(max_word_tokens=6)


def byte_level_tokenizer(alphabet=()):
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=len(alphabet) + 90, special_tokens=["</s>"], initial_alphabet=list(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def metaspace_tokenizer():
    tokenizer = Tokenizer(Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = UnigramTrainer(vocab_size=70, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def save_member(folder: Path, tokenizer, seed: int) -> str:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(60)  # sharp enough for margins on both sides of the threshold
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A byte-level member and a SentencePiece-like one."""
    root = tmp_path_factory.mktemp("members")
    return [save_member(root / "byte", byte_level_tokenizer(), 1), save_member(root / "meta", metaspace_tokenizer(), 3)]


@pytest.fixture(params=[False, True], ids=["byte-level first", "metaspace first"])
def pair(request, folders):
    return folders[::-1] if request.param else folders


def flags(pair, *more):
    return ["generate", "--model", pair[0], "--assistant", pair[1], *SHORT, *more]


def expected(pair, config=CONFIG, **kwargs):
    """The continuation and the rounds that `generate()` gives, decoded with nothing but the tokenizer."""
    model = enable_adafuse(AutoModelForCausalLM.from_pretrained(pair[0]))
    tokenizer = AutoTokenizer.from_pretrained(pair[0])
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    kwargs = {"max_new_tokens": 20, "assistant_models": pair[1:], "return_dict_in_generate": True, **kwargs}
    output = model.generate(**inputs, tokenizer=tokenizer, adafuse_config=config, **kwargs)
    whole = tokenizer.decode(output.sequences[0], skip_special_tokens=True)
    before = tokenizer.decode(inputs["input_ids"][0], skip_special_tokens=True)
    assert whole.startswith(before)
    return whole[len(before) :], output.rounds[0]


def test_streams_the_continuation(pair, capsys):
    text, rounds = expected(pair)
    assert len(rounds) > 2
    assert text.startswith(" ")  # which decoding only the new ids can lose
    assert main(flags(pair, PROMPT)) == 0
    assert capsys.readouterr().out == text + "\n"


def test_streams_round_by_round(pair, monkeypatch):
    _, rounds = expected(pair)
    written = []
    monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(write=written.append, flush=lambda: None))
    assert main(flags(pair, PROMPT)) == 0
    assert written == [*(committed.text for committed in rounds if committed.text), "\n"]


def test_settings_reach_generate(pair, capsys):
    config = AdaFuseConfig(margin_threshold=0.2, max_words=2, num_branches=2, model_weights=(3, 1), max_word_tokens=5)
    text, _ = expected(pair, config=config, max_new_tokens=17)
    given = ["--threshold", "0.2", "--max-words", "2", "--branches", "2", "--weights", "3,1", "--max-word-tokens", "5"]
    assert main(flags(pair, *given, "--max-new-tokens", "17", PROMPT)) == 0
    assert capsys.readouterr().out == text + "\n"


def test_three_members_and_one(folders, capsys):
    three = [folders[0], folders[1], folders[0]]
    for names in (three, three[:1]):
        text, _ = expected(names)
        assistants = [part for name in names[1:] for part in ("--assistant", name)]
        assert main(["generate", "--model", names[0], *assistants, *SHORT, PROMPT]) == 0
        assert capsys.readouterr().out == text + "\n"


def test_prompt_on_standard_input(pair, capsys, monkeypatch):
    text, _ = expected(pair)
    for arguments in ([], ["-"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + "\n"))
        assert main(flags(pair, *arguments)) == 0
        assert capsys.readouterr().out == text + "\n"


def test_json(pair, capsys):
    text, rounds = expected(pair)
    assert main(flags(pair, "--json", PROMPT)) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    result = json.loads(out)
    assert list(result) == ["prompt", "text", "rounds", "stats"]
    assert (result["prompt"], result["text"]) == (PROMPT, text)
    assert "".join(committed["text"] for committed in result["rounds"]) == text
    assert [committed["winner"] for committed in result["rounds"]] == [committed.winner for committed in rounds]
    assert len(result["stats"]["members"]) == 2


def test_trace(pair, capsys):
    _, rounds = expected(pair)
    assert main(flags(pair, "--trace", PROMPT)) == 0
    line, blank, names, *tables = capsys.readouterr().out.split("\n")
    assert line == " ".join(bracketed(committed.text) for committed in rounds if committed.text)
    assert (blank, names) == ("", f"Members  0: {Path(pair[0]).name}  1: {Path(pair[1]).name}")
    blocks = "\n".join(tables).strip("\n").split("\n\n")
    assert len(blocks) == len(rounds) + 1
    for block, committed in zip(blocks, rounds, strict=False):
        for candidate in committed.candidates:
            rows = [row for row in block.split("\n") if f'"{candidate.text}"' in row or not candidate.text]
            assert any(f"{candidate.score:.3f}" in row for row in rows)
        winners = [row for row in block.split("\n") if row.startswith("  >")]
        assert len(winners) == 1
        assert f"{committed.candidates[committed.winner].score:.3f}" in winners[0]


def test_stop(pair, capsys):
    text, _ = expected(pair)
    stop = text[5:7]
    stopped, _ = expected(pair, stop_strings=[stop])
    assert len(stopped) < len(text)
    assert stop in stopped
    assert main(flags(pair, "--stop", "never this", "--stop", stop, PROMPT)) == 0
    assert capsys.readouterr().out == stopped + "\n"


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["generate", "--model", "{root}/missing", PROMPT], "'{root}/missing' must be a local folder or a Hub name"),
        (
            ["generate", "--model", "{main}", "--assistant", "{root}/missing", PROMPT],
            "/missing' must be a local folder",
        ),
        (["generate", "--assistant", "{main}", PROMPT], "`--model` must be given with `--assistant`"),
        (["generate", "--model", "{main}"], "standard input is"),
        (["generate", "--model", "{main}", ""], "Pass a prompt"),
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


def test_default_pair(folders, capsys, monkeypatch):
    monkeypatch.setattr(members, "find_spec", lambda name: None)
    assert main(["generate", PROMPT]) == 2
    assert "`--model` must be given" in capsys.readouterr().err


@pytest.mark.parametrize("prompt", ["What is the capital of Peru?", "Question: What is the capital of Peru?\nAnswer:"])
def test_the_demo_pair_answers_a_plain_question(prompt, capsys):
    assert main(["generate", prompt, "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out == " Lima\n"
    assert main(["generate", prompt, "--dtype", "bfloat16"]) == 2
    assert "options of loading" in capsys.readouterr().err


def test_settings_of_the_main_model_hold_unless_a_flag_says_otherwise(folders, tmp_path, capsys):
    model, tokenizer = members.load_members(folders[0])[0]
    model.generation_config._from_model_config = None  # or it would not be read again
    model.generation_config.adafuse_config = {"max_words": 1, "num_branches": 2}
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pair = [str(tmp_path), folders[1]]
    for given, config in (
        ([], AdaFuseConfig(max_words=1, num_branches=2, max_word_tokens=6)),
        (["--max-words", "2"], AdaFuseConfig(max_words=2, num_branches=2, max_word_tokens=6)),
    ):
        assert main(flags(pair, *given, PROMPT)) == 0
        assert capsys.readouterr().out == expected(pair, config=config)[0] + "\n"


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

    monkeypatch.setattr(generate, "_generate", fail)
    assert main(flags(folders, PROMPT)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err if message else "hf-adafuse" not in err


def test_a_bug_keeps_its_traceback(folders, monkeypatch):
    monkeypatch.setattr(generate, "_generate", lambda *_: [][0])
    with pytest.raises(IndexError):
        main(flags(folders, PROMPT))


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hf-adafuse {hf_adafuse.__version__}\n"


def test_a_character_is_written_whole(capsys):
    tokenizer = byte_level_tokenizer(pre_tokenizers.ByteLevel.alphabet())
    writer = TextWriter(tokenizer)
    writer.put(torch.tensor([[1, 2, 3]]))  # the prompt
    ids = tokenizer("a é").input_ids
    assert len(ids) == 4  # "é" is two tokens
    seen = []
    for token in ids:
        writer.put(torch.tensor([token]))
        seen.append(capsys.readouterr().out)
    assert seen == ["a", " ", "", "é"]
    writer.put(torch.tensor(ids[2:3]))  # half of one, and then the end
    writer.end()
    writer.close()
    assert capsys.readouterr().out == "\N{REPLACEMENT CHARACTER}\n"


def odd_round() -> AdaFuseRound:
    """No winner, an infinite score, an unscored NLL, inexact texts, a wide and a control character."""
    dropped = AdaFuseCandidate(
        " 猫", [" 猫"], False, [1], [None, 10.5], math.inf, [0], "the main model cannot represent it"
    )
    forbidden = AdaFuseCandidate("\nyes", ["\nyes"], True, [0], [math.inf, 2.0], math.inf, [1])
    return AdaFuseRound(" no", [" no"], False, 0, None, [dropped, forbidden], [[0.25], []], 1, True)


def test_trace_of_an_odd_round():
    stats = {"members": [{"forward_passes": 4}] * 2}
    assert format_trace([odd_round()], ["one", "two"], stats) == (
        "Members  0: one  1: two\n\n"
        "Round 1  [no]  1 word, 1 token\n"
        "    every candidate was ruled out: the main model's greedy word was taken\n"
        "    candidate      by  nll 0   nll 1  fused\n"
        '    " 猫"          1       -  10.500    inf  dropped: the main model cannot represent it\n'
        '    "\\nyes" <end>  0     inf   2.000    inf  not exact for 1\n'
        "    margins  0: 0.25\n\n"
        "1 round, 1.00 words per round\nForward passes  0: 4  1: 4\nWinners proposed by  0: 1  1: 0\n"
    )


def test_json_has_no_infinity(folders, capsys, monkeypatch):
    output = types.SimpleNamespace(rounds=[[odd_round()]], stats={"rounds": 1})
    monkeypatch.setattr(generate, "_generate", lambda *_: output)
    assert main(flags(folders, "--json", PROMPT)) == 0

    def refuse(name):
        raise AssertionError(name)

    result = json.loads(capsys.readouterr().out, parse_constant=refuse)
    dropped, forbidden = result["rounds"][0]["candidates"]
    assert dropped["nlls"] == [None, 10.5]
    assert dropped["score"] is None
    assert forbidden["nlls"] == [None, 2.0]
