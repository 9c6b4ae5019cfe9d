"""Every method over tokens equals its oracle, token for token, over random ensembles, alone and in batches."""

from __future__ import annotations

import random

import pytest
from support.cases import random_case
from support.reference_tokens import METHODS, decode_by_tokens

from hf_adafuse import AdaFuseConfig

OPTIONS = {
    "unite": {"top_k": (1, 3, 10), "zero_repeated": (False, True)},
    "gac": {"threshold": (None, None, 0.6)},
    "deepen": {"num_anchors": (None, 20), "learning_rate": (0.15, 0.5, 0.0), "num_steps": (5, 2)},
}


def case_of(method, number):
    """A random ensemble of 1 to 4 members and a batch of 1 to 4 prompts that decodes by the method."""
    seed = 80000 + 1000 * list(METHODS).index(method) + number
    case, rng = random_case(seed), random.Random(seed)
    case.config = AdaFuseConfig(
        method=method,
        method_options={name: rng.choice(values) for name, values in OPTIONS[method].items()},
        model_weights=case.config.model_weights,
        max_word_tokens=case.config.max_word_tokens,
    )
    return case


def assert_equals_the_oracle(case):
    output, width = case.fast(), case.main_ids()[1].shape[1]
    members = case.ref_members()
    for row, prompt in enumerate(case.main_ids()[0]):
        expected = decode_by_tokens(members, case.member_prompts(prompt), case.config, case.max_new_tokens)
        got = output.sequences[row, width:].tolist()
        assert got[: len(expected)] == expected, f"row {row} of {case}: {got} is not {expected}"
        assert set(got[len(expected) :]) <= {case.tokenizers[0].pad_token_id}
        text = "".join(committed.text for committed in output.rounds[row])
        ids = expected[:-1] if expected[-1] in members[0].eos else expected
        assert "\ufffd" in text or text == members[0].text(ids)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_equals_its_oracle(method, method_number, look_ahead):
    look_ahead(method_number % 3, is_flat=method_number % 2 == 1)
    assert_equals_the_oracle(case_of(method, method_number))
