"""Fast equals slow: random ensembles, settings and batches against the oracle, token for token in float32."""

from __future__ import annotations

import collections

import pytest
from support.cases import assert_equal, random_case
from support.tiny import ARCHITECTURES, TOKENIZERS

from hf_adafuse.decoding.scoring import margin
from hf_adafuse.trees import tree_attention_backend
from hf_adafuse.trees.pass_policy import POLICIES, AcceleratorPolicy, Policy
from hf_adafuse.trees.static_shapes import StaticMemory

pytestmark = pytest.mark.fast


def test_case_equals_the_oracle(case_number, look_ahead, monkeypatch, request):
    look_ahead(case_number % 3, is_flat=case_number % 2 == 1)
    if case_number % 4 < 2:  # some products are made by the kernel, some by parts
        request.getfixturevalue(("small_kernel", "small_parts")[case_number % 4])
    # Prompts share a row of the cache; have one each; share one, then have one each.
    monkeypatch.setattr(Policy, "most_shared_columns", (3072, 0, 60)[case_number // 4 % 3])
    if case_number % 5 == 0:  # as compiled models on an accelerator are run: passes filled up, few shapes
        monkeypatch.setitem(POLICIES, "cpu", AcceleratorPolicy)
        monkeypatch.setattr(AcceleratorPolicy, "least_static_columns", 8)
        monkeypatch.setattr(tree_attention_backend, "memory_of", lambda model, is_kept: StaticMemory())
    assert_equal(random_case(case_number))


def test_the_cases_cover_what_they_should(monkeypatch):
    monkeypatch.setattr("support.cases.tiny_model", lambda architecture, *_: architecture)  # their names will do
    cases = [random_case(number) for number in range(160)]
    assert {len(case.models) for case in cases} == {1, 2, 3, 4}
    assert {len(case.prompts) for case in cases} == {1, 2, 3, 4}
    assert sum(len(case.prompts) > (case.max_batch_size or 9) for case in cases) > 20  # some must wait
    configs = [case.config for case in cases]
    assert {config.margin_threshold for config in configs} == {0.0, 0.2, 0.7, 1.1}
    assert {config.max_words for config in configs} == {1, 2, 3, 4}
    assert {config.num_branches for config in configs} == {1, 2, 3, 4, 5}
    for name in ("word_boundary", "nll_normalization", "commitment", "exploration"):
        assert len({getattr(config, name) for config in configs}) == 2, name
    models = collections.Counter(model for case in cases for model in case.models)
    assert set(models) == set(ARCHITECTURES) and min(models.values()) > 50
    tokenizers = collections.Counter(len(tok) for case in cases for tok in case.tokenizers)
    assert len(tokenizers) == len(TOKENIZERS) and min(tokenizers.values()) > 50


@pytest.mark.slow
def test_margins_straddle_tau_and_texts_end():
    """The tiny models are peaked enough for the cases to mean something."""
    margins, ends, words = [], 0, collections.Counter()
    for number in range(20):
        output = random_case(number).fast()
        for prompt in output.rounds:
            ends += prompt[-1].ends
            words.update(len(committed.words) for committed in prompt)
            margins += [value for committed in prompt for read in committed.margins for value in read]
    confident = sum(value >= 0.7 for value in margins) / len(margins)
    assert 0.25 < confident < 0.75
    assert ends >= 5
    assert min(words[1], words[2], words[3]) > 10
    assert margin([0.0, -100.0]) > 0.99
