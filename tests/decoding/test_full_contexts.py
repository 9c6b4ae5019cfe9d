"""A context that fills up stops the text cleanly, as in the oracle, and with a warning."""

from __future__ import annotations

import copy
import dataclasses
import random
import warnings

import pytest
import torch
from support.calls import BYTES, CHARS, own
from support.cases import Case, random_config
from support.reference import RefMember, reference_decode
from support.tiny import TOKENIZERS, eos_ids, tiny_model

from hf_adafuse import AdaFuseConfig, enable_adafuse


def with_dynamic_frequencies(model):
    """The same model, which may not go on beyond its `max_position_embeddings`."""
    config = copy.deepcopy(model.config)
    config.rope_parameters = {**config.rope_parameters, "rope_type": "dynamic", "factor": 2.0}
    made = type(model)(config).eval()
    made.load_state_dict(model.state_dict())
    made.generation_config = copy.deepcopy(model.generation_config)
    return made


def tight_case(number):
    """Members of which one to all have a context of 24 to 40 tokens: learned positions (GPT-2), or rotary frequencies
    that follow the length of the text."""
    rng = random.Random(number)
    count = 1 + number % 3
    contexts = [rng.choice([24, 29, 40]) if k == number % count or rng.random() < 0.4 else 512 for k in range(count)]
    members = []
    for context in contexts:
        architecture = "gpt2" if context < 512 and rng.random() < 0.7 else rng.choice(["llama", "mistral", "qwen3"])
        tokenizer = rng.choice(["byte_level", "sentencepiece", "characters", "trailing_space"])
        model = tiny_model(architecture, tokenizer, rng.randint(0, 1), 3.0, context)
        if context < 512 and architecture != "gpt2":
            model = with_dynamic_frequencies(model)
        members.append(RefMember(model, TOKENIZERS[tokenizer](), eos_ids(TOKENIZERS[tokenizer]()), context))
    config = random_config(rng, count)
    config = dataclasses.replace(config, num_branches=min(3, config.num_branches), max_words=min(3, config.max_words))
    prompts = rng.sample(["She", "A cat", "the tree", "Lima"], rng.randint(1, 2))
    case = Case([m.model for m in members], [m.tokenizer for m in members], config, prompts, 40)
    return case, members


@pytest.mark.parametrize("number", range(20))
def test_generation_stops_at_the_end_of_a_context(number):
    case, members = tight_case(number)
    rows, ids, _ = case.main_ids()
    slow = [reference_decode(members, case.member_prompts(row), case.config, case.max_new_tokens) for row in rows]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = case.fast()
    stopped = set()
    for row, (expected, texts) in enumerate(slow):
        got = output.sequences[row, ids.shape[1] :].tolist()
        assert got[: len(expected)] == expected, f"row {row} of {case}"
        assert set(got[len(expected) :]) <= {case.tokenizers[0].pad_token_id}, f"row {row} of {case} goes on: {got}"
        spans = [committed.text for committed in output.rounds[row]]
        assert spans == texts or (len(expected) == case.max_new_tokens and spans[:-1] == texts[: len(spans) - 1])
        if len(expected) < case.max_new_tokens and not (expected and expected[-1] in members[0].eos):
            stopped.add(row)
    messages = [str(warning.message) for warning in caught]
    assert all(warning.category is UserWarning for warning in caught), messages
    assert len(messages) == len(stopped), f"{case}: {messages} for rows {stopped}"
    names = ["the main model (", *[f"assistant {k} ({type(m).__name__}) (" for k, m in enumerate(case.models[1:], 1)]]
    tight = [f"{name}{m.max_length} tokens)" for name, m in zip(names, members, strict=True) if m.max_length < 512]
    for row in stopped:
        (message,) = [text for text in messages if f"prompt {row} " in text]
        assert "outgrows the context" in message and any(name in message for name in tight), message


