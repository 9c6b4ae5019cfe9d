"""How much each member counts, by what it made of what was committed."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from hf_adafuse import AdaFuseConfig
from hf_adafuse.decoding.member_weights import PromptWeights
from hf_adafuse.decoding.pool import Candidate
from hf_adafuse.decoding.selector import Selector


@pytest.mark.parametrize(
    ("log_probs", "logs"),
    [
        ({0: [-8.0], 1: [-4.0, -12.0]}, [-1.0, -2.0]),
        ({0: [-8.0], 1: []}, [-1.0, -1.0]),  # it cannot write the word: it stays where the other one is
        ({0: [-8.0]}, [-1.0, -1.0]),
        ({0: [-8.0], 1: [], 2: [-16.0]}, [-1.0, -1.5, -2.0]),  # in the middle of the others
        ({0: [], 1: []}, [0.0, 0.0]),
    ],
    ids=str,
)
def test_a_member_that_cannot_write_what_was_committed_gains_nothing(log_probs, logs):
    """Eight bytes, at a rate of 1: a weight falls by exp(-NLL / 8)."""
    config = AdaFuseConfig(online_rate=1.0)
    weights = PromptWeights(config, [], len(logs))
    selector = Selector([None] * len(logs), [], None, weights)
    winner = Candidate("eightbyt", ("eightbyt",), False, {}, (0, 0), log_probs=log_probs)
    selector.learn(SimpleNamespace(index=0), winner)
    found = weights.of(0).weights
    expected = [math.exp(value - max(logs)) for value in logs]
    assert found == pytest.approx(expected)
