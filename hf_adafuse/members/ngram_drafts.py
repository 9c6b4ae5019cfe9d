"""Drafts by n-gram lookup: what followed the last tokens earlier in the call is a guess at what follows now.

Prompt lookup decoding (Saxena 2023), over all that a member has read and written. Texts quote their prompt, repeat
themselves, and spell a word as before. A draft goes into a pass that runs anyway. A right draft saves a pass, and none
changes a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

from ..trees.backend import Backend
from ..trees.nodes import Node, leaves_of

# What came after the last three tokens, else after the last two, else after the last one.
_LENGTHS = (3, 2, 1)
# Most remembered n-grams, about 100 bytes each; beyond, the table is cleared.
_MOST_NGRAMS = 2**20


class NgramDrafts:
    """
    The drafts of one member, over all prompts of a call.

    Args:
        backend (`Backend`): its token trees.
        eos_ids (`list[int]`): they are not drafted.
        room_after (`Callable`): how many tokens the context holds after a node.
    """

    def __init__(self, backend: Backend, eos_ids: Iterable[int], room_after: Callable[[Node], float]) -> None:
        self._backend = backend
        self._eos_ids = set(eos_ids)
        self._room_after = room_after
        self._next: dict[tuple[int, ...], int] = {}
        self._vocab_size = math.inf
        # Per length: how often a guess was right, of how many; at first as good as a coin.
        self._record = {length: [1.0, 2.0] for length in _LENGTHS}

    def add_texts(self, texts: Iterable[Sequence[int]]) -> None:
        """Remember which tokens follow which in these texts. Later texts win over earlier ones."""
        for ids in texts:
            self._add(ids, 1)

    def add_end(self, prompt_index: int, ids: Sequence[int]) -> None:
        """Remember ids that were appended to a prompt's prefix."""
        last = self._last_ids(self._backend.trees[prompt_index].root)
        self._add([*last, *ids], len(last))

    def add_next_tokens(self, nodes: Iterable[Node]) -> None:
        """Take the most likely token after each of these nodes, which have just been read. It is remembered as what
        follows, and compared with a draft. The share of right drafts decides how many are made."""
        for node in nodes if self._backend.can_prefetch else ():
            last = self._last_ids(node)
            top = node.logprobs.top[0]
            self._vocab_size = node.logprobs.row.shape[-1]
            for length, record in self._record.items():
                if (guess := self._guess(last, length)) is not None:
                    record[0] += guess == top
                    record[1] += 1
            self._add([*last, top], len(last))

    def after(self, nodes: list[Node]) -> list[Node]:
        """Draft nodes below nodes that are to be read: first one below the end of each, then a second one, and so
        on."""
        chains = [self._chain(end) for end in leaves_of(nodes)]
        return [node for level in zip_longest(*chains) for node in level if node is not None]

    def _chain(self, node: Node) -> list[Node]:
        last = self._last_ids(node)
        nodes: list[Node] = []
        policy = self._backend.policy
        most = min(policy.longest_draft, self._room_after(node))
        lengths = [n for n, (right, of) in self._record.items() if right >= policy.least_right * of]
        while len(nodes) < most:
            found = (self._guess(last, length) for length in lengths)
            token = next((one for one in found if one is not None), None)
            if token is None or token in self._eos_ids or token >= self._vocab_size:
                break
            node = node.add_child(token)
            nodes.append(node)
            last.append(token)
        return nodes

    def _last_ids(self, node: Node) -> list[int]:
        return self._backend.trees[node.prompt_index].last_ids(node, max(_LENGTHS))

    def _guess(self, last: list[int], length: int) -> int | None:
        """The token that has come after the last `length` of these ids; `None` where it is not known, or there are
        fewer ids."""
        return self._next.get(tuple(last[-length:])) if length <= len(last) else None

    def _add(self, ids: Sequence[int], start: int) -> None:
        """Each token from `start` on follows those before it."""
        if not self._backend.can_prefetch:
            return
        if len(self._next) > _MOST_NGRAMS:
            self._next.clear()
        for end in range(start, len(ids)):
            for length in _LENGTHS:
                if length <= end:
                    self._next[tuple(ids[end - length : end])] = ids[end]
