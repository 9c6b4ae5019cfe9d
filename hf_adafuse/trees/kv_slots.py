"""Which column of the KV cache holds which token. `KVSlots` alone allocates and frees columns.

Each row of the cache holds the columns of one prompt, or of several:

    columns of a row    shared prefix | rest of prompt 0's prefix | of prompt 1's | nodes, where columns were free

That is so once prompts have been read, or after [`KVSlots.rearrange`]. Columns of what is committed later lie where
they were free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .nodes import Node

KVSlot = tuple[int, int]  # the row of the cache, and the column in it


class KVSlots:
    """
    Allocates the columns of a KV cache.

    Args:
        num_rows (`int`): the number of rows of the cache.
        num_shared (`int`, *optional*, defaults to 0): how many first tokens are the same in all prompts. Prompts in one
            row share the columns of these tokens.

    Attributes:
        num_rows (`int`): the number of rows of the cache that hold something.
        width (`int`): the end of the longest row. Free columns before it count.
        row_of (`dict[int, int]`): the row of each prompt.
        prefix (`dict[int, list[int]]`): per prompt, the columns of its settled tokens, in order.
    """

    def __init__(self, num_rows: int, num_shared: int = 0) -> None:
        self.num_shared = num_shared
        self.row_of: dict[int, int] = {}
        self.prefix: dict[int, list[int]] = {}
        # Per prompt, the columns of its computed nodes that are not settled.
        self._below: dict[int, dict[Node, int]] = {}
        self._clear([0] * num_rows)

    def _clear(self, ends: list[int]) -> None:
        self.num_rows = len(ends)
        self._ends = ends
        self._free = [list[int]() for _ in ends]  # per row, the columns before its end that hold nothing, ascending

    @property
    def width(self) -> int:
        return max(self._ends, default=0)

    @property
    def num_used(self) -> int:
        """The number of columns in use, over all rows."""
        return sum(self._ends) - sum(map(len, self._free))

    @property
    def num_distinct(self) -> int:
        """The number of columns that would be in use if all prompts were in one row."""
        copies = max(0, len({*self.row_of.values()}) - 1)
        return self.num_used - copies * self.num_shared

    @property
    def num_sharing(self) -> int:
        """The largest number of prompts that share a row."""
        return max(Counter(self.row_of.values()).values(), default=1)

    def add_prompt(self, prompt_index: int, row: int, columns: Iterable[int]) -> None:
        """Add a prompt whose tokens are in these columns of a row, which `allocate_columns` has allocated."""
        self.row_of[prompt_index] = row
        self.prefix[prompt_index] = list(columns)
        self._below[prompt_index] = {}

    def allocate_columns(self, row: int, number: int) -> list[int]:
        """Allocate `number` columns of a row: free ones first, then new ones at its end."""
        reused = self._free[row][:number]
        end = self._ends[row]
        self._free[row] = self._free[row][number:]
        self._ends[row] = end + number - len(reused)
        return [*reused, *range(end, self._ends[row])]

    def free_columns(self, row: int, columns: Iterable[int]) -> None:
        """Free these columns. Their keys and values are not cleared: the masks of later passes hide them, until the
        next node that takes a column overwrites them."""
        free = sorted([*self._free[row], *columns])
        while free and free[-1] == self._ends[row] - 1:
            self._ends[row] = free.pop()
        self._free[row] = free

    def allocate_for_nodes(self, nodes: list[Node]) -> list[int]:
        """Allocate a column for each of these nodes, whose prompts are in one row. Returns the columns."""
        columns = self.allocate_columns(self.row_of[nodes[0].prompt_index], len(nodes)) if nodes else []
        for node, column in zip(nodes, columns, strict=True):
            self._below[node.prompt_index][node] = column
        return columns

    def free_node(self, node: Node) -> None:
        """Free the column of a node below the prefix."""
        self.free_columns(self.row_of[node.prompt_index], [self._below[node.prompt_index].pop(node)])

    def above(self, node: Node) -> list[tuple[int, Node]]:
        """The columns of `node` and of its ancestors below the prefix."""
        below = self._below[node.prompt_index]
        return [(below[other], other) for other in node.lineage() if other in below]

    def promote(self, prompt_index: int, settled: list[Node], kept: Iterable[Node]) -> None:
        """Make the columns of newly settled nodes part of the prefix. Columns of kept nodes stay, and all others are
        freed."""
        below = self._below[prompt_index]
        self.prefix[prompt_index] += [below.pop(node) for node in settled]
        self._below[prompt_index] = {node: below.pop(node) for node in kept}
        self.free_columns(self.row_of[prompt_index], below.values())

    def drop(self, prompt_index: int) -> None:
        """Free the columns of a prompt."""
        row = self.row_of.pop(prompt_index)
        columns = self.held(prompt_index)
        del self.prefix[prompt_index], self._below[prompt_index]
        self.free_columns(row, columns[self.num_shared :] if row in self.row_of.values() else columns)

    def append_rows(self, others: KVSlots, num_common: int) -> None:
        """Append the rows of other prompts. The first `num_common` tokens are the same in both."""
        self.num_shared = min(self.num_shared, others.num_shared, num_common)
        self.row_of.update({prompt: self.num_rows + row for prompt, row in others.row_of.items()})
        self.prefix.update(others.prefix)
        self._below.update(others._below)
        self.num_rows += others.num_rows
        self._ends = [*self._ends, *others._ends]
        self._free = [*self._free, *others._free]

    def held(self, prompt_index: int) -> list[int]:
        """The columns of a prompt: those of its prefix, then those of the nodes below."""
        return [*self.prefix[prompt_index], *self._below[prompt_index].values()]

    def rearrange(self, rows: list[list[int]]) -> list[list[KVSlot]]:
        """
        Lay all columns out anew, without gaps.

        Args:
            rows (`list[list[int]]`): the prompts of each new row.

        Returns:
            per new row, where the content of its columns has been until now.
        """
        sources = []
        ends = []
        for row, prompts in enumerate(rows):
            shared = self.prefix[prompts[0]][: self.num_shared]
            places = [(self.row_of[prompts[0]], column) for column in shared]
            for prompt in prompts:
                places += [(self.row_of[prompt], column) for column in self.held(prompt)[len(shared) :]]
            end = len(shared)
            for prompt in prompts:
                end = self._move(prompt, row, end)
            sources.append(places)
            ends.append(end)
        self._clear(ends)
        return sources

    def _move(self, prompt_index: int, row: int, start: int) -> int:
        """Put a prompt's columns side by side from `start` on, but for those shared; returns their end."""
        middle = start + len(self.prefix[prompt_index]) - self.num_shared
        self.row_of[prompt_index] = row
        self.prefix[prompt_index] = [*range(self.num_shared), *range(start, middle)]
        nodes = self._below[prompt_index]
        self._below[prompt_index] = {node: column for column, node in enumerate(nodes, start=middle)}
        return middle + len(nodes)
