"""`hf-adafuse bench`: its JSON, tables and plots say what was measured; its errors are the user's."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import median

import pytest
import torch

from hf_adafuse import demo
from hf_adafuse.cli import main, members
from hf_adafuse.lab.benchmarks.measuring import AGAINST, DEFAULT_AGAINST
from hf_adafuse.lab.cli import bench


def recomputed(measurement):
    """The ratio from the raw samples of the JSON, in plain lines."""

    def seconds(name):
        total = 0.0
        for text in {s["text"] for s in measurement["samples"] if s["contender"] == name}:
            total += median(
                s["seconds"] for s in measurement["samples"] if s["contender"] == name and s["text"] == text
            )
        return total

    return seconds("ours"), seconds("greedy 1"), seconds("greedy 2")


@pytest.fixture
def prompt_file(tmp_path, monkeypatch):
    monkeypatch.setattr(members, "load_members", lambda *_: demo.load_pair())
    path = tmp_path / "prose.txt"
    path.write_text("Once upon a time there was a big cat on the tree in the park. " * 12, encoding="utf-8")
    return str(path)


@pytest.mark.slow
def test_the_command(prompt_file, tmp_path, capsys):
    path, picture = tmp_path / "results.json", tmp_path / "results.png"
    call = [
        "bench",
        "--model",
        "A",
        "--assistant",
        "B",
        "--prompt-file",
        prompt_file,
        "--parameters",
        "1.7M",
        "--texts",
    ]
    call += ["1", "--new-tokens", "2", "--prompt-tokens", "4", "--batch", "1,2", "--branches", "1,3", "--repeats"]
    call += ["1", "--threads", "1", "--against", "greedy"]
    assert main([*call, "--json", str(path), "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    results = json.loads(path.read_text(encoding="utf-8"))
    assert sorted(results) == ["machine", "measurements", "settings", "targets", "versions"]
    assert results["machine"]["threads"] == 1 and results["versions"]["torch"] == torch.__version__
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists() and "model name" in (told := cpu_info.read_text(encoding="utf-8")):
        assert f": {results['machine']['processor']}\n" in told
    assert results["settings"]["parameters"] == [1_700_000]
    shapes = [(m["prompt_tokens"], m["batch"], m["branches"]) for m in results["measurements"]]
    assert shapes == [(4, 1, 1), (4, 1, 3), (4, 2, 1), (4, 2, 3)]
    on, *tables = shown.rstrip("\n").split("\n\n")
    assert on.startswith(results["machine"]["processor"]) and ", 1 thread; " in on and torch.__version__ in on
    for measurement, table in zip(results["measurements"], tables, strict=True):
        assert all(size == pytest.approx(1.7e6, rel=0.06) for size in measurement["parameters"])
        ours, *greedy = recomputed(measurement)
        assert measurement["figures"]["ratio"] == pytest.approx(ours / sum(greedy))
        assert measurement["figures"]["alone_ratio"] == pytest.approx(ours / max(greedy))
        slowest = f"time / greedy {greedy.index(max(greedy)) + 1} (1.7M), the slowest member, alone"
        assert f"{slowest} {ours / max(greedy):.3f}; / the members' own greedy times in turn" in table
        assert f" in turn {ours / sum(greedy):.3f}\n" in table
        assert f"{measurement['figures']['agreement']:.0%} of" in table and "words per round" in table
        for sample in measurement["samples"]:
            assert 0 < sum(sample["model_seconds"]) < sample["seconds"]
            assert sample["kv_peak_bytes"] > 0 and sample["memory_peak_bytes"] > 2**20
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_other_methods_and_variants_in_tables_and_json(prompt_file, tmp_path, capsys):
    path = tmp_path / "results.json"
    call = ["bench", "--model", "A", "--assistant", "B", "--prompt-file", prompt_file, "--prompt-tokens", "4"]
    call += ["--new-tokens", "3", "--batch", "1", "--branches", "1", "--texts", "2", "--repeats", "1"]
    assert main([*call, "--against", "greedy, no-kernel,naive", "--methods", "unite", "--json", str(path)]) == 0
    (measurement,) = json.loads(path.read_text(encoding="utf-8"))["measurements"]
    shown = capsys.readouterr().out
    rows = [line.split("  ")[0] for line in shown.splitlines()]
    for name in ("ours", "greedy 1", "greedy 2", "greedy, sum", "no-kernel", "naive (1 text)", "unite"):
        assert name in rows
    words = {sample["contender"]: sample["num_words"] for sample in measurement["samples"]}
    assert words["unite"] > 0 and words["ours"] is words["naive"] is None
    assert "(without the kernel)" in shown and "cache-less / ours" in shown


@pytest.mark.slow
def test_the_targets_of_members_of_ones_own_leave_out_other_sizes(prompt_file, capsys):
    call = ["bench", "--model", "A", "--assistant", "B", "--prompt-file", prompt_file, "--new-tokens", "1"]
    assert main([*call, "--prompt-tokens", "4,5,6", "--repeats", "1", "--threads", "1", "--targets"]) == 0
    shown = capsys.readouterr().out
    table = shown[shown.index("\ntarget ") :].split("\n\n")[0].strip().splitlines()
    assert len(table) == 1 + 8 and "uneven" not in shown


@pytest.mark.slow
def test_the_targets(prompt_file, capsys):
    call = ["bench", "--model", "A", "--assistant", "B", "--prompt-file", prompt_file, "--texts"]
    call += ["1", "--new-tokens", "1", "--prompt-tokens", "4,6,8", "--repeats", "1", "--threads", "1"]
    assert main([*call, "--uneven", "1.7M,2.5M", "--targets", "--json", "-"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert len(results["targets"]) == 9
    by_shape = {(m["prompt_tokens"], m["batch"], m["branches"], m["parameters"][1] > 1e6): m["figures"]
                for m in results["measurements"]}  # fmt: skip
    values = [[check["value"] for check in target["checks"]] for target in results["targets"]]
    short = [by_shape[4, 1, 1, False], by_shape[4, 1, 3, False]]
    assert values[0] == [short[0]["ratio"]] and values[1] == [short[1]["ratio"]]
    assert values[2] == [by_shape[8, 1, b, False]["ratio"] / short[b // 2]["ratio"] for b in (1, 3)]
    assert values[3] == [by_shape[4, 1, 1, True]["ratio"]]
    assert values[4] == [figures["passes_per_own_token"] for figures in short]
    rates = [figures["contenders"]["ours"]["words_per_second"] for figures in short]
    eight = [by_shape[4, 8, b, False]["contenders"]["ours"]["words_per_second"] for b in (1, 3)]
    assert values[5] == [eight[0] / rates[0], eight[1] / rates[1]]
    assert values[6] == [short[1]["overhead"], by_shape[4, 16, 3, False]["overhead"]]
    assert values[7] == [max(f["kv_ratio"] for (_, _, b, _), f in by_shape.items() if b == 3)]
    assert values[8] == [by_shape[6, 1, 3, False]["naive_ratio"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parameters", "lots"], "must be numbers of parameters"),
        (["--batch", "0"], "must be a whole number of at least 1"),
        (["--against", "magic"], "`against` must be of"),
        (["--parameters", "1M,2M,3M"], "`--parameters` must be one size, or one for each of the 2 members"),
        (["--prompt-tokens", "9000"], "`--prompt-file` must hold at least 9000 tokens"),
        (["--prompt-tokens", "100", "--new-tokens", "1000"], "must fit into the context of"),
        (["--plot", "x.pdf"], "`--plot` must be a file name that ends in .png"),
        (["--plot", "nowhere/x.png"], "`--plot` must be a file in a folder that exists"),
        (["--json", "nowhere/x.json"], "`--json` must be a file in a folder that exists"),
        (["--methods", "magic"], "`--methods` must be of"),
        (["--methods", "greedy"], "`--methods` must be of"),
        (["--against", ","], "must be names with commas between"),
        (["--device", "cuda"], "`--device` must be cpu, but is cuda"),
    ],
)
def test_refusals(prompt_file, capsys, monkeypatch, short_contexts, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    call = ["bench", "--model", "A", "--assistant", "B", "--prompt-file", prompt_file]
    call += ["--prompt-tokens", "4", "--batch", "1", "--new-tokens", "2", "--threads", "1", "--repeats", "1"]
    assert main([*call, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_plot_without_matplotlib(prompt_file, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--model", "A", "--prompt-file", prompt_file, "--plot", "x.png"]) == 2
    assert 'pip install "hf_adafuse[plots]"' in capsys.readouterr().err


def test_sizes():
    assert bench._sizes("80M") == (80_000_000,) and bench._sizes("1B,8b,1.5k,7") == (10**9, 8 * 10**9, 1500, 7)


def test_the_command_knows_every_contender():
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    assert tuple(parser.parse_args([]).against) == DEFAULT_AGAINST
    described = parser.epilog.partition("examples:")[0]
    assert tuple(re.findall(r"^  (\S+)  ", described, flags=re.MULTILINE)) == AGAINST
