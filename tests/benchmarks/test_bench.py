"""`hf-adafuse bench`: what it measures is what was run, and the figures are those of the samples."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import sys
from statistics import median

import pytest
import torch
from kinds import model_of
from tiny import TOKENIZERS, tiny_model
from transformers import DynamicCache

from hf_adafuse import demo
from hf_adafuse.benchmarks import instruments, measure, targets, variants, workload
from hf_adafuse.benchmarks import members as benchmark_members
from hf_adafuse.benchmarks.measuring import AGAINST, DEFAULT_AGAINST, measure_all
from hf_adafuse.benchmarks.results import Measurement, Sample, TextResult
from hf_adafuse.cli import bench, main, members
from hf_adafuse.decoding.decoder import Decoder
from hf_adafuse.decoding.pool import Pool
from hf_adafuse.members.participants import Participant
from hf_adafuse.trees.packed_backend import ColumnBackend, PackedBackend
from hf_adafuse.trees.rows_backend import RowsBackend
from hf_adafuse.trees.skinny_linear import linear

PROMPTS = ["Once upon a time", "She"]
QUESTIONS = [question.prompt for question in demo.test_questions(6)]


def pair():
    """Random members of short words: they never agree."""
    return [(tiny_model("llama", "byte_level", 1), TOKENIZERS["byte_level"]()),
            (tiny_model("gpt_neox", "wordpiece", 2), TOKENIZERS["wordpiece"]())]  # fmt: skip


@pytest.fixture(scope="module")
def measured():
    return measure(
        demo.load_pair(), [QUESTIONS[:2], QUESTIONS[5:]], branches=3, new_tokens=8, repeats=2, against=AGAINST
    )


def test_every_contender_is_run_in_turn_and_gives_our_text(measured):
    assert measured.contenders == ["ours", "greedy 1", "greedy 2", *variants.VARIANTS, "naive"]
    assert measured.same_text == dict.fromkeys(["ours", *variants.VARIANTS, "naive"], True)
    assert [len(text.texts) for text in measured.texts] == [2, 1]
    assert {name: len(measured.of(name)) for name in measured.contenders} == {
        name: 1 if name == "naive" else 4 for name in measured.contenders
    }
    assert measured.of("naive")[0].text == 0
    in_turn = [sample.contender for sample in measured.samples if sample.repeat == 1 and sample.text == 0]
    assert in_turn == measured.contenders[:-1]


def test_members_that_agree_and_texts_that_end():
    """The demo's members, with one branch: every variant and the naive implementation give the same answers."""
    result = measure(demo.load_pair(), QUESTIONS, new_tokens=12, repeats=1, against=AGAINST)
    assert result.same_text == dict.fromkeys(["ours", *variants.VARIANTS, "naive"], True)
    assert 0 < result.agreement < 1 and result.texts[0].num_ended == 6


def test_a_text_that_is_not_ours_is_told(monkeypatch):
    def choose_another(settle):
        def settle_otherwise(self, config, log_probs):
            settle(self, config, log_probs)
            return max(self.ranked(), key=lambda candidate: candidate.score if candidate.dropped is None else 0.0)

        return settle_otherwise

    monkeypatch.setitem(variants.VARIANTS, "no-packed", lambda: variants._patched(Pool, "choose", choose_another))
    result = measure(pair(), PROMPTS, new_tokens=4, repeats=1, against=["no-packed"])
    assert result.same_text == {"ours": True, "no-packed": False}


def test_greedy_runs_exactly_the_texts_own_tokens(measured):
    for k in (0, 1):
        own = [text.own_tokens[k] for text in measured.texts]
        assert measured.forwards(f"greedy {k + 1}")[k] == sum(own) and measured.forwards(f"greedy {k + 1}")[1 - k] == 0
    (_, main), (_, assistant) = demo.load_pair()
    for text in measured.texts:  # the main model's with the end of the sequence
        assert text.num_ended == len(text.texts)
        assert text.own_tokens[0] == max(len(main(t).input_ids) for t in text.texts) + 1
        assert text.own_tokens[1] == max(len(assistant(t).input_ids) for t in text.texts)


