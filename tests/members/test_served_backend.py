"""A walk of a served member that goes on and on takes few requests."""

from __future__ import annotations

import sys

import pytest
import torch

from hf_adafuse.members.served_backend import ServedBackend
from hf_adafuse.servers.queries import GreedyStep


class Counting:
    """After any text the next whole number, as far as there is room; `asked`: the texts' lengths and greedy steps."""

    def __init__(self, num_steps, most=sys.maxsize):
        self.num_steps, self.most = num_steps, most
        self.asked = []

    def room(self, num_ids):
        return self.most - num_ids

    def ask(self, queries, num_top):
        self.asked += [(len(query.ids), query.num_steps) for query in queries]
        assert all(1 <= query.num_steps <= max(1, self.room(len(query.ids))) for query in queries)
        walks = [range(query.ids[-1] + 1, query.ids[-1] + 1 + query.num_steps) for query in queries]
        return [[GreedyStep((token, 0), {token: -0.1, 0: -3.0}, token) for token in walk] for walk in walks]


def backend_of(model, prompts=((7, 8),)):
    backend = ServedBackend(model, torch.device("cpu"))
    backend.make_logprobs = lambda top, log_probs: top
    backend.prefill([list(prompt) for prompt in prompts])
    return backend


def walk(backend, length):
    """Greedily on, node by node, until so many below the prefix have been read; returns them."""
    node, path = backend.trees[0].root, []
    while len(path) < length:
        if node.logprobs is None:
            backend.run([node])
        node = node.add_child(node.logprobs[0])
        path.append(node)
    return path


@pytest.mark.parametrize(
    ("num_steps", "expected"),
    [
        (4, [(2, 4), (6, 4), (10, 8), (18, 8), (26, 8), (34, 8)]),
        (12, [(2, 12), (14, 12), (26, 24)]),
    ],
)
def test_a_walk_that_goes_on_gets_twice_as_long(num_steps, expected):
    model = Counting(num_steps)
    path = walk(backend_of(model), 40)
    assert model.asked == expected
    assert [node.token for node in path] == list(range(9, 49))


def test_it_begins_anew_at_the_end_of_the_prefix():
    model = Counting(4)
    backend = backend_of(model)
    path = walk(backend, 17)
    backend.commit(0, path)
    model.asked.clear()
    backend.run([backend.trees[0].root.add_child(99)])
    assert model.asked == [(20, 4)]


def test_it_does_not_outgrow_the_context():
    model = Counting(4, most=30)
    walk(backend_of(model), 27)
    assert model.asked == [(2, 4), (6, 4), (10, 8), (18, 8), (26, 4)]