@pytest.mark.slow
def test_the_cases_do_outgrow_their_contexts():
    """Learned positions among them, in the main model and in assistants."""
    seen, wanted = set(), {("GPT2LMHeadModel", True), ("GPT2LMHeadModel", False)}
    for number in range(20):
        if wanted < seen and len(seen) >= 4:
            return
        case, members = tight_case(number)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            case.fast()
        for k, member in enumerate(members):
            name = "the main model" if k == 0 else f"assistant {k} "
            if any(name in str(warning.message) for warning in caught):
                seen.add((type(member.model).__name__, k == 0))
    assert wanted < seen and len(seen) >= 4


def row_of(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(30, 300, (1, length), generator=generator)


@pytest.mark.parametrize("architecture", ["gpt2", "dynamic"])
@pytest.mark.parametrize("room", [1, 2, 7])
@pytest.mark.parametrize("seed", [0, 1])
def test_exactly_enough_room_is_enough(architecture, room, seed):
    """Only the main model is tight: `max_new_tokens` come out, and no warning (which would be an error here)."""
    tight = own("gpt2" if architecture == "gpt2" else "llama", "byte_level", max_positions=24, seed=seed)
    main = enable_adafuse(tight if architecture == "gpt2" else with_dynamic_frequencies(tight))
    ids = row_of(24 - room, seed)
    other = tiny_model("llama", "characters", seed)
    for extra in ({}, dict(assistant_models=[other], assistant_tokenizers=[CHARS])):
        given = dict(input_ids=ids, tokenizer=BYTES, adafuse_config=AdaFuseConfig(), do_sample=False, **extra)
        output = main.generate(**given, max_new_tokens=room, min_new_tokens=room, return_dict_in_generate=True)
        assert output.sequences.shape[1] == 24
        assert sum(r.num_tokens for r in output.rounds[0]) == room
        with pytest.warns(UserWarning, match=r"outgrows the context of the main model \(24 tokens\)"):
            longer = main.generate(**given, max_new_tokens=room + 1, min_new_tokens=room + 1)
        assert torch.equal(longer, output.sequences)


@pytest.mark.parametrize("tight", ["main", "assistant"])
@pytest.mark.parametrize("as_dict", [False, True])
def test_a_prompt_that_fills_the_context_gives_no_text(tight, as_dict):
    small, large = own("gpt2", max_positions=24), own("llama")
    main, assistant = (small, large) if tight == "main" else (large, small)
    ids = row_of(24)
    given = dict(input_ids=ids, tokenizer=BYTES, assistant_models=[assistant], assistant_tokenizers=[BYTES])
    name = "the main model" if tight == "main" else r"assistant 1 \(GPT2LMHeadModel\)"
    with pytest.warns(UserWarning, match=f"outgrows the context of {name} .24 tokens"):
        output = enable_adafuse(main).generate(
            **given, max_new_tokens=4, do_sample=False, return_dict_in_generate=as_dict, output_scores=as_dict
        )
    assert torch.equal(output.sequences if as_dict else output, ids)
    if as_dict:
        assert output.rounds == [[]] and not output.scores


def test_a_full_row_leaves_the_others_alone():
    """Rows of different lengths: the long one stops at the context, the short one gives what it gives alone."""
    tight = own("gpt2", max_positions=24)
    short, long = row_of(4, 1), row_of(20, 2)
    pad = BYTES.pad_token_id
    ids = torch.cat([torch.cat([torch.full((1, 16), pad), short], 1), long])
    mask = torch.ones_like(ids)
    mask[0, :16] = 0
    given = dict(tokenizer=BYTES, assistant_models=[tight], assistant_tokenizers=[BYTES], do_sample=False)
    given |= dict(max_new_tokens=12, min_new_tokens=12)
    main = enable_adafuse(own())
    alone = main.generate(input_ids=short, **given)
    with pytest.warns(UserWarning, match="prompt 1 stopped early: the text outgrows the context of assistant 1"):
        both = main.generate(input_ids=ids, attention_mask=mask, **given)
    assert torch.equal(both[0, 16:], alone[0])
    with pytest.warns(UserWarning, match="prompt 0 stopped early"):
        full = main.generate(input_ids=long, **given)
    width = full.shape[1]
    assert torch.equal(both[1, :width], full[0]) and set(both[1, width:].tolist()) <= {pad}
