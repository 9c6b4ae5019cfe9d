"""What a member reads off logits after its processors: each text once, what is forbidden only where it is committed."""

from __future__ import annotations

import math

import pytest
import torch

from hf_adafuse.members import logits_reader
from hf_adafuse.members.logits_reader import LogitsReader
from hf_adafuse.members.processors import ProcessorStep, PromptProcessors
from hf_adafuse.trees.nodes import TokenTree

PROMPT = [1, 2]
SIZE = 8


class Odd:
    """Lets only odd ids come next; keeps the texts that it was asked about."""

    def __init__(self, seen):
        self.seen = seen

    def __deepcopy__(self, memo):
        return type(self)(self.seen)

    def __call__(self, ids, scores):
        self.seen += ids.tolist()
        scores[:, ::2] = -math.inf
        return scores


class OddWithoutState(Odd):
    is_function_of_ids = True


class Tree:
    """One prompt's tree with its reader; what a backend would do is done by hand."""

    def __init__(self, cls):
        self.tree, self.seen = TokenTree(0, list(PROMPT)), []
        processors = PromptProcessors([ProcessorStep(cls(self.seen), [PROMPT])], len(PROMPT))
        self.reader = LogitsReader([processors], 2, self.tree.ids_to)
        self.read(self.tree.root)

    def read(self, *nodes, **kwargs):
        for node in nodes:
            node.is_computed, node.logits = True, torch.arange(SIZE, dtype=torch.float32) + node.token
        self.reader.read(list(nodes), **kwargs)

    def commit(self, *ids):
        nodes = self.tree.root.add_path(ids)
        self.reader.remember([self.tree.root, *nodes])
        self.tree.commit(nodes)
        return nodes


def is_processed(node):
    return node.logprobs.forbids(0) and not node.logprobs.forbids(1)


@pytest.fixture(params=[Odd, OddWithoutState])
def made(request):
    return Tree(request.param)


def test_it_is_not_asked_what_follows_a_text_that_it_forbids(made):
    good, bad, below = made.tree.root.add_child(3), made.tree.root.add_child(4), made.tree.root.add_path([4, 3])[1]
    made.read(good, bad, below)
    assert is_processed(good) and not is_processed(bad) and not is_processed(below)
    assert sorted(made.seen) == [PROMPT, [*PROMPT, 3]]
    made.read(below.add_child(5))  # a later pass
    assert len(made.seen) == 2


def test_in_one_pass_parents_come_before_their_children(made):
    nodes = made.tree.root.add_path([3, 5, 7])
    made.read(*nodes[::-1])
    assert [len(ids) for ids in made.seen] == [2, 3, 4, 5] and all(map(is_processed, nodes))


@pytest.mark.parametrize("ids", [(4,), (3, 4), (4, 6), (4, 3), (3, 4, 6, 5)])
def test_what_is_committed_unread_is_read_however_forbidden(made, ids):
    """The last resort of an ensemble may be what a member's own processors rule out."""
    nodes = made.commit(*ids)
    made.read(*nodes)
    assert all(map(is_processed, nodes))
    assert made.seen == [[*PROMPT, *ids[:count]] for count in range(len(ids) + 1)]
    below = [made.tree.root.add_child(token) for token in (3, 4)]
    made.read(*below, below[1].add_child(3))
    assert is_processed(below[0]) and is_processed(made.tree.root) and not is_processed(below[1])
    assert made.seen[-1] == [*PROMPT, *ids, 3] and len(made.seen) == len(ids) + 2


def test_it_is_committed_in_two_rounds_before_it_is_read(made):
    nodes = [*made.commit(4, 6), *made.commit(3, 2)]
    made.read(*nodes)
    assert made.seen == [[*PROMPT, *[4, 6, 3, 2][:count]] for count in range(5)] and all(map(is_processed, nodes))


@pytest.mark.parametrize("num_rows", [1, 3, 100])
def test_many_nodes_are_read_in_parts(num_rows, monkeypatch):
    """Logits over a large vocabulary take much memory in float32: few at a time."""
    monkeypatch.setattr(logits_reader, "_MOST_BYTES", 4 * SIZE * num_rows)
    tree, widths = TokenTree(0, list(PROMPT)), []
    best = logits_reader.numbers_of
    monkeypatch.setattr(
        logits_reader, "numbers_of", lambda scores, *rest: widths.append(len(scores)) or best(scores, *rest)
    )
    nodes, logits = tree.root.add_path([3, 4, 5, 6, 7]), torch.randn(5, SIZE)
    for node, row in zip(nodes, logits):
        node.is_computed, node.logits = True, row
    LogitsReader([PromptProcessors([], len(PROMPT))], 2, tree.ids_to).read(nodes)
    assert sum(widths) == 5 and max(widths) == min(num_rows, 5)
    for node, row in zip(nodes, logits):
        expected = row.log_softmax(-1).topk(2)
        assert node.logprobs.top == expected.indices.tolist()
        assert node.logprobs.top_log_probs == pytest.approx(expected.values.tolist(), abs=1e-6)
