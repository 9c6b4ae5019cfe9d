"""`hf-adafuse generate`, on tiny saved models: what it writes is what `generate()` gives."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import sys
import types
from pathlib import Path

import pytest
import torch
from support.saved_members import PROMPT, SHORT, byte_level_tokenizer, expected, flags
from tokenizers import pre_tokenizers

from hf_adafuse import AdaFuseCandidate, AdaFuseConfig, AdaFuseRound, AdaFuseRoundsBatch
from hf_adafuse.cli import generate, main, members
from hf_adafuse.cli.streaming import TextWriter
from hf_adafuse.rounds.trace_text import bracketed, format_trace


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


def test_the_recommended_preset_is_the_default(pair, capsys):
    config = AdaFuseConfig.robust()
    text, _ = expected(pair, config=config)
    arguments = ["generate", "--model", pair[0], "--assistant", pair[1], "--max-new-tokens", "20"]
    for given in ([], ["--preset", "robust"]):
        assert main([*arguments, *given, PROMPT]) == 0
        assert capsys.readouterr().out == text + "\n"
    text, _ = expected(pair, config=config.changed({"num_branches": 1}))
    assert main([*arguments, "--branches", "1", PROMPT]) == 0
    assert capsys.readouterr().out == text + "\n"


def test_settings_of_sampling_reach_generate(pair, capsys):
    """At a temperature of almost nothing what is drawn is the most likely word of the member that counts most."""
    drawn = flags(pair, "--sample", "--weights", "1,1e-9", "--seed", "1", PROMPT)
    texts = []
    for given in (["--temperature", "0.001"], ["--top-k", "1"], ["--top-p", "0.001"], ["--temperature", "3"]):
        assert main([*drawn, *given]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2] != texts[3]


@pytest.mark.parametrize("flag", ["--temperature", "--top-p", "--top-k", "--seed"])
def test_settings_of_sampling_need_sampling(pair, flag, capsys):
    assert main(flags(pair, flag, "1", PROMPT)) == 2
    assert f"`{flag}` must be left out without `--sample`" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [["--branches", "3"], ["--threshold", "0.7"], ["--commitment", "adaptive"]])
def test_a_flag_that_a_method_has_no_use_for_is_refused_whatever_its_value(flag, capsys):
    assert main(["generate", "--method", "unite", *flag, PROMPT]) == 2
    assert f"`{flag[0]}` must be left out with `--method unite`" in capsys.readouterr().err


def test_a_path_at_which_there_is_nothing_is_no_hub_name(capsys):
    assert main(["generate", "--model", "/no/such/folder", PROMPT]) == 2
    err = capsys.readouterr().err
    assert "there is no '/no/such/folder'. Check the path" in err and "repo" not in err.lower()


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
        out, err = capsys.readouterr()
        assert out == text + "\n"
        assert err.count(f"hf-adafuse: {Path(names[0]).name} answers alone; with --assistant NAME") == (not assistants)


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
    assert list(result) == ["prompt", "text", "finish_reason", "confidence", "rounds", "stats"]
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


def test_a_page_of_the_rounds(pair, tmp_path, capsys):
    text, rounds = expected(pair)
    assert main(flags(pair, "--html", str(tmp_path / "page.html"), PROMPT)) == 0
    assert capsys.readouterr().out == text + "\n"
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == rounds.to_html(PROMPT)


def test_stop(pair, capsys):
    text, _ = expected(pair)
    stop = text[5:7]
    stopped, _ = expected(pair, stop_strings=[stop])
    assert len(stopped) < len(text)
    assert stop in stopped
    assert main(flags(pair, "--stop", "never this", "--stop", stop, PROMPT)) == 0
    assert capsys.readouterr().out == stopped + "\n"


@pytest.mark.parametrize("prompt", ["What is the capital of Peru?", "Question: What is the capital of Peru?\nAnswer:"])
def test_the_demo_pair_answers_a_plain_question(prompt, capsys):
    assert main(["generate", prompt, "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out == " Lima\n"
    assert main(["generate", prompt, "--dtype", "bfloat16"]) == 2
    assert "options of loading" in capsys.readouterr().err


@pytest.mark.slow
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
        (["--preset", "paper"], AdaFuseConfig(max_word_tokens=6)),  # all of them, not only those it names
        (["--preset", "robust"], dataclasses.replace(AdaFuseConfig.robust(), max_word_tokens=6)),
    ):
        arguments = ["generate", "--model", pair[0], "--assistant", pair[1], "--max-new-tokens", "20"]
        assert main([*arguments, "--max-word-tokens", "6", *given, PROMPT]) == 0
        assert capsys.readouterr().out == expected(pair, config=config)[0] + "\n"


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
    forbidden = AdaFuseCandidate("\nyes", ["\nyes"], True, [0], [math.inf, 2.0], math.inf, [1], decided_by=[math.inf])
    return AdaFuseRound(" no", [" no"], False, 0, None, [dropped, forbidden], [[0.25], []], 1, True)


def test_trace_of_an_odd_round():
    stats = {"members": [{"forward_passes": 4}] * 2}
    assert format_trace([odd_round()], ["one", "two"], stats) == (
        "Members  0: one  1: two\n\n"
        "Round 1  [no]  1 word, 1 token, the lowest fused NLL wins\n"
        "    every candidate was ruled out: the main model's greedy word was taken\n"
        "    candidate      by  nll 0   nll 1  fused NLL\n"
        '    "\\nyes" <end>  0     inf   2.000  inf        not exact for 1\n'
        '    " 猫"          1       -  10.500  -          dropped: the main model cannot represent it\n'
        "    margins  0: 0.25\n\n"
        "1 round, 1.00 words per round\nForward passes  0: 4  1: 4\nWinners proposed by  0: 1  1: 0\n"
    )


def test_json_has_no_infinity(folders, capsys, monkeypatch):
    output = types.SimpleNamespace(rounds=AdaFuseRoundsBatch([[odd_round()]]), stats={"rounds": 1})
    monkeypatch.setattr(generate, "answer", lambda *_: output)
    assert main(flags(folders, "--json", PROMPT)) == 0

    def refuse(name):
        raise AssertionError(name)

    result = json.loads(capsys.readouterr().out, parse_constant=refuse)
    dropped, forbidden = result["rounds"][0]["candidates"]
    assert dropped["nlls"] == [None, 10.5]
    assert dropped["score"] is None
    assert forbidden["nlls"] == [None, 2.0]
