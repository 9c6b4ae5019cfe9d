"""Measuring: what is measured is what was run, by every contender in turn, and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import math

import pytest
import torch
from support.graphs import Graphs
from support.kinds import model_of
from support.tiny import TOKENIZERS, tiny_model
from transformers import DynamicCache

from hf_adafuse import AdaFuseConfig, demo
from hf_adafuse.decoding.member_turns import MemberTurns
from hf_adafuse.decoding.selector import Selector
from hf_adafuse.decoding.word_splitter import split_words
from hf_adafuse.demo.methods import fuse
from hf_adafuse.kernels.small_batch_linear import linear
from hf_adafuse.lab.benchmarks import instruments, measure, variants
from hf_adafuse.lab.benchmarks import members as benchmark_members
from hf_adafuse.lab.benchmarks.measuring import AGAINST, METHODS
from hf_adafuse.lab.benchmarks.workload import Combination, Workload
from hf_adafuse.members.model_handle import ModelHandle
from hf_adafuse.members.ngram_drafts import NgramDrafts
from hf_adafuse.transformers_compat import is_compiled
from hf_adafuse.trees import model_call, pass_costs, tree_cache
from hf_adafuse.trees.branch_rows_backend import BranchRowsBackend
from hf_adafuse.trees.tree_attention_backend import KVCacheBackend, TreeAttentionBackend

PROMPTS = ["Once upon a time", "She"]
QUESTIONS = [question.prompt for question in demo.test_questions(6)]


def pair():
    """Random members of short words: they never agree."""
    return [(tiny_model("llama", "byte_level", 1), TOKENIZERS["byte_level"]()),
            (tiny_model("gpt_neox", "wordpiece", 2), TOKENIZERS["wordpiece"]())]  # fmt: skip


@pytest.fixture(scope="module")
def measured():
    return measure(
        demo.load_pair(), [QUESTIONS[:2], QUESTIONS[4:]], branches=3, new_tokens=8, repeats=2, against=AGAINST
    )


def test_every_contender_is_run_in_turn_and_gives_our_text(measured):
    assert measured.contenders == ["ours", "greedy 1", "greedy 2", *variants.VARIANTS, "naive"]
    assert measured.same_text == dict.fromkeys(["ours", *variants.VARIANTS, "naive"], True)
    assert [len(text.texts) for text in measured.texts] == [2, 2]
    assert {name: len(measured.of(name)) for name in measured.contenders} == {
        name: 1 if name == "naive" else 4 for name in measured.contenders
    }
    assert measured.of("naive")[0].text == 0
    in_turn = [sample.contender for sample in measured.samples if sample.repeat == 1 and sample.text == 0]
    assert in_turn == measured.contenders[:-1]


@pytest.mark.slow
def test_members_that_agree_and_texts_that_end():
    """The demo's members, with one branch: every variant and the naive implementation give the same answers."""
    result = measure(demo.load_pair(), QUESTIONS, new_tokens=12, repeats=1, against=AGAINST)
    assert result.same_text == dict.fromkeys(["ours", *variants.VARIANTS, "naive"], True)
    assert 0 < result.agreement < 1 and result.texts[0].num_ended == 6


def test_a_text_that_is_not_ours_is_told(monkeypatch):
    def choose_another(choose):
        def choose_otherwise(self, prompt, pool):
            choose(self, prompt, pool)
            return max(pool.ranked(), key=lambda candidate: candidate.score if candidate.dropped is None else 0.0)

        return choose_otherwise

    monkeypatch.setitem(
        variants.VARIANTS, "no-tree-attention", lambda: variants._patched(Selector, "choose", choose_another)
    )
    result = measure(pair(), PROMPTS, new_tokens=4, repeats=1, against=["no-tree-attention"])
    assert result.same_text == {"ours": True, "no-tree-attention": False}


def test_greedy_runs_exactly_the_texts_own_tokens(measured):
    for k in (0, 1):
        own = [text.own_tokens[k] for text in measured.texts]
        assert measured.forwards(f"greedy {k + 1}")[k] == sum(own) and measured.forwards(f"greedy {k + 1}")[1 - k] == 0
    (_, main), (_, assistant) = demo.load_pair()
    for text in measured.texts:  # with the end of the text, which each member would write
        assert text.num_ended == len(text.texts)
        assert text.own_tokens[0] == max(len(main(t).input_ids) for t in text.texts) + 1
        assert text.own_tokens[1] == max(len(assistant(t).input_ids) for t in text.texts) + 1


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