def test_the_ideas_left_out_cost_passes(measured):
    ours = sum(measured.forwards("ours"))
    assert sum(measured.forwards("no-score-first")) > ours
    assert sum(measured.tokens("naive")) > 2 * sum(measured.of("ours", 0)[0].tokens)


def test_the_first_member_does_not_look_ahead(look_ahead):
    members = benchmark_members.load_pair()
    prompts = [benchmark_members.prompt(10, members[0][1])]  # one alone looks ahead
    look_ahead(2)
    result = measure(members, prompts, new_tokens=16, repeats=1, against=["no-look-ahead"])
    look_ahead(0)
    without = measure(members, prompts, new_tokens=16, repeats=1, against=[])
    assert result.tokens("no-look-ahead") == without.tokens("ours")
    assert sum(result.tokens("no-look-ahead")) < sum(result.tokens("ours"))  # and nothing read in vain


def test_branches_that_are_not_packed_run_as_rows(monkeypatch):
    """As many passes, but of trees that hold their branches in rows: padded, with copies of the keys above them."""
    runs = []
    for tree in (PackedBackend, RowsBackend):

        def run(self, wanted, original=tree.run):
            runs.append(type(self))
            return original(self, wanted)

        monkeypatch.setattr(tree, "run", run)
    result = measure(demo.load_pair(), QUESTIONS[:3], branches=3, new_tokens=8, repeats=1, against=["no-packed"])
    at = runs.index(RowsBackend)
    assert set(runs[:at]) == {PackedBackend} and set(runs[at:]) == {PackedBackend, RowsBackend}
    assert result.forwards("no-packed") == result.forwards("ours")
    assert sum(result.tokens("no-packed")) > sum(result.tokens("ours"))
    assert result.of("no-packed")[0].kv_peak_bytes > result.of("ours")[0].kv_peak_bytes


def test_keys_and_values_by_hand():
    """Both tiny models have 2 layers; llama 2 heads of 8 numbers, GPT-NeoX 4 of 8: 256 and 512 bytes a token."""
    assert [instruments.kv_bytes_per_token(model) for model, _ in pair()] == [256, 512]
    # Models that keep no keys, or only in one of two layers: 4 heads of 8 numbers.
    assert [instruments.kv_bytes_per_token(model_of(name)) for name in ("mamba", "rwkv", "qwen3_next")] == [0, 0, 128]
    tokenizers = [tokenizer for _, tokenizer in pair()]
    result = measure(pair(), ["Once upon a time", "She said"], new_tokens=6, repeats=1, against=["greedy"])
    (text,) = result.texts
    widths = [max(len(t(p).input_ids) for p in ["Once upon a time", "She said"]) for t in tokenizers]
    held = [2 * 256 * (widths[0] + text.own_tokens[0]), 2 * 512 * (widths[1] + text.own_tokens[1])]
    assert text.own_kv_bytes == sum(held)
    # Ordinary generation never runs its last token.
    assert result.kv_peak_bytes("greedy 1") == held[0] - 2 * 256
    assert result.kv_peak_bytes("greedy 2") == held[1] - 2 * 512
    assert result.kv_ratio == result.of("ours")[0].kv_peak_bytes / sum(held)


def test_cache_bytes_are_of_whole_storages_each_once():
    cache = DynamicCache()
    block = torch.zeros(1, 2, 10, 4)
    cache.update(block, block, 0)
    layer = cache.layers[0]
    layer.keys = layer.values = block[:, :, :3]  # as if preallocated, and shared
    assert instruments.cache_bytes(cache) == 10 * 2 * 4 * 4
    assert instruments.cache_bytes(None) == 0


def test_nothing_is_left_on_the_callers_models():
    models = [model for model, _ in pair()]
    before = [(type(model), dict(vars(model)), len(model._forward_hooks)) for model in models]
    measure(pair(), PROMPTS, new_tokens=2, repeats=1)
    assert [(type(model), dict(vars(model)), len(model._forward_hooks)) for model in models] == before


@pytest.mark.parametrize("name", list(variants.VARIANTS))
def test_variants_restore_what_they_patch(name):
    def patchable():
        return [Decoder._table, ColumnBackend.commit, Decoder._propose_ahead, Participant.choose_backend]

    before = patchable()
    with contextlib.suppress(KeyError), variants.VARIANTS[name]():
        changed = patchable()
        raise KeyError
    is_changed = [one is not other for one, other in zip(changed, before, strict=True)]
    assert is_changed == [index == list(variants.VARIANTS).index(name) for index in range(4)]
    assert patchable() == before


