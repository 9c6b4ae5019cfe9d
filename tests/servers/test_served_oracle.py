"""Members behind servers give the text of the same members here: random ensembles, three kinds of server."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest
from support.cases import random_case
from support.stand_in import StandIn, serving

from hf_adafuse import ServedModel


def served(stack, model, tokenizer, kind, **options):
    """The same model behind a stand-in, and the stand-in."""
    stand_in = StandIn(model, tokenizer, kind)
    options |= {"tokenizer": tokenizer, "eos_token_id": model.generation_config.eos_token_id}
    return ServedModel(stack.enter_context(serving(stand_in)), kind, **options), stand_in


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp"])
def test_served_members_equal_local_ones(kind, served_number):
    number = 90_000 + 3 * served_number + ["vllm", "sglang", "llamacpp"].index(kind)
    case, rng = random_case(number), random.Random(number)
    if case.config.exploration == "beam":
        case.config = case.config.changed({"exploration": "diverse"})
    expected = case.fast()
    with ExitStack() as stack:
        apart = [k for k in range(len(case.models)) if rng.random() < 0.6] or [0]
        for k in apart:
            steps = rng.choice([1, 2, 6])
            case.models[k], _ = served(stack, case.models[k], case.tokenizers[k], kind, num_steps=steps)
        output = case.fast()
    assert output.sequences.tolist() == expected.sequences.tolist(), f"{apart} of {case}"
    texts = [[committed.text for committed in rounds] for rounds in output.rounds]
    assert texts == [[committed.text for committed in rounds] for rounds in expected.rounds]