def test_a_meter_that_is_off_neither_counts_nor_waits(monkeypatch):
    """With it the time of a call is that of the call without any meter: no pass waits for the GPU."""
    job = Workload(pair(), "She had a cat. " * 9, new_tokens=4).job(Combination((), 4, 1, 1, ("greedy",)))
    job.ensemble.meter.is_on = False
    waits = []
    monkeypatch.setattr(instruments, "synchronize", waits.append)
    job.warm_up()
    assert waits == []
    job.measure_once(0)
    assert len(waits) == 2 * len(job.result.contenders)  # before and after each call
    assert sum(job.result.forwards("ours")) == 0 and job.result.same_text == {"ours": True}


def test_without_tree_attention_branches_run_as_rows(monkeypatch):
    """As many passes, but of trees that hold their branches in rows: padded, with copies of the keys above them."""
    monkeypatch.setattr(tree_cache, "_SPARE_OF_EACH", 1)  # so few that the copies show in the size of the cache
    runs = []
    for tree in (TreeAttentionBackend, BranchRowsBackend):

        def run(self, wanted, original=tree.run):
            runs.append(type(self))
            return original(self, wanted)

        monkeypatch.setattr(tree, "run", run)
    result = measure(
        demo.load_pair(), QUESTIONS[:3], branches=3, new_tokens=8, repeats=1, against=["no-tree-attention"]
    )
    at = runs.index(BranchRowsBackend)
    assert set(runs[:at]) == {TreeAttentionBackend} and set(runs[at:]) == {TreeAttentionBackend, BranchRowsBackend}
    assert result.forwards("no-tree-attention") == result.forwards("ours")
    assert sum(result.tokens("no-tree-attention")) > sum(result.tokens("ours"))
    assert result.of("no-tree-attention")[0].kv_peak_bytes > result.of("ours")[0].kv_peak_bytes


def test_keys_and_values_by_hand():
    """Both tiny models have 2 layers; llama 2 heads of 8 numbers, GPT-NeoX 4 of 8: 256 and 512 bytes a token."""
    assert [instruments.kv_bytes(model, 10) for model, _ in pair()] == [2560, 5120]
    # Models that keep no keys, or only in one of two layers: 4 heads of 8 numbers.
    assert [instruments.kv_bytes(model_of(name), 1) for name in ("mamba", "rwkv", "qwen3_next")] == [0, 0, 128]
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
        known = (
            MemberTurns._spans_and_later_nodes,
            KVCacheBackend.commit,
            MemberTurns._propose_ahead,
            NgramDrafts.after,
            ModelHandle.tested_backend,
            model_call.with_small_batch_linears,
        )
        return list(known)

    before = patchable()
    with contextlib.suppress(KeyError), variants.VARIANTS[name]():
        changed = patchable()
        raise KeyError
    is_changed = [one is not other for one, other in zip(changed, before, strict=True)]
    assert is_changed == [index == list(variants.VARIANTS).index(name) for index in range(6)]
    assert patchable() == before


def test_weights_read_by_a_pass():
    model = pair()[0][0]
    embedding = model.get_input_embeddings().weight
    assert instruments.weight_bytes(model) == 4 * (model.num_parameters() - embedding.numel())
    assert instruments.copy_bandwidth(torch.device("cpu"), 2**20, 1) > 0


def test_no_figure_is_lost_in_json(measured):
    def numbers(value):
        if isinstance(value, dict):
            return [n for item in value.values() for n in numbers(item)]
        if isinstance(value, (list, tuple)):
            return [n for item in value for n in numbers(item)]
        return [value] if isinstance(value, float) else []

    found = numbers(json.loads(json.dumps(measured.to_dict(), allow_nan=False)))
    assert found and all(math.isfinite(number) for number in found)


@pytest.mark.parametrize("prompts", ["Once", "", [], [[]], [["a", "b"], ["c"]], ["a", ["b"]], [["a"], "b"]])
def test_prompts_that_are_no_batches(prompts):
    with pytest.raises(ValueError, match="`prompts` must be texts, or lists of equally many texts"):
        measure(pair(), prompts)


def test_no_repeats():
    with pytest.raises(ValueError, match="`repeats` must be at least 1"):
        measure(pair(), PROMPTS, repeats=0)


