"""Compiled models: few shapes, and keys and values at addresses that stay. What a CUDA graph demands is demanded here
by a backend of torch.compile, on CPU.
"""

from __future__ import annotations

import copy
import gc
import threading
from dataclasses import replace

import pytest
import torch
from support.cases import assert_equal
from support.graphs import Graphs, is_static
from support.kinds import case_of
from support.tiny import tiny_model

from hf_adafuse import enable_adafuse
from hf_adafuse.trees.model_call import ModelCall
from hf_adafuse.trees.pass_costs import costs_of
from hf_adafuse.trees.pass_policy import Policy
from hf_adafuse.trees.static_shapes import StaticMemory, memory_of, static_size, uncompiled
from hf_adafuse.trees.tree_attention_backend import TreeAttentionBackend
from hf_adafuse.trees.tree_cache import TreeCache

CPU = torch.device("cpu")
HEAD_DIM = 8  # of the tiny llama


def shapes_of(graph):
    """Of the keys and values, over all that has been recorded."""
    shapes = [shape for _, of_inputs, _ in graph.recorded for shape in of_inputs]
    return {shape for shape in shapes if isinstance(shape, tuple) and shape[3:] == (HEAD_DIM,)}


def compiled(case, **options):
    """The case with compiled copies of its models, and what they are compiled by: a graph is all of a pass."""
    graphs = [Graphs() for _ in case.models]
    models = [enable_adafuse(copy.copy(model)) for model in case.models]
    for model, backend in zip(models, graphs):
        model.forward = torch.compile(model.forward, backend=backend, fullgraph=True, **options)
    return replace(case, models=models), graphs


def sequences(case):
    """What the models give, called as they are."""
    _, ids, mask = case.main_ids()
    return case.models[0].generate(
        input_ids=ids,
        attention_mask=mask,
        tokenizer=case.tokenizers[0],
        assistant_models=case.models[1:],
        assistant_tokenizers=case.tokenizers[1:],
        adafuse_config=case.config,
        max_new_tokens=case.max_new_tokens,
        do_sample=False,
    )


