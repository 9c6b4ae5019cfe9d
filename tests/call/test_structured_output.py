"""Structured output: random regular expressions and JSON schemas, against the oracle with the same grammar.

`pytest tests/call/test_structured_output.py --cases 2000 -n auto` has 200 random cases of tiny tokenizers;
`--cases 8000 -k real`, where the folder with real tokenizers is at hand, 200 of those.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
import re

import pytest
import torch
from support.cases import PROMPTS, Case, random_config
from support.grammars import follows, may_begin, pure, random_regex, random_schema
from support.hosts import ensemble, new_ids, oracle
from support.releases import cache_of, with_cache
from support.tiny import ARCHITECTURES, TOKENIZERS, tiny_model
from test_real import needs_shared, real_tokenizers, shared_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from hf_adafuse import AdaFuseDecodingError, enable_adafuse

# These can write any character, and so JSON.
WITH_BYTES = ("byte_level", "trailing_space", "sentencepiece")


def check(case, structured):
    """The text follows the grammar, or was cut; and it is the oracle's. Says whether it came to its end."""
    output = case.fast(structured=structured)
    rows = new_ids(case, output)
    for rounds, new in zip(output.rounds, rows, strict=True):
        text = "".join(committed.text for committed in rounds)
        assert follows(text, structured) if rounds[-1].ends else len(new) == case.max_new_tokens, (text, structured)
        assert "\ufffd" in text or may_begin(text, structured), (text, structured)  # that may be half a character
    members = case.ref_members()
    grammars = {}

    def process(row, k, prompt):
        key = k, tuple(prompt)
        grammars[key] = grammars.get(key) or pure(members[k], prompt, structured)
        return grammars[key]

    expected = oracle(case, process)
    assert rows == expected, f"{case} with {structured}"
    return [rounds[-1].ends for rounds in output.rounds]


def tiny_case(rng, names, num_members, n):
    models, tokenizers = [], []
    for _ in range(num_members):
        name = rng.choice(names)
        models.append(tiny_model(rng.choice(ARCHITECTURES), name, rng.randint(0, 2), rng.choice([2.0, 4.0])))
        tokenizers.append(TOKENIZERS[name]())
    return Case(models, tokenizers, random_config(rng, num_members), rng.sample(PROMPTS, rng.randint(1, 3)), n)


def test_random_grammars_equal_the_oracle(structured_number, look_ahead):
    look_ahead(structured_number % 3, is_flat=structured_number % 2 == 1)
    rng = random.Random(structured_number)
    if structured_number % 2:
        case, structured = tiny_case(rng, WITH_BYTES, rng.randint(2, 3), 24), {"json_schema": random_schema(rng)}
    else:
        names = rng.choice([list(TOKENIZERS), [name for name in TOKENIZERS if name != "wordpiece"]])
        case, regex = tiny_case(rng, names, rng.randint(1, 3), 14), random_regex(rng)
        # A token of WordPiece that has a space has a letter, too, and perhaps not the one that the grammar wants.
        structured = {"regex": regex if "wordpiece" not in names else regex.replace(" ", "")}
    check(case, structured)


@pytest.mark.slow
def test_the_cases_come_to_their_ends_and_assistants_win():
    ends, wins = [], 0
    for number in range(24):
        rng = random.Random(number)
        case, structured = tiny_case(rng, WITH_BYTES, 2, 24), {"json_schema": random_schema(rng)}
        output = case.fast(structured=structured)
        ends += [rounds[-1].ends for rounds in output.rounds]
        wins += output.stats["members"][1]["wins"]
    assert 0.3 < sum(ends) / len(ends) < 1
    assert wins > 50


@pytest.mark.parametrize("number", range(8))
def test_sampled_texts_follow_the_grammar(number):
    """Each of a batch as alone, and the same again by the same seed."""
    rng = random.Random(number)
    case, structured = tiny_case(rng, WITH_BYTES, 2, 24), {"json_schema": random_schema(rng)}
    case.config = dataclasses.replace(case.config, do_sample=True)

    def sampled(prompts):
        torch.manual_seed(number)
        output = dataclasses.replace(case, prompts=prompts).fast(structured=structured)
        return ["".join(committed.text for committed in rounds) for rounds in output.rounds], output.rounds

    texts, rows = sampled(case.prompts)
    for text, rounds in zip(texts, rows, strict=True):
        assert follows(text, structured) if rounds[-1].ends else "\ufffd" in text or may_begin(text, structured)
    assert [sampled([prompt])[0][0] for prompt in case.prompts] == texts