def test_weights_read_by_a_pass():
    model = pair()[0][0]
    embedding = model.get_input_embeddings().weight
    assert instruments.weight_bytes(model) == 4 * (model.num_parameters() - embedding.numel())
    assert instruments.copy_bandwidth(torch.device("cpu"), 2**20, 1) > 0


def recomputed(measurement):
    """The ratio from the raw samples of the JSON, in plain lines."""

    def seconds(name):
        total = 0.0
        for text in {s["text"] for s in measurement["samples"] if s["contender"] == name}:
            total += median(
                s["seconds"] for s in measurement["samples"] if s["contender"] == name and s["text"] == text
            )
        return total

    return seconds("ours"), seconds("greedy 1") + seconds("greedy 2")


@pytest.fixture
def prompt_file(tmp_path, monkeypatch):
    monkeypatch.setattr(members, "load_members", lambda *_: demo.load_pair())
    path = tmp_path / "prose.txt"
    path.write_text("Once upon a time there was a big cat on the tree in the park. " * 12, encoding="utf-8")
    return str(path)


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
    assert results["settings"]["parameters"] == [1_700_000]
    shapes = [(m["prompt_tokens"], m["batch"], m["branches"]) for m in results["measurements"]]
    assert shapes == [(4, 1, 1), (4, 1, 3), (4, 2, 1), (4, 2, 3)]
    for measurement, table in zip(results["measurements"], shown.split("\n\n")):
        assert all(size == pytest.approx(1.7e6, rel=0.06) for size in measurement["parameters"])
        ours, greedy = recomputed(measurement)
        assert measurement["figures"]["ratio"] == pytest.approx(ours / greedy)
        assert f"greedy time {ours / greedy:.3f};" in table
        assert f"{measurement['figures']['agreement']:.0%} of" in table and "words per round" in table
        for sample in measurement["samples"]:
            assert 0 < sum(sample["model_seconds"]) < sample["seconds"]
            assert sample["kv_peak_bytes"] > 0 and sample["memory_peak_bytes"] > 2**20
    assert picture.read_bytes().startswith(b"\x89PNG")


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


def made_up(seconds):
    samples = [
        Sample(name, text, repeat, value, [value * 0.4, value * 0.5], [3, 2], [5, 6], 130, None)
        for name, texts in seconds.items()
        for text, values in enumerate(texts)
        for repeat, value in enumerate(values)
    ]
    texts = [TextResult(["a b c"], 3, [4, 4], 100, 2, 1, 0) for _ in range(2)]
    return Measurement([10, 20], 20, 1, 3, 64, [100, 200], 1000.0, texts, samples)


def test_figures_by_hand():
    result = made_up({"ours": [[1.0, 9.0, 2.0], [4.0]], "greedy 1": [[2.0], [2.0]], "greedy 2": [[3.0], [1.0]],
                      "naive": [[30.0]]})  # fmt: skip
    assert result.seconds("ours") == 2.0 + 4.0 and result.greedy_seconds == 8.0 and result.ratio == 0.75
    assert result.spread("ours") == (9.0 - 1.0) / 2.0
    assert result.words_per_second("ours") == 6 / 6.0 and result.words_per_second("naive") == 3 / 30.0
    assert result.naive_ratio == 30.0 / 2.0  # of the one text it was run on
    assert result.passes_per_own_token == 10 / 16
    assert result.overhead == pytest.approx(0.1) and result.kv_ratio == 1.3
    assert result.agreement == 0.5 and result.words_per_round == 1.5
    assert result.bound_seconds == (6 * 100 + 4 * 200) / 1000


