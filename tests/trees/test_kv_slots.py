"""Columns of a cache, walked at random beside a naive table of what is where."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from hf_adafuse.trees.kv_slots import KVSlots
from hf_adafuse.trees.nodes import Node

pytestmark = pytest.mark.fast


def path(prompt_index, length):
    """A chain of nodes below nothing."""
    top = Node(0, None, prompt_index, 0)
    return [top, *top.add_path(range(1, length))]


def one_prompt(length=3):
    columns = KVSlots(1)
    columns.add_prompt(0, 0, columns.allocate_columns(0, length))
    return columns


def test_at_first_nothing_is_held():
    columns = KVSlots(2)
    assert (columns.num_rows, columns.width, columns.num_used) == (2, 0, 0)
    assert KVSlots(0).width == 0


def test_the_first_free_columns_are_taken():
    columns = KVSlots(2)
    assert columns.allocate_columns(0, 5) == [0, 1, 2, 3, 4]
    columns.free_columns(0, [3, 1])
    assert (columns.width, columns.num_used) == (5, 3)
    assert columns.allocate_columns(0, 3) == [1, 3, 5]  # two holes, then the end
    assert columns.allocate_columns(1, 2) == [0, 1]  # rows do not know each other
    assert columns.allocate_columns(1, 0) == []
    assert (columns.width, columns.num_used) == (6, 8)


def test_the_end_moves_back_over_free_columns():
    columns = KVSlots(1)
    columns.allocate_columns(0, 6)
    columns.free_columns(0, [2, 3])
    columns.free_columns(0, [5])
    assert (columns.width, columns.num_used) == (5, 3)  # column 4 is held
    columns.free_columns(0, [4])
    assert (columns.width, columns.num_used) == (2, 2)
    assert columns.allocate_columns(0, 2) == [2, 3]


def test_a_prompt_without_its_padding():
    columns = KVSlots(1)
    taken = columns.allocate_columns(0, 4)
    columns.add_prompt(7, 0, taken[2:])
    columns.free_columns(0, taken[:2])
    assert columns.prefix == {7: [2, 3]} and columns.row_of == {7: 0}
    assert (columns.width, columns.num_used) == (4, 2)
    assert columns.allocate_for_nodes(path(7, 3)) == [0, 1, 4]


def test_nodes_are_placed_in_order_and_found_from_below():
    columns, nodes = one_prompt(), path(0, 4)
    assert columns.allocate_for_nodes(nodes[1:3]) == [3, 4]
    assert columns.above(nodes[3]) == [(3, nodes[1]), (4, nodes[2])]  # itself has none, nor has the first
    assert columns.above(nodes[1]) == [(3, nodes[1])]
    assert columns.held(0) == [0, 1, 2, 3, 4]
    assert columns.allocate_for_nodes([]) == []


def test_what_is_settled_joins_the_prefix_and_the_rest_is_free():
    columns, nodes = one_prompt(), path(0, 3)
    dead, late = nodes[0].add_child(9), nodes[2].add_child(8)
    assert columns.allocate_for_nodes([dead, *nodes]) == [3, 4, 5, 6]
    columns.promote(0, nodes[:2], [nodes[2]])
    assert columns.prefix[0] == [0, 1, 2, 4, 5]
    assert columns.held(0) == [0, 1, 2, 4, 5, 6]
    assert columns.above(late) == [(6, nodes[2])]
    assert (columns.width, columns.num_used) == (7, 6)
    assert columns.allocate_for_nodes([late]) == [3]
    columns.promote(0, [nodes[2]], [late])
    assert columns.prefix[0] == [0, 1, 2, 4, 5, 6]  # in the order of the text
    columns.promote(0, [late], [])
    assert columns.prefix[0] == [0, 1, 2, 4, 5, 6, 3]


def test_a_prompt_that_is_gone_leaves_its_columns_to_the_others():
    columns = KVSlots(1)
    for prompt_index in range(2):
        columns.add_prompt(prompt_index, 0, columns.allocate_columns(0, 2))
    columns.allocate_for_nodes(path(0, 2))
    columns.drop(0)
    assert columns.row_of == {1: 0} and columns.prefix == {1: [2, 3]}
    assert (columns.width, columns.num_used) == (4, 2)
    assert columns.allocate_for_nodes(path(1, 3)) == [0, 1, 4]


def test_rows_are_laid_out_anew_without_holes():
    columns = KVSlots(3)
    for prompt_index in range(3):
        columns.add_prompt(
            prompt_index, prompt_index, columns.allocate_columns(prompt_index, 3 + prompt_index)[prompt_index:]
        )
        columns.free_columns(prompt_index, range(prompt_index))  # as if left-padded
    nodes = path(2, 2)
    columns.allocate_for_nodes(nodes)  # into 0 and 1, the columns of the padding
    sources = columns.rearrange([[2, 0], [1]])
    assert sources == [[(2, 2), (2, 3), (2, 4), (2, 0), (2, 1), (0, 0), (0, 1), (0, 2)], [(1, 1), (1, 2), (1, 3)]]
    assert columns.row_of == {2: 0, 0: 0, 1: 1}
    assert columns.prefix == {2: [0, 1, 2], 0: [5, 6, 7], 1: [0, 1, 2]}
    assert columns.above(nodes[1]) == [(3, nodes[0]), (4, nodes[1])]
    assert (columns.num_rows, columns.width, columns.num_used) == (2, 8, 11)
    assert columns.allocate_columns(1, 1) == [3]


@dataclass
class Table:
    """The naive model: what each place of the cache holds, and what each prompt has."""

    content: dict = field(default_factory=dict)  # by place: what is there
    prefix: dict = field(default_factory=dict)  # by prompt: what must be in its prefix, in order
    nodes: dict = field(default_factory=dict)  # by prompt: those that have a column below the prefix
    ends: dict = field(default_factory=dict)  # by prompt: the node to go on from

    def first_free(self, row, number):
        held = {column for at, column in self.content if at == row}
        return [column for column in range(len(held) + number) if column not in held][:number]

    def forget(self, things):
        self.content = {place: thing for place, thing in self.content.items() if thing not in things}


class Walk:
    """Random operations on columns and, the naive way, on a table."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        num_prompts = self.rng.randint(1, 4)
        self.columns, self.table = KVSlots(num_prompts), Table()
        width = self.rng.randint(4, 9)
        for prompt_index in range(num_prompts):
            pad = self.rng.randint(0, 3)
            taken = self.columns.allocate_columns(prompt_index, width)
            assert taken == list(range(width))
            self.columns.add_prompt(prompt_index, prompt_index, taken[pad:])
            self.columns.free_columns(prompt_index, taken[:pad])
            texts = [f"{prompt_index}: {column}" for column in taken[pad:]]
            self.table.content |= {(prompt_index, column): text for column, text in zip(taken[pad:], texts)}
            self.table.prefix[prompt_index], self.table.nodes[prompt_index] = texts, []
            self.table.ends[prompt_index] = Node(0, None, prompt_index, width)

    def prompts(self):
        return sorted(self.table.prefix)

    def place(self):
        """New nodes of some prompts of one row."""
        row = self.columns.row_of[self.rng.choice(self.prompts())]
        new = []
        for prompt_index in self.prompts():
            if self.columns.row_of[prompt_index] == row:
                for _ in range(self.rng.randint(0, 3)):
                    places = [self.table.ends[prompt_index], *self.table.nodes[prompt_index]]
                    parent = self.rng.choice(places)
                    new.append(parent.add_child(len(parent.children)))
                    self.table.nodes[prompt_index].append(new[-1])
        expected = self.table.first_free(row, len(new))
        assert self.columns.allocate_for_nodes(new) == expected
        self.table.content |= {(row, column): node for column, node in zip(expected, new)}

    def take(self):
        """Filler: columns that are taken and given back."""
        row = self.rng.randrange(self.columns.num_rows)
        expected = self.table.first_free(row, self.rng.randint(0, 4))
        assert self.columns.allocate_columns(row, len(expected)) == expected
        self.columns.free_columns(row, self.rng.sample(expected, len(expected)))

    def settle(self):
        """Some steps down the tree; some of what is off the path goes."""
        prompt_index = self.rng.choice(self.prompts())
        nodes, node, settled = self.table.nodes[prompt_index], self.table.ends[prompt_index], []
        while (below := [child for child in node.children.values() if child in nodes]) and self.rng.random() < 0.7:
            node = self.rng.choice(below)
            settled.append(node)
        kept = [other for other in nodes if other not in settled and self.rng.random() < 0.6]
        self.columns.promote(prompt_index, settled, kept)
        self.table.forget([other for other in nodes if other not in settled and other not in kept])
        self.table.prefix[prompt_index] += settled
        self.table.nodes[prompt_index], self.table.ends[prompt_index] = kept, node

    def drop(self):
        if len(self.prompts()) > 1:
            prompt_index = self.rng.choice(self.prompts())
            self.columns.drop(prompt_index)
            self.table.forget(self.table.prefix.pop(prompt_index))
            self.table.forget(self.table.nodes.pop(prompt_index))

    def rearrange(self):
        """Each prompt into a row, at random; the content moves by what is said to be its source."""
        prompts = self.prompts()
        self.rng.shuffle(prompts)
        rows = [[] for _ in range(self.rng.randint(1, len(prompts)))]
        for number, prompt_index in enumerate(prompts):
            rows[number if number < len(rows) else self.rng.randrange(len(rows))].append(prompt_index)
        old = self.table.content
        sources = self.columns.rearrange(rows)
        self.table.content = {
            (row, column): old[place] for row, places in enumerate(sources) for column, place in enumerate(places)
        }
        assert sorted(place for places in sources for place in places) == sorted(old)  # each once, none lost
        assert [self.columns.row_of[prompt] for row in rows for prompt in row] == [
            number for number, row in enumerate(rows) for _ in row
        ]
        assert self.columns.num_used == sum(map(len, sources))
        assert self.columns.width == max(map(len, sources))  # no holes

    def check(self):
        columns, content = self.columns, self.table.content
        held = [(columns.row_of[prompt], column) for prompt in self.prompts() for column in columns.held(prompt)]
        assert len(set(held)) == len(held)  # no column twice
        assert set(held) == set(content)
        assert columns.num_used == len(content)
        assert columns.width == 1 + max(column for _, column in content)
        assert sorted(columns.prefix) == sorted(columns.row_of) == self.prompts()
        for prompt_index in self.prompts():
            row = columns.row_of[prompt_index]
            assert [content[row, column] for column in columns.prefix[prompt_index]] == self.table.prefix[prompt_index]
            for node in self.table.nodes[prompt_index]:
                seen = columns.above(node)
                placed = [other for other in node.lineage() if other in self.table.nodes[prompt_index]]
                assert [other for _, other in seen] == placed
                assert [content[row, column] for column, _ in seen] == placed


@pytest.mark.parametrize("seed", range(60))
def test_a_random_walk(seed):
    walk = Walk(seed)
    walk.check()
    steps = [walk.place] * 6 + [walk.settle] * 3 + [walk.take] * 2 + [walk.rearrange] * 2 + [walk.drop]
    for step in walk.rng.choices(steps, k=60):
        step()
        walk.check()
