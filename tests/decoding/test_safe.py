"""SAFE: the main model drafts, the others verify, tokens are fused where that is needed. The oracle, worked examples,
laws, what it costs, what `stats` counts.
"""

from __future__ import annotations

import math
import random

import pytest
from support.cases import PROMPTS, Case, counts, random_case
from support.hosts import ensemble, new_ids
from support.reference_safe import decode_by_safe
from support.tiny import TOKENIZERS, tiny_model
from support.toys import run, toy, word_tokenizer
from transformers import NoRepeatNGramLogitsProcessor

from hf_adafuse import AdaFuseConfig
from hf_adafuse.decoding.strategies.registry import make_strategy
from hf_adafuse.decoding.strategies.safe import DRAFTED


def safe(weights=None, max_word_tokens=32, **options):
    return AdaFuseConfig(
        method="safe", method_options=options, model_weights=weights, max_word_tokens=max_word_tokens
    )


def random_options(rng):
    """As of the method; a fusion of each kind, and thresholds at which much is fused."""
    gac = rng.random() < 0.3
    return {
        "num_tokens": rng.choice([1, 2, 3, 5, 8]),
        "acceptance_threshold": rng.choice([0.5, 0.5, 0.2, 0.9, 1.0]),
        "ensemble": "gac" if gac else "unite",
        "sharpening": rng.choice(["prefix", "prefix", "geometric", "none"]),
        "sharpening_threshold": rng.choice([0.1, 0.0, 0.02, 0.3]),
        **({"threshold": rng.choice([None, 0.4])} if gac else {"top_k": rng.choice([None, 1, 4, 30])}),
    }


@pytest.mark.parametrize("number", range(160))
def test_random_ensembles_equal_the_oracle(number, look_ahead):
    """Token for token, alone and in batches; every fourth with logits processors on all members."""
    rng = random.Random(95000 + number)
    case = random_case(95000 + number)
    case.config = safe(case.config.model_weights, case.config.max_word_tokens, **random_options(rng))
    look_ahead(number % 3, is_flat=number % 2 == 1)
    has_processors = number % 4 == 0
    output = case.fast(**({"no_repeat_ngram_size": 2} if has_processors else {}))
    got, totals = new_ids(case, output), [0, 0, 0]
    for row, prompt in enumerate(case.main_ids()[0]):
        members = case.ref_members()
        for member in members:
            member.process = NoRepeatNGramLogitsProcessor(2) if has_processors else None
        expected, found = decode_by_safe(members, case.member_prompts(prompt), case.config, case.max_new_tokens)
        assert got[row] == expected, f"row {row} of {case}"
        text = "".join(committed.text for committed in output.rounds[row])
        ids = expected[:-1] if expected[-1] in members[0].eos else expected
        assert "\ufffd" in text or text == members[0].text(ids)
        totals = [one + other for one, other in zip(totals, found, strict=True)]
    assert [output.stats[name] for name in ("fused", "sharpened", "replaced")] == totals
