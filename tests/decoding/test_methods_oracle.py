"""Every method over spans equals its oracle, token for token, over random ensembles, alone and in batches."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from support.cases import context_of, random_calibration, random_case
from support.reference_methods import METHODS, decode_by_method

from hf_adafuse import AdaFuseConfig
from hf_adafuse.call.sampling import random_streams

OPTIONS = {
    "sweetspan": {"num_words": (1, 2, 4), "filter_ratio": (10.0, 2.0, None)},
    "cool-fusion": {"rerank": (False, False, True)},
    "specfuse": {"num_tokens": (1, 4, 10), "score": ("probability", "logit"), "learning_rate": (None, 2.0)},
    "spans": {"unit": ("word", "sentence", "paragraph"), "merge": ("weighted", "confidence"), "num_words": (3, 64)},
    "rerank": {},
    "blender": {"ranker": ("nll",)},
    "majority": {"pattern": (None, r"\w+", r"[a-z](\w)")},
    "anchor": {"alpha": (0.5, 0.1, 0.9, 1.0), "beta": (0.5, 0.0, 2.0, 30.0), "num_words": (4, 1)},
    "select": {},
    "peer-review": {"rubric": ("Rate.", "Rate.", "1 is bad,\n4 good", None), "max_score": (2, 3, 4)},
}


SAMPLED = {
    "specfuse": {"num_tokens": (1, 4, 10), "learning_rate": (None, 2.0)},
    "rerank": {"num_samples": (1, 3)},
    "majority": {"num_samples": (1, 2, 5), "pattern": (None, r"[a-z](\w)")},
    "blender": {"num_samples": (1, 3)},
    "select": {},
    "peer-review": {"num_samples": (1, 3), "rubric": ("Rate.",), "max_score": (2, 3)},
}


def case_of(method, number, options=OPTIONS, **fields):
    """A random ensemble of 1 to 4 members and a batch of 1 to 4 prompts that decodes by the method."""
    seed = 50000 + 1000 * list(METHODS).index(method) + number
    case, rng = random_case(seed), random.Random(seed)
    kept = case.config
    case.config = AdaFuseConfig(
        method=method,
        method_options={name: rng.choice(values) for name, values in options[method].items()},
        model_weights=kept.model_weights,
        max_word_tokens=kept.max_word_tokens,
        word_boundary=kept.word_boundary,
        nll_normalization=kept.nll_normalization,
        **fields,
    )
    return case


def assert_equals_the_oracle(case, seed=None, **warping):
    """`seed`: of the drafts that are drawn, warped so."""
    torch.manual_seed(seed or 0)
    numbers = random_streams(case.main_ids()[0]) if seed is not None else [None] * len(case.prompts)
    torch.manual_seed(seed or 0)
    output, width = case.fast(**warping), case.main_ids()[1].shape[1]
    members = case.ref_members()
    for member in members:
        member.max_length = context_of(member.model)  # long sentences reach the ends of contexts
    for row, prompt in enumerate(case.main_ids()[0]):
        prompts = case.member_prompts(prompt)
        drawing = warping | {"numbers": numbers[row]}
        expected, texts = decode_by_method(members, prompts, case.config, case.max_new_tokens, **drawing)
        got = output.sequences[row, width:].tolist()
        assert got[: len(expected)] == expected, f"row {row} of {case}: {got} is not {expected}"
        assert set(got[len(expected) :]) <= {case.tokenizers[0].pad_token_id}
        spans = [committed.text for committed in output.rounds[row]]
        assert spans[:-1] == texts[: len(spans)][:-1]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_equals_its_oracle(method, method_number, look_ahead):
    look_ahead(method_number % 3, is_flat=method_number % 2 == 1)
    assert_equals_the_oracle(case_of(method, method_number))


def calibrated_case(number, options=OPTIONS, **fields):
    case = case_of("select", number, options, **fields)
    calibration = random_calibration(number, len(case.models))
    case.config = replace(case.config, method_options={"calibration": calibration})
    return case


def test_calibrated_selection_equals_its_oracle(method_number, look_ahead):
    look_ahead(method_number % 3, is_flat=method_number % 2 == 1)
    assert_equals_the_oracle(calibrated_case(method_number))


@pytest.mark.slow
def test_calibrated_selection_among_drawn_answers_equals_its_oracle(method_number):
    assert_equals_the_oracle(
        calibrated_case(method_number, SAMPLED, do_sample=True), method_number, temperature=1.0, top_k=8
    )


@pytest.mark.parametrize("method", SAMPLED)
def test_drafts_that_are_drawn_equal_the_oracles(method, method_number):
    case = case_of(method, method_number, SAMPLED, do_sample=True)
    temperature = random.Random(method_number).choice([0.7, 1.0, 1.5])
    assert_equals_the_oracle(case, method_number, temperature=temperature, top_k=8)