def test_layers_with_a_window_keep_their_window():
    model = tiny_model("gemma3", "byte_level", 1)
    config = model.config.get_text_config()
    kinds = config.layer_types
    assert {"sliding_attention", "full_attention"} == set(kinds)
    long = 10 * config.sliding_window
    grown = instruments.kv_bytes(model, long + 1) - instruments.kv_bytes(model, long)
    assert grown * len(kinds) == kinds.count("full_attention") * instruments.kv_bytes(model, 1)


def test_a_variants_passes_plan_no_others(monkeypatch):
    """Each contender that changes our code has times of its own: no pass of it is counted among ours."""
    job = Workload(pair(), "She had a cat. " * 9, new_tokens=3).job(Combination((), 4, 1, 1, ("no-drafts",)))
    job.warm_up()
    seen, before, run = [], pass_costs._KNOWN, job.ensemble.run
    monkeypatch.setattr(job.ensemble, "run", lambda *call: seen.append(pass_costs._KNOWN) or run(*call))
    job.measure_once(0)
    assert seen == [before, job.ensemble._costs["no-drafts"]] and seen[0] is not seen[1]
    assert pass_costs._KNOWN is before


def test_layers_multiply_by_parts_where_several_threads_do(small_parts, monkeypatch):
    products = []
    place = "hf_adafuse.kernels.small_batch_linear.linear"
    monkeypatch.setattr(place, lambda x, *rest: products.append(x.shape) or linear(x, *rest))
    result = measure(pair(), PROMPTS[:1], new_tokens=4, repeats=1, against=[])
    assert len(products) > sum(result.forwards("ours"))
    products.clear()
    with variants.VARIANTS["no-kernel"]():
        measure(pair(), PROMPTS[:1], new_tokens=4, repeats=1, against=[])
    assert not products


@pytest.mark.slow
def test_other_methods_are_measured_with_the_words_that_they_write():
    result = measure(demo.load_pair(), QUESTIONS[:2], new_tokens=12, repeats=1, against=("greedy", *METHODS))
    assert result.contenders == ["ours", "greedy 1", "greedy 2", *METHODS]
    assert result.same_text == {"ours": True}
    for name in METHODS:
        output = fuse(demo.load_pair(), QUESTIONS[:2], AdaFuseConfig(method=name))
        words = sum(len(split_words("".join(one.text for one in rounds))) for rounds in output.rounds)
        assert [sample.num_words for sample in result.of(name)] == [words]
        assert result.words_per_second(name) == pytest.approx(words / result.seconds(name))
        assert sum(result.forwards(name)) > 0


@pytest.mark.slow
def test_compiled_contenders_record_nothing_once_they_are_warm(monkeypatch, accelerator):
    """Neither ours nor the members' own generation, on which a cache that moves would be lost time in each repeat."""
    graphs, compile_it = [], torch.compile

    def strict(function, mode=None):
        assert mode is None  # CUDA graphs are for CUDA
        graphs.append(Graphs())
        return compile_it(function, backend=graphs[-1], dynamic=True)

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", strict)
    job = Workload(pair(), "She had a cat, and the tree was big. " * 9, compiled=True, new_tokens=8).job(
        Combination((), 6, 1, 2, ("greedy",))
    )
    job.warm_up()
    job.measure_once(0)  # without the cache that is asked for in the first call, whose end is read for it
    recorded = [len(graph.recorded) for graph in graphs]
    assert all(map(is_compiled, job.ensemble.models)) and min(recorded) >= 4
    for repeat in (1, 2):
        job.measure_once(repeat)
    assert [len(graph.recorded) for graph in graphs] == recorded
    assert job.result.same_text == {"ours": True}


def test_a_compiled_member_without_keys_generates_by_itself_as_ever(monkeypatch):
    compile_it = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode=None: compile_it(function, backend="eager"))
    members = [pair()[0], (model_of("mamba"), TOKENIZERS["byte_level"]())]
    job = Workload(members, "She had a cat. " * 9, compiled=True, new_tokens=4).job(
        Combination((), 4, 1, 1, ("greedy",))
    )
    with torch.compiler.set_stance("force_eager"):
        job.warm_up()
        job.measure_once(0)
    assert job.result.contenders == ["ours", "greedy 1", "greedy 2"]