def test_met_and_not_met():
    check = targets.Check
    assert check("", 0.75, "<=", 0.75).is_met and not check("", 0.76, "<=", 0.75).is_met
    assert check("", 15, ">=", 15).is_met and not check("", 14, ">=", 15).is_met
    target = targets.Target("t", [check("a", 0.04, "<=", 0.05, True), check("b", 0.09, "<=", 0.08, True)])
    assert not target.is_met
    from hf_adafuse.benchmarks.report import format_targets

    (line,) = format_targets([target]).splitlines()[1:]
    assert re.split("  +", line) == ["t", "4.0% (a), 9.0% (b)", "<= 5.0%, <= 8.0%", "no"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parameters", "lots"], "must be numbers of parameters"),
        (["--batch", "0"], "must be whole numbers of at least 1"),
        (["--against", "magic"], "`against` must be of"),
        (["--parameters", "1M,2M,3M"], "`--parameters` must be one size, or one for each of the 2 members"),
        (["--prompt-tokens", "9000"], "`--prompt-file` must hold at least 9000 tokens"),
        (["--prompt-tokens", "100", "--new-tokens", "1000"], "must fit into the context of"),
        (["--plot", "x.pdf"], "`--plot` must be a file name that ends in .png"),
        (["--device", "cuda"], "`--device` must be cpu, but is cuda"),
    ],
)
def test_refusals(prompt_file, capsys, monkeypatch, arguments, message):
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


def test_prompts_are_pieces_of_the_text():
    tokenizer = TOKENIZERS["characters"]()
    text = "there was a cat"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    cut = [workload.cut_prompt(ids, 5, index, tokenizer) for index in range(6)]
    assert cut[:2] == ["there", " was "] and all(piece in text and len(piece) == 5 for piece in cut)
    assert len(set(cut)) > 3  # the text is used up after three


def test_no_figure_is_lost_in_json(measured):
    def numbers(value):
        if isinstance(value, dict):
            return [n for item in value.values() for n in numbers(item)]
        if isinstance(value, (list, tuple)):
            return [n for item in value for n in numbers(item)]
        return [value] if isinstance(value, float) else []

    found = numbers(measured.to_dict())
    assert found and all(math.isfinite(number) for number in found)


def test_the_pair_that_ships_with_the_package():
    work = workload.Workload(new_tokens=6, num_texts=2)
    job = work.job(workload.Combination((), 12, 2, 1, ("greedy",)))
    measure_all([job], repeats=1)
    assert job.result.parameters == [model.num_parameters() for model, _ in benchmark_members.load_pair()]
    assert len({tuple(ids) for prompts in job.prompts for ids in prompts[0]}) == 4
    assert [result.num_ended for result in job.result.texts] == [0, 0] and job.result.ratio > 0
    assert all(8 <= len(ids) <= 13 for prompts in job.prompts for ids in prompts[0])


def test_all_batches_read_the_same_prompts():
    work = workload.Workload(new_tokens=6, num_texts=2)
    jobs = [work.job(combination) for combination in workload.grid((), [12], [1, 2, 4], [1], ("greedy",))]
    assert [[len(batch[0]) for batch in job.prompts] for job in jobs] == [[1] * 8, [2] * 4, [4] * 2]
    first, *others = [[tuple(ids) for batch in job.prompts for ids in batch[0]] for job in jobs]
    assert len(set(first)) == 8 and others == [first, first]


def test_the_targets_compare_batches_over_the_same_prompts():
    plan = targets.plan((), (), 20, 500, 2000)
    assert {plan[name].num_prompts for name in ("short 1", "short 3")} == {plan["batch 1"].batch} == {8}
    assert {plan[name].num_prompts for name in ("long 1", "long 3")} == {4}


def test_the_command_knows_every_contender():
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    assert parser.parse_args([]).against == DEFAULT_AGAINST
    described = parser.epilog.partition("examples:")[0]
    assert tuple(re.findall(r"^  (\S+)  ", described, flags=re.MULTILINE)) == AGAINST


def test_layers_multiply_by_parts_where_several_threads_do(monkeypatch):
    products = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    place = "hf_adafuse.trees.skinny_linear.linear"
    monkeypatch.setattr(place, lambda x, *rest: products.append(x.shape) or linear(x, *rest))
    result = measure(pair(), PROMPTS[:1], new_tokens=4, repeats=1, against=[])
    assert len(products) > sum(result.forwards("ours"))
    products.clear()
    with variants.VARIANTS["no-parts"]():
        measure(pair(), PROMPTS[:1], new_tokens=4, repeats=1, against=[])
    assert not products