@pytest.fixture(autouse=True)
def _nothing_compiled():
    """torch compiles a function eight times at most, for all models that share it."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch"), [("llama", 1), ("gemma3", 1), ("gpt2", 3)])
def test_compiled_models_equal_the_oracle_with_few_graphs(name, batch, look_ahead, accelerator):
    look_ahead(2, is_flat=True)
    plain = case_of(tiny_model(name, "byte_level"), batch=batch, n=20)
    case, graphs = compiled(plain, dynamic=False)
    assert_equal(plain)
    assert torch.equal(sequences(case), plain.fast().sequences)
    for graph in graphs:  # of 1, 2, 4 ... tokens, with 128 columns: a compiled function each, and no other address
        assert 1 < len(graph.recorded) == graph.num_compiled <= 6
        assert graph.num_runs == graph.num_steps >= 8


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in_place", "layers"])
def test_a_model_may_be_compiled_otherwise(how, accelerator):
    """As modules are, or each of its layers for itself: what one gives must last until the next has read it."""
    plain = case_of(tiny_model("llama", "byte_level"), batch=1, n=12)
    graphs, models = Graphs(), [enable_adafuse(copy.deepcopy(model)) for model in plain.models]
    for model in models:
        for module in [model] if how == "in_place" else model.model.layers:
            module.compile(backend=graphs, fullgraph=True, dynamic=True)
    assert torch.equal(sequences(replace(plain, models=models)), plain.fast().sequences)
    num_parts = 1 if how == "in_place" else len(models[0].model.layers)
    assert graphs.num_runs == num_parts * graphs.num_steps > 8


@pytest.mark.slow
def test_on_cpu_a_pass_is_not_filled_up():
    """There it costs by the token: what torch compiles is for any number of them."""
    plain = case_of(tiny_model("llama", "byte_level"), batch=1, n=12)
    case, graphs = compiled(plain)
    assert torch.equal(sequences(case), plain.fast().sequences)
    for graph in graphs:
        masks = {shape for _, shapes, _ in graph.recorded for shape in shapes if str(shape).startswith("(1, 1,")}
        assert {width for *_, width in masks} == {128} and {size for *_, size, _ in masks} - {1, 2, 4, 8, 16, 32}
        assert graph.num_compiled <= 4


def assert_recorded_once(plain):
    """Nothing more is recorded when what these models give has been decoded again; returns what they recorded."""
    case, graphs = compiled(plain, dynamic=True)
    assert torch.equal(sequences(case), plain.fast().sequences)
    recorded = [len(graph.recorded) for graph in graphs]
    sequences(case)
    assert [len(graph.recorded) for graph in graphs] == recorded
    return graphs


@pytest.mark.slow
def test_nothing_is_recorded_when_prompts_in_rows_of_their_own_are_decoded_again(monkeypatch, accelerator):
    monkeypatch.setattr(Policy, "most_shared_columns", 40)
    graphs = assert_recorded_once(case_of(tiny_model("llama", "byte_level"), batch=3, n=12))
    assert all(3 in {shape[0] for shape in shapes_of(graph)} for graph in graphs)


@pytest.mark.slow
def test_nothing_is_recorded_when_a_text_that_outgrew_its_tensors_is_decoded_again(monkeypatch, accelerator):
    monkeypatch.setattr(Policy, "least_static_columns", 16)
    graphs = assert_recorded_once(case_of(tiny_model("llama", "byte_level"), batch=1, n=32))
    assert [{shape[2] for shape in shapes_of(graph)} for graph in graphs] == [{16, 32}, {32, 64}]


def test_what_fills_a_pass_up_holds_no_columns(accelerator):
    case, _ = compiled(case_of(tiny_model("llama", "byte_level")))
    backend = TreeAttentionBackend(case.models[0], CPU)
    (root,) = backend.prefill([[5, 6, 7]])
    backend.run(root.add_path([8, 9, 10]))
    assert (backend.slots.num_used, backend.num_tokens) == (6, 6)


@pytest.mark.slow
def test_rows_go_when_half_of_them_are_empty(accelerator, monkeypatch):
    monkeypatch.setattr(Policy, "most_shared_columns", 0)
    case, _ = compiled(case_of(tiny_model("llama", "byte_level")))
    backend, plain = [TreeAttentionBackend(model, CPU) for model in (case.models[0], tiny_model("llama", "byte_level"))]
    found = []
    for one in (backend, plain):
        roots, rows, numbers = one.prefill([[5, 6], [7, 8, 9], [10], [11, 12]]), [], []
        for finished in (set(), {0}, {2}, {3}):
            one.drop(finished)
            nodes = [roots[index].add_path([20 + len(numbers), 30])[-1] for index in one.active]
            one.run(nodes)
            rows.append(one.slots.num_rows)
            numbers.append(torch.stack([node.logits for node in nodes]))
        found.append((rows, numbers))
    assert [rows for rows, _ in found] == [[4, 4, 2, 1], [4, 3, 2, 1]]
    for ours, expected in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(ours, expected)


def test_logits_outlast_the_next_pass():
    case, _ = compiled(case_of(tiny_model("llama", "byte_level")))
    call, plain = [ModelCall(model) for model in (case.models[0], tiny_model("llama", "byte_level"))]
    ids = [torch.tensor([[5, 6, 7]]), torch.tensor([[8, 9, 10]])]
    found = [call(one, use_memory=False)[0] for one in ids]
    for logits, one in zip(found, ids):
        torch.testing.assert_close(logits, plain(one, use_memory=False)[0])


def test_what_a_compiled_pass_costs_is_not_taken_from_the_clock():
    """The first ones take seconds: they are compiled."""
    case, _ = compiled(case_of(tiny_model("llama", "byte_level")))
    plain = copy.copy(tiny_model("llama", "byte_level"))
    for model, is_measured in ((plain, True), (case.models[0], False)):
        costs = costs_of(model, CPU)
        before = costs.seconds(1)
        for _ in range(8):
            with costs.measured(1):
                pass
        assert (costs.seconds(1) != before) == is_measured


# What is kept


def cache_of(cells, num_layers=2):
    cache = TreeCache(len(cells))
    keys = torch.tensor(cells, dtype=torch.float32)[:, None, :, None].expand(-1, 2, -1, 3)
    cache.fill([(keys + layer, -keys - layer) for layer in range(num_layers)])
    return cache


def assert_holds(cache, cells):
    expected = cache_of(cells).tensors()
    for tensor, columns in zip(cache.tensors(), expected, strict=True):
        width = len(cells[0])
        assert torch.equal(tensor[:, :, :width], columns[:, :, :width])
        assert not tensor[:, :, width:].any()


def test_a_cache_moves_into_tensors_of_the_width():
    cache, memory = cache_of([[1, 2, 3], [4, 5, 6]]), StaticMemory()
    assert memory.hold(cache, 8) == 8
    assert {tensor.shape for tensor in cache.tensors()} == {(2, 2, 8, 3)} and all(map(is_static, cache.tensors()))
    assert_holds(cache, [[1, 2, 3], [4, 5, 6]])


def test_a_cache_stays_where_it_is_until_it_needs_more():
    cache, memory = cache_of([[1, 2, 3]]), StaticMemory()
    memory.hold(cache, 8)
    tensors = cache.tensors()
    for width in (8, 4):
        assert memory.hold(cache, width) == 8 and cache.tensors()[0] is tensors[0]
    assert memory.hold(cache, 16) == 16
    assert cache.tensors()[0] is not tensors[0]
    assert_holds(cache, [[1, 2, 3]])


def test_a_cache_laid_out_anew_moves_back():
    cache, memory = cache_of([[1, 2, 3]]), StaticMemory()
    memory.hold(cache, 8)
    tensors = cache.tensors()
    cache.rearrange([[(0, 2), (0, 0)]])
    assert cache.tensors()[0] is not tensors[0]
    memory.hold(cache, 8)
    assert [id(tensor) for tensor in cache.tensors()] == [id(tensor) for tensor in tensors]
    assert_holds(cache, [[3, 1]])


def test_the_next_cache_has_the_tensors_of_one_that_is_gone():
    """At once, not when garbage is collected; and nothing of what it held."""
    gc.disable()
    try:
        cache, memory = cache_of([[1, 2, 3]]), StaticMemory()
        memory.hold(cache, 8)
        addresses = [tensor.data_ptr() for tensor in cache.tensors()]
        cache.tensors()[0].fill_(torch.nan)
        cache = cache_of([[7]])
        memory.hold(cache, 8)
        assert [tensor.data_ptr() for tensor in cache.tensors()] == addresses
        assert_holds(cache, [[7]])
    finally:
        gc.enable()


def test_the_next_cache_has_the_tensors_of_one_that_has_left():
    memory, caches = StaticMemory(), [cache_of([[1, 2, 3]]), cache_of([[7]])]
    memory.hold(caches[0], 8)
    memory.release(caches[1])  # nobody's
    memory.release(caches[0])
    memory.hold(caches[1], 8)
    assert caches[1].tensors()[0] is caches[0].tensors()[0]
    assert_holds(caches[1], [[7]])


def test_nobody_moves_in_before_all_is_out(monkeypatch):
    """Two threads with one model: one outgrows its tensors while the other looks for some."""
    memory, caches, move = StaticMemory(), [cache_of([[1, 2]]), cache_of([[3, 4]])], TreeCache.move
    memory.hold(caches[0], 8)
    other = threading.Thread(target=memory.hold, args=(caches[1], 8))

    def slow_move(cache, tensors):
        if cache is caches[0]:
            other.start()
            other.join(0.2)
        move(cache, tensors)

    monkeypatch.setattr(TreeCache, "move", slow_move)
    memory.hold(caches[0], 16)
    other.join()
    assert_holds(caches[0], [[1, 2]])
    assert_holds(caches[1], [[3, 4]])


def test_what_was_made_in_inference_mode_is_left_outside():
    memory, cache = StaticMemory(), cache_of([[1, 2]])
    with torch.inference_mode():
        memory.hold(cache, 8)
    memory.hold(cache, 8)
    cache.open([[2]], 8)
    cache.update(torch.ones(1, 2, 1, 3), torch.ones(1, 2, 1, 3), 0)
    assert cache.tensors()[0][0, 0, :3, 0].tolist() == [1, 2, 1]


def test_a_cache_that_holds_nothing_needs_no_tensors():
    memory, cache = StaticMemory(), TreeCache(1)
    assert [memory.hold(cache, 8) for _ in range(2)] == [8, 8]


def test_two_caches_never_share_tensors():
    memory, caches = StaticMemory(), [cache_of([[1, 2]]), cache_of([[3, 4]])]
    for _ in range(2):
        for cache in caches:
            memory.hold(cache, 8)
    assert_holds(caches[0], [[1, 2]])
    assert_holds(caches[1], [[3, 4]])


def test_tensors_fit_in_all_but_their_width():
    memory, cache = StaticMemory(), cache_of([[1, 2]])
    memory.hold(cache, 8)
    first = cache.tensors()[0].data_ptr()
    del cache
    for other in (cache_of([[1], [2]]), cache_of([[1, 2]], num_layers=3)):
        memory.hold(other, 8)
        assert other.tensors()[0].data_ptr() != first
    with torch.inference_mode():  # whose tensors cannot be written outside
        other = cache_of([[5]])
        memory.hold(other, 8)
        assert other.tensors()[0].data_ptr() != first
    del other
    memory.hold(again := cache_of([[6]]), 8)
    assert again.tensors()[0].data_ptr() == first


def test_tensors_of_few_shapes_are_kept():
    memory, cache = StaticMemory(), cache_of([[1]])
    memory.hold(cache, 1)
    tensors, shapes = [cache.tensors()[0]], range(2, 12)
    for width in shapes:
        memory.hold(cache, width)
        tensors.append(cache.tensors()[0])
    kept = [any(tensor is static.tensors[0] for static in memory._held) for tensor in tensors]
    assert kept == [False] * 3 + [True] * 8


def test_a_model_has_its_memory_as_long_as_it_is_compiled():
    case, _ = compiled(case_of(tiny_model("llama", "byte_level")))
    model = case.models[0]
    assert memory_of(model, is_kept=True) is memory_of(model, is_kept=True) is not None
    assert None is not memory_of(model, is_kept=False) is not memory_of(model, is_kept=True)
    assert memory_of(tiny_model("llama", "byte_level"), is_kept=True) is None


@pytest.mark.parametrize(("number", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (33, 64)])
def test_sizes_double(number, size):
    assert static_size(number) == size
    assert static_size(number, 128) == 128
    assert static_size(100 * number, 100) == 100 * size


def test_nothing_is_compiled_while_any_thread_says_so():
    graphs, model = [], torch.compile(lambda x: x + 1, backend=lambda module, _: graphs.append(1) or module)
    entered, leave = threading.Event(), threading.Event()

    def stay():
        with uncompiled:
            entered.set()
            leave.wait(60)

    other = threading.Thread(target=stay)
    with uncompiled:
        other.start()
        assert entered.wait(60)
        model(torch.ones(1))
    model(torch.ones(2))
    leave.set()
    other.join()
    assert graphs == []
    model(torch.ones(3))
    assert graphs == [1]
