"""The tensors of a batch of trees: numbers that say where they are, written, gathered and moved."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf_adafuse.trees.kv_slots import KVSlots
from hf_adafuse.trees.nodes import Node
from hf_adafuse.trees.tree_cache import TreeCache

pytestmark = pytest.mark.fast

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 3, 2


def numbers(cells, layer):
    """Keys whose every number says where it is: `cells` are rows of numbers, one for each column."""
    heads, dims = torch.arange(NUM_HEADS)[:, None, None] / 10, torch.arange(HEAD_DIM) / 100
    return torch.tensor(cells, dtype=torch.float64)[:, None, :, None] + heads + dims + 1000 * layer


def state(cells):
    """Keys and values of both layers."""
    return [(numbers(cells, layer), -numbers(cells, layer)) for layer in range(NUM_LAYERS)]


def write(cache, columns, width, cells):
    """One pass, as a model makes it; returns what each layer sees."""
    cache.open(columns, width)
    return [cache.update(keys, values, layer) for layer, (keys, values) in enumerate(state(cells))]


def assert_holds(layers, cells):
    layers = list(layers)
    assert len(layers) == NUM_LAYERS
    for (keys, values), (expected_keys, expected_values) in zip(layers, state(cells)):
        torch.testing.assert_close(keys, expected_keys, rtol=0, atol=0)
        torch.testing.assert_close(values, expected_values, rtol=0, atol=0)


def contents(cache):
    return [(layer.keys[:, :, : cache.width], layer.values[:, :, : cache.width]) for layer in cache.layers]


def filled(cells):
    cache = TreeCache(len(cells))
    cache.fill(state(cells))
    return cache


def test_a_cache_begins_with_what_it_is_given():
    cache = filled([[10, 11, 12], [20, 21, 22]])
    assert (cache.width, len(cache.layers)) == (3, NUM_LAYERS)
    assert_holds(contents(cache), [[10, 11, 12], [20, 21, 22]])


def test_a_cache_may_begin_empty():
    cache = TreeCache(2)
    cache.fill([])
    assert (cache.width, len(cache.layers)) == (0, 0)
    assert_holds(write(cache, [[0, 1], [0, 1]], 2, [[10, 11], [20, 21]]), [[10, 11], [20, 21]])


@pytest.mark.parametrize("cells", [[[10, 11, 12]], [[10, 11, 12], [20, 21, 22]]], ids=["one_row", "two_rows"])
def test_a_pass_writes_into_its_columns_and_sees_all(cells):
    cache = filled(cells)
    new = [[number + 5, number + 6] for number, *_ in cells]
    columns = [[1, 4], [4, 0]][: len(cells)]
    seen = write(cache, columns, 5, new)
    assert cache.is_written and cache.get_seq_length() == 3 and cache.width == 5
    expected = state([[10, 15, 12, 0, 16], [26, 21, 22, 0, 25]][: len(cells)])
    for found, layer in zip(seen, expected):
        for tensor, numbers_there in zip(found, layer):
            numbers_there[:, :, 3] = 0  # nothing has been written there, NaN neither
            torch.testing.assert_close(tensor, numbers_there, rtol=0, atol=0)


@pytest.mark.parametrize("cells", [[[10, 11, 12]], [[10, 11, 12], [20, 21, 22]]], ids=["one_row", "two_rows"])
def test_a_cache_grows_as_far_as_it_must(cells):
    cache = filled(cells)
    for width in range(4, 60):
        seen = write(cache, [[width - 1]] * len(cells), width, [[row[0] + width] for row in cells])
    # At a width of n, column n - 1 was written: with n more than the number in column 0.
    assert_holds(seen, [[*row, *range(row[0] + 4, row[0] + 60)] for row in cells])
    assert all(layer.keys.shape[2] < 70 for layer in cache.layers)  # little more than what it holds


@pytest.mark.parametrize(("num_rows", "num_trees"), [(1, 8), (4, 4)], ids=["one_row", "a_row_each"])
def test_what_several_trees_hold_is_seldom_copied(num_rows, num_trees):
    """Each adds a column a pass; of a tree alone four come at a time."""
    alone, cache = filled([[10] * 20]), filled([[10] * 20] * num_trees)
    rows = [list(range(row, num_trees, num_rows)) for row in range(num_rows)]
    cache.num_sharing = len(rows[0])
    cache.rearrange([[(tree, column) for tree in trees for column in range(20)] for trees in rows])
    for one, added in ((alone, 1), (cache, len(rows[0]))):
        tensors, num_rows = [], one.num_rows
        for _ in range(40):
            columns = list(range(one.width, one.width + added))
            write(one, [columns] * num_rows, one.width + added, [columns] * num_rows)
            tensors += [one.layers[0].keys] if not tensors or one.layers[0].keys is not tensors[-1] else []
        assert len(tensors) == (1 + 40 // 5 if one is alone else 1 + 40 // 9)
        assert tensors[-1].shape[2] <= one.width + 8 * len(rows[0])


def test_many_short_trees_have_no_more_to_spare_than_half_of_what_they_hold():
    cache = filled([[10, 11]] * 300)
    cache.num_sharing = 300
    cache.rearrange([[(tree, column) for tree in range(300) for column in range(2)]])
    assert cache.layers[0].keys.shape[2] == 900


def test_a_cache_that_was_not_written_says_so():
    cache = filled([[10, 11]])
    cache.open([[2]], 3)
    assert not cache.is_written


def test_what_is_gathered_is_what_was_there():
    cache = filled([[10, 11, 12], [20, 21, 22], [30, 31, 32]])
    assert_holds(cache.gather([[(2, 1)], [(0, 0)]]), [[31], [10]])
    assert_holds(cache.gather([[(0, 2), (1, 0), (0, 2)]]), [[12, 20, 12]])


def test_what_is_gathered_of_one_row_is_what_was_there():
    cache = filled([[10, 11, 12, 13]])
    assert_holds(cache.gather([[(0, 3), (0, 0)], [(0, 1), (0, 1)]]), [[13, 10], [11, 11]])


def test_what_is_gathered_is_a_copy():
    cache = filled([[10, 11]])
    gathered = list(cache.gather([[(0, 0), (0, 1)]]))
    cache.layers[0].keys.zero_()
    assert_holds(gathered, [[10, 11]])


@pytest.mark.parametrize(
    ("cells", "sources", "expected"),
    [
        (
            [[10, 11, 12], [20, 21, 22]],
            [[(1, 2), (1, 0), (0, 1), (0, 0), (1, 1)]],
            [[22, 20, 11, 10, 21]],
        ),
        ([[10, 11, 12, 13]], [[(0, 3), (0, 1)], [(0, 0), (0, 2)]], [[13, 11], [10, 12]]),
        ([[10, 11], [20, 21]], [[(0, 0), (0, 1)]], [[10, 11]]),
        ([[10, 11], [20, 21], [30, 31]], [[(2, 0)], [(1, 1)]], [[30], [21]]),
    ],
    ids=["into_one_row", "out_of_one_row", "without_a_row", "fewer_rows"],
)
def test_rows_are_made_of_the_columns_at_their_places(cells, sources, expected):
    cache = filled(cells)
    cache.rearrange(sources)
    assert (cache.num_rows, cache.width) == (len(expected), len(expected[0]))
    assert_holds(contents(cache), expected)


def test_a_shorter_row_holds_its_columns_first():
    cache = filled([[10, 11, 12], [20, 21, 22]])
    cache.rearrange([[(1, 1)], [(0, 2), (0, 0), (1, 0)]])
    assert_holds([(keys[:1, :, :1], values[:1, :, :1]) for keys, values in contents(cache)], [[21]])
    assert_holds([(keys[1:], values[1:]) for keys, values in contents(cache)], [[12, 10, 20]])


def test_a_cache_goes_on_after_it_was_laid_out_anew():
    cache = filled([[10, 11, 12], [20, 21, 22]])
    cache.rearrange([[(1, 2), (0, 0)]])
    assert cache.num_rows == 1
    assert_holds(write(cache, [[3, 2]], 4, [[50, 51]]), [[22, 10, 51, 50]])
    assert cache.get_seq_length() == 2


@pytest.mark.parametrize("width", [4, 40])
def test_columns_of_another_cache_are_appended(width):
    cache, other = filled([[10, 11, 12]]), DynamicCache()
    for layer, (keys, values) in enumerate(state([[50, 51, 52], [60, 61, 62]])):
        other.update(keys, values, layer)
    cache.append(other, [(1, 2), (0, 0)], [3, 1], width)
    assert (cache.length, cache.width) == (3, width)
    assert_holds([(keys[:, :, :4], values[:, :, :4]) for keys, values in contents(cache)], [[10, 50, 12, 62]])
    assert not any(tensor[:, :, 4:].any() for layer in contents(cache) for tensor in layer)


def chain(prompt_index, length):
    """A chain of nodes below nothing."""
    top = Node(0, None, prompt_index, 0)
    return [top, *top.add_path(range(1, length))]


def test_columns_and_tensors_agree():
    """What `rearrange` of columns says is what `rearrange` of the tensors does."""
    columns, cache = KVSlots(2), filled([[10, 11, 12], [20, 21, 22]])
    for prompt_index in range(2):
        columns.add_prompt(prompt_index, prompt_index, columns.allocate_columns(prompt_index, 3))
    first, second = chain(0, 2), chain(1, 2)
    write(
        cache,
        [columns.allocate_for_nodes(first), columns.allocate_for_nodes(second)],
        columns.width,
        [[50, 51], [60, 61]],
    )
    columns.promote(0, first[1:], [])  # the other is free: a hole
    columns.promote(1, second[:1], second[1:])
    cache.rearrange(columns.rearrange([[1, 0]]))
    assert_holds(contents(cache), [[20, 21, 22, 60, 61, 10, 11, 12, 51]])
    assert columns.prefix == {1: [0, 1, 2, 3], 0: [5, 6, 7, 8]} and columns.width == cache.width == 9