@pytest.mark.parametrize("kind", ["json_schema", "regex", "grammar"])
def test_what_the_call_is_given(kind):
    """A grammar in each of its forms, and beside other processors."""
    case = ensemble("llama/byte_level/0", "qwen3/sentencepiece/1", n=24)
    given = {"json_schema": '{"enum": ["cat", "tree"]}', "regex": '"(cat|tree)"', "grammar": GRAMMAR}[kind]
    for options in ({}, {"repetition_penalty": 1.3}, {"bad_words_ids": [case.tokenizers[0].encode("cat")]}):
        output = case.fast(structured={kind: given}, **options)
        texts = ["".join(committed.text for committed in rounds) for rounds in output.rounds]
        assert set(texts) <= {'"cat"', '"tree"'}, (options, texts)


GRAMMAR = 'root ::= "\\"" ("cat" | "tree") "\\""'


def test_a_text_goes_on_from_the_returned_cache_with_a_grammar_of_its_own():
    case = ensemble("llama/byte_level/0", "qwen3/sentencepiece/1", prompts=["She"], n=8)
    first = case.fast(structured={"regex": "[a-d ]{9,}"})
    ids = first.sequences
    second = enable_adafuse(copy.copy(case.models[0])).generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **with_cache(cache_of(first)),
        tokenizer=case.tokenizers[0],
        assistant_models=case.models[1:],
        assistant_tokenizers=case.tokenizers[1:],
        adafuse_config=case.config,
        structured={"regex": r" and \d"},
        max_new_tokens=8,
        return_dict_in_generate=True,
    )
    texts = ["".join(committed.text for committed in output.rounds[0]) for output in (first, second)]
    assert re.fullmatch("[a-d ]+", texts[0])
    assert re.fullmatch(r" and \d", texts[1])


def test_a_grammar_alone_is_an_ensemble_of_one():
    case = ensemble("llama/byte_level/0", prompts=["She"])
    model, row = enable_adafuse(copy.copy(case.models[0])), case.main_ids()[1]
    ids = model.generate(
        row, attention_mask=torch.ones_like(row), tokenizer=case.tokenizers[0], structured={"regex": "[a-c]{3}"},
        max_new_tokens=9,
    )  # fmt: skip
    assert re.fullmatch("[a-c]{3}", case.tokenizers[0].decode(ids[0, row.shape[1] :], skip_special_tokens=True))


# What cannot be


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        ({"regex": "(a"}, "must be one that compiles, but does not: Regex parsing error at position 3"),
        ({"regex": "[É]"}, "members that can write the text, but assistant 1 .LlamaForCausalLM. has no token"),
        ({"regexp": "a"}, "must be a dict with one of"),
    ],
)
def test_what_is_refused(structured, message):
    case = ensemble("llama/byte_level/0", "llama/wordpiece/1")
    case.fast()  # models have been tested by now
    with pytest.raises(ValueError, match=message):
        case.fast(structured=structured)


@pytest.mark.parametrize("samples", [False, True])
def test_a_text_that_cannot_go_on_is_an_error_with_what_there_is(samples):
    case = ensemble("gpt2/characters/0", "llama/byte_level/0", prompts=["She"], do_sample=samples)
    with pytest.raises(AdaFuseDecodingError, match="it has no word that its grammar and its other logits proc") as e:
        case.fast(structured={"regex": "at 今"})  # which the main tokenizer has not
    assert e.value.member == "the main model"
    assert "at ".startswith(e.value.texts[0])
    with pytest.raises(AdaFuseDecodingError, match="it has no word"):  # it may only end, and may not yet
        case.fast(structured={"regex": "at"}, min_new_tokens=9)


# Real tokenizers


@functools.cache
def real_member(name):
    tokenizer = shared_tokenizer(name)
    torch.manual_seed(len(name))
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.5,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval(), tokenizer


@pytest.mark.slow
@needs_shared
def test_random_grammars_of_real_tokenizers_equal_the_oracle(real_number):
    rng = random.Random(1000 + real_number)
    names = rng.sample(real_tokenizers(), rng.randint(2, 3))
    models, tokenizers = zip(*map(real_member, names), strict=True)
    config = dataclasses.replace(random_config(rng, len(names)), num_branches=rng.randint(1, 3), max_word_tokens=6)
    prompts = rng.sample(PROMPTS, rng.randint(1, 2))
    structured = {"json_schema": random_schema(rng)} if real_number % 2 else {"regex": random_regex(rng)}
    check(Case(list(models), list(tokenizers), config, prompts, 20), structured)
