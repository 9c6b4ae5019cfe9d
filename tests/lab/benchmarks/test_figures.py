"""The figures are those of the samples, the targets those of the figures; which prompts they are measured on."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace

import pytest
from support.tiny import TOKENIZERS

from hf_adafuse.lab.benchmarks import instruments, report, targets, workload
from hf_adafuse.lab.benchmarks import members as benchmark_members
from hf_adafuse.lab.benchmarks.measuring import measure_all
from hf_adafuse.lab.benchmarks.results import Measurement, TextResult, TimedRun


def made_up(seconds):
    samples = [
        TimedRun(name, text, repeat, value, [value * 0.4, value * 0.5], [3, 2], [5, 6], 130, None)
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
    assert result.slowest == "greedy 1" and result.alone_ratio == 6.0 / 4.0
    assert result.over_sum("naive") == 30.0 / 8.0 and made_up({"ours": [[1.0]]}).alone_ratio is None
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
    from hf_adafuse.lab.benchmarks.report import format_targets

    (line,) = format_targets([target]).splitlines()[1:]
    assert re.split("  +", line) == ["t", "4.0% (a), 9.0% (b)", "<= 5.0%, <= 8.0%", "no"]


def test_prompts_are_pieces_of_the_text():
    tokenizer = TOKENIZERS["characters"]()
    text = "there was a cat"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    cut = [workload.cut_prompt(ids, 5, index, tokenizer) for index in range(6)]
    assert cut[:2] == ["there", " was "] and all(piece in text and len(piece) == 5 for piece in cut)
    assert len(set(cut)) > 3  # the text is used up after three


@pytest.mark.slow
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
    jobs = [work.job(combination) for combination in workload.grid((), [12], [1, 2, 3], [1], ("greedy",))]
    assert [[len(batch[0]) for batch in job.prompts] for job in jobs] == [[1] * 12, [2] * 6, [3] * 4]
    first, *others = [[tuple(ids) for batch in job.prompts for ids in batch[0]] for job in jobs]
    assert len(set(first)) == 12 and others == [first, first]


def test_the_targets_compare_batches_over_the_same_prompts():
    plan = targets.plan((), (), 20, 500, 2000)
    assert {plan[name].num_prompts for name in ("short 1", "short 3")} == {plan["batch 1"].batch} == {8}
    assert {plan[name].num_prompts for name in ("long 1", "long 3")} == {4}


@pytest.mark.parametrize(
    ("bandwidth", "seconds", "doubt"),
    [
        (1e12, [1.0, 1.0, 1.1], None),
        (1e12, [1.0, 1.0, 1.5], "differ by 50% between repeats"),
        (1.0, [1.0, 1.0, 1.0], "the copy took longer than all passes"),
    ],
)
def test_figures_that_the_machines_noise_makes_worthless_are_said_to_be_so(bandwidth, seconds, doubt):
    measurement = made_up({"ours": [seconds], "greedy 1": [[1.0] * 3]})
    measurement.bandwidth = bandwidth
    shown = report.format_measurement(measurement)
    assert ("NOT TO BE TRUSTED" in shown) == (doubt is not None) and (doubt or "") in shown


def test_a_busy_machine_is_named():
    cpus = os.cpu_count()
    assert "NOT TO BE TRUSTED" not in report.format_machine(0.1) + report.format_machine()
    assert f"other programs kept {0.5 * cpus:.1f} of {cpus} processors busy" in report.format_machine(0.5 * cpus)


def test_the_load_is_that_of_other_programs(monkeypatch, tmp_path):
    """Of all processors' busy seconds those of this process are no load; idle and waiting processors are not busy."""
    stat, ticks = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(instruments, "_ALL_PROCESSORS", stat)
    clock = {"own": 10.0, "now": 100.0}
    monkeypatch.setattr(instruments.time, "process_time", lambda: clock["own"])
    monkeypatch.setattr(instruments.time, "perf_counter", lambda: clock["now"])
    stat.write_text(f"cpu {9 * ticks} 0 0 500 70 0 0 0 0 0\ncpu0 1 1 1 1\n")
    load = instruments.Load()
    clock |= {"own": 14.0, "now": 110.0}
    stat.write_text(f"cpu {11 * ticks} {1 * ticks} {2 * ticks} 900 900 {1 * ticks} 0 {3 * ticks} 0 0\n")
    assert load.so_far() == pytest.approx((9 - 4) / 10)
    stat.unlink()
    assert math.isnan(load.so_far())


def test_rows_of_a_table_say_what_differs():
    measurement = made_up(
        {"ours": [[1.0], [1.0]], "greedy 1": [[2.0], [2.0]], "no-kernel": [[3.0], [3.0]], "naive": [[9.0]]}
    )
    measurement.same_text = {"ours": True, "no-kernel": False}
    measurement.texts = [replace(text, num_ended=1) for text in measurement.texts]
    shown = report.format_measurement(measurement)
    cells = {line.split("  ")[0]: line.split() for line in shown.splitlines()}
    assert cells["no-kernel"][-1] == "NO" and cells["ours"][-1] == "yes" and "naive (1 text)" in cells
    assert "2 of 2 texts ended early" in shown
    assert re.search(r"alone 0\.500; .*\n.*alone 1\.500; .*\(without the kernel\)", shown)
