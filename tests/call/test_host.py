"""Logits processors, sampling flags, configs, outputs and pipelines: what `generate()` offers works here too."""

from __future__ import annotations

import copy
import logging
import pickle
import re

import pytest
import torch
from hosts import CHARACTERS, PAD_IS_EOS, PROMPTS, TWO, eager_to_end, ensemble, new_ids, oracle, plain
from tiny import eos_ids, tiny_model
from transformers import GenerationConfig, LogitsProcessor, pipeline
from transformers import generation as host
from transformers.utils.logging import warning_once

from hf_adafuse import AdaFuseConfig, AdaFuseOutput, disable_adafuse, enable_adafuse


class Forbid(LogitsProcessor):
    def __init__(self, ids):
        self.ids, self.seen = sorted(ids), []

    def __call__(self, input_ids, scores):
        self.seen += input_ids.tolist()
        scores = scores.clone()
        scores[:, self.ids] = -torch.inf
        return scores


def test_a_user_logits_processor_is_never_violated():
    case = ensemble(*CHARACTERS)
    forbidden = {index for token, index in case.tokenizers[0].get_vocab().items() if token in "aeiou"}
    processor = Forbid(forbidden)
    got = new_ids(case, case.fast(logits_processor=[processor]))
    assert got == oracle(case, lambda row, k, prompt: Forbid(forbidden) if k == 0 else None)
    assert not forbidden & {token for row in got for token in row}
    assert forbidden & {token for row in oracle(case) for token in row}
    # It sees the rows as they were passed, padding and all.
    padded = case.main_ids()[1].tolist()
    assert all(seen[: len(padded[0])] in padded for seen in processor.seen)


def _shared(make):
    """A flag that names no ids: every member over its own ids."""
    return lambda case: lambda row, k, prompt: make(prompt, torch.tensor(eos_ids(case.tokenizers[k])))


def _main_only(make):
    return lambda case: lambda row, k, prompt: make(case, prompt) if k == 0 else None


def _id(case, char):
    return case.tokenizers[0].convert_tokens_to_ids(char)


FLAGS = {
    "repetition_penalty": (
        lambda case: {"repetition_penalty": 2.5},
        _shared(lambda prompt, eos: host.RepetitionPenaltyLogitsProcessor(2.5)),
    ),
    "encoder_repetition_penalty": (
        lambda case: {"encoder_repetition_penalty": 2.5},
        _shared(lambda prompt, eos: host.EncoderRepetitionPenaltyLogitsProcessor(2.5, torch.tensor([prompt]))),
    ),
    "no_repeat_ngram_size": (
        lambda case: {"no_repeat_ngram_size": 1},
        _shared(lambda prompt, eos: host.NoRepeatNGramLogitsProcessor(1)),
    ),
    "exponential_decay_length_penalty": (
        lambda case: {"exponential_decay_length_penalty": (2, 2.0)},
        _shared(lambda prompt, eos: host.ExponentialDecayLengthPenalty((2, 2.0), eos, len(prompt))),
    ),
    "bad_words_ids": (
        lambda case: {"bad_words_ids": [[_id(case, "e")], [_id(case, "h"), _id(case, "a")], [_id(case, "t")]]},
        _main_only(
            lambda case, prompt: host.NoBadWordsLogitsProcessor(
                [[_id(case, "e")], [_id(case, "h"), _id(case, "a")], [_id(case, "t")]], eos_ids(case.tokenizers[0])
            )
        ),
    ),
    "suppress_tokens": (
        lambda case: {"suppress_tokens": [_id(case, char) for char in "enotsi"]},
        _main_only(lambda case, prompt: Forbid([_id(case, char) for char in "enotsi"])),
    ),
    "begin_suppress_tokens": (
        lambda case: {"begin_suppress_tokens": list(range(0, len(case.tokenizers[0]), 2))},
        _main_only(
            lambda case, prompt: (
                lambda ids, scores: (
                    Forbid(range(0, len(case.tokenizers[0]), 2))(ids, scores) if ids.shape[1] == len(prompt) else scores
                )
            )
        ),
    ),
    "forced_eos_token_id": (
        lambda case: {"forced_eos_token_id": case.tokenizers[0].eos_token_id},
        _main_only(
            lambda case, prompt: host.ForcedEOSTokenLogitsProcessor(
                len(prompt) + case.max_new_tokens, case.tokenizers[0].eos_token_id
            )
        ),
    ),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_equals_the_oracle_in_a_batch(flag):
    arguments, process = FLAGS[flag]
    changed = False
    for members in (PAD_IS_EOS, CHARACTERS):
        case = ensemble(*members, n=8)
        expected = oracle(case, process(case))
        assert new_ids(case, case.fast(**arguments(case))) == expected, members
        changed |= expected != plain(members)
    assert changed, "a flag that changes nothing proves nothing"


@pytest.mark.parametrize("members", [PAD_IS_EOS, CHARACTERS], ids=["pad_is_eos", "characters"])
def test_min_new_tokens(members):
    # Every member's end of sequence is so likely that texts end at once: nothing but the flag keeps them going.
    case = eager_to_end(ensemble(*members, n=8))
    arguments = {"min_new_tokens": 5}
    make = _shared(lambda prompt, eos: host.MinNewTokensLengthLogitsProcessor(len(prompt), 5, eos))
    got = new_ids(case, case.fast(**arguments))
    assert got == oracle(case, make(case))
    assert all(len(row) > 5 for row in got)
    assert not any(set(row[:5]) & set(eos_ids(case.tokenizers[0])) for row in got)
    assert max(map(len, new_ids(case, case.fast()))) == 1


def test_min_length_counts_each_prompt_as_it_is_alone():
    case = eager_to_end(ensemble(PAD_IS_EOS[0], n=8))
    case.prompts = [case.prompts[0]] * 2
    length = len(case.main_ids()[0][0]) + 4
    alone = new_ids(case, case.fast(min_length=length))
    assert [len(row) for row in alone] == [5, 5]
    case.prompts = [case.prompts[0], PROMPTS[1]]
    assert new_ids(case, case.fast(min_length=length))[0] == alone[0]


@pytest.mark.parametrize(
    ("main", "signs"), [("gpt2/characters/0", "(')"), ("llama/byte_level/1", '{"}')], ids=["characters", "byte_level"]
)
def test_a_grammar_by_row_is_never_violated(main, signs):
    """Row 0 must be {"cat":<2 digits>}, row 1 {"a":<1 to 3 letters>}; then the text ends."""
    left, quote, right = signs
    heads = [f"{left}{quote}{key}{quote}:" for key in ("cat", "a")]
    grammars = [re.escape(heads[0]) + rf"\d\d\{right}", re.escape(heads[1]) + rf"[a-z]{{1,3}}\{right}"]
    samples = [f"{heads[0]}00{right}", f"{heads[1]}aaa{right}"]
    case = ensemble(main, "qwen3/sentencepiece/1", n=14)
    tok, (_, ids, _), calls = case.tokenizers[0], case.main_ids(), []
    texts = {i: tok.decode([i]) for i in range(len(tok)) if i not in tok.all_special_ids}

    def is_beginning(row, text):
        tails = [samples[row][i:] for i in range(len(samples[row]))]
        return any(re.fullmatch(grammars[row], text + tail) for tail in ["", *tails])

    def allowed(row, text):
        if re.fullmatch(grammars[row], text):
            return [tok.eos_token_id]
        return [i for i, piece in texts.items() if piece and is_beginning(row, text + piece)]

    def grammar(batch_id, sent):
        assert sent[: ids.shape[1]].tolist() == ids[batch_id].tolist()
        calls.append(batch_id)
        found = allowed(batch_id, tok.decode(sent[ids.shape[1] :]))
        # A grammar's automaton has no state for a text that it forbade: it must not be asked about one.
        assert found, f"asked about {tok.decode(sent)!r}, which the grammar of row {batch_id} had already forbidden"
        return found

    def process(row, k, prompt):
        def mask(ids_so_far, scores):
            text = tok.decode(ids_so_far[0, len(prompt) :], skip_special_tokens=True)
            possible = set(allowed(row, text)) or range(scores.shape[1])  # below a forbidden token: of no account
            return Forbid(set(range(scores.shape[1])) - set(possible))(ids_so_far, scores)

        return mask if k == 0 else None

    output = case.fast(prefix_allowed_tokens_fn=grammar)
    got = new_ids(case, output)
    assert set(calls) == {0, 1}
    for row, tokens in enumerate(got):
        assert tokens[-1] == tok.eos_token_id
        assert re.fullmatch(grammars[row], tok.decode(tokens[:-1])), tok.decode(tokens)
    assert got == oracle(case, process)


def test_warpers_and_sampling_change_nothing_and_warn_once(caplog):
    case = ensemble(*PAD_IS_EOS)
    rows, ids, mask = case.main_ids()
    model = enable_adafuse(copy.copy(case.models[0]))
    warning_once.cache_clear()
    kwargs = dict(
        input_ids=ids, attention_mask=mask, max_new_tokens=8, tokenizer=case.tokenizers[0],
        assistant_models=case.models[1:], assistant_tokenizers=case.tokenizers[1:], adafuse_config=case.config,
    )  # fmt: skip
    greedy = model.generate(**kwargs, do_sample=False)
    with caplog.at_level(logging.WARNING):
        assert not [record for record in caplog.records if "do_sample" in record.getMessage()]
        for _ in range(2):
            sampled = model.generate(**kwargs, do_sample=True, temperature=3.0, top_k=2, top_p=0.1)
            assert torch.equal(sampled, greedy)
    assert len([record for record in caplog.records if "do_sample" in record.getMessage()]) == 1


def test_the_config_comes_from_the_call_then_the_binding_then_the_generation_config():
    case = ensemble("llama/byte_level/0", max_word_tokens=3, prompts=PROMPTS[:1])
    _, ids, mask = case.main_ids()
    model = copy.deepcopy(case.models[0])
    wanted = {"max_words": 1, "num_branches": 2, "max_word_tokens": 2, "margin_threshold": 1.1}
    inputs = dict(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=6, return_dict_in_generate=True)
    ordinary = model.generate(**inputs)
    enable_adafuse(model, tokenizer=case.tokenizers[0])

    def shape(**kwargs):
        """(words, branches) of the first round, or None for an ordinary call."""
        output = model.generate(**inputs, **kwargs)
        if not isinstance(output, AdaFuseOutput):
            assert torch.equal(output.sequences, ordinary.sequences)
            return None
        return len(output.rounds[0][0].words), len(output.rounds[0][0].candidates)

    assert shape() is None
    passed = GenerationConfig(adafuse_config=wanted, eos_token_id=model.generation_config.eos_token_id)
    assert shape(generation_config=passed) == (1, 2)
    model.generation_config.adafuse_config = wanted
    assert shape() == (1, 2)
    call = {**wanted, "num_branches": 4}
    assert shape(adafuse_config=call) == (1, 4)
    assert shape(generation_config=passed, adafuse_config=AdaFuseConfig(**call)) == (1, 4)
    assert shape(adafuse_config=False) is None
    enable_adafuse(model, tokenizer=case.tokenizers[0], adafuse_config={**wanted, "num_branches": 3})
    assert shape() == (1, 3)
    assert shape(adafuse_config=call) == (1, 4)
    assert shape(adafuse_config=False, assistant_models=case.models, assistant_tokenizers=case.tokenizers) is None
    assert model.generation_config.adafuse_config == wanted and passed.adafuse_config == wanted


@pytest.mark.parametrize(
    "sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 1.5, "top_k": 20}, {"num_beams": 2}]
)
def test_without_assistants_it_is_the_ordinary_generate(sampling):
    case = ensemble(*PAD_IS_EOS)
    _, ids, mask = case.main_ids()
    plain_model, enabled = case.models[0], enable_adafuse(copy.copy(case.models[0]))
    outputs = []
    for model in (plain_model, enabled):
        torch.manual_seed(3)
        outputs.append(
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=8,
                return_dict_in_generate=True,
                output_scores=True,
                tokenizer=case.tokenizers[0],
                stop_strings=["zzz"],
                **sampling,
            )
        )
    assert type(outputs[0]) is type(outputs[1])
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert all(torch.equal(a, b) for a, b in zip(outputs[0].scores, outputs[1].scores, strict=True))


def test_scores_and_logits_are_one_per_new_token():
    case = ensemble(*PAD_IS_EOS)
    vocab_size = case.models[0].config.vocab_size
    suppressed = [5, 6, 7]
    output = case.fast(output_scores=True, output_logits=True, suppress_tokens=suppressed)
    rows, ids, mask = case.main_ids()
    new = new_ids(case, output)
    steps = max(map(len, new))
    assert [tuple(step.shape) for step in output.scores] == [(2, vocab_size)] * steps
    assert [tuple(step.shape) for step in output.logits] == [(2, vocab_size)] * steps
    transitions = enable_adafuse(copy.copy(case.models[0])).compute_transition_scores(
        output.sequences, output.scores, normalize_logits=True
    )
    assert transitions.shape == (2, steps)
    for row, (prompt, tokens) in enumerate(zip(rows, new, strict=True)):
        with torch.no_grad():
            logits = case.models[0](torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        got = torch.stack([step[row] for step in output.logits[: len(tokens)]])
        torch.testing.assert_close(got, logits, atol=1e-4, rtol=1e-4)
        logits[:, suppressed] = -torch.inf
        expected = logits.log_softmax(-1)[range(len(tokens)), tokens]
        torch.testing.assert_close(transitions[row, : len(tokens)], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("when", ["call", "construction", "binding"])
def test_pipeline(when):
    case = ensemble(*TWO, n=8)
    tok, settings = case.tokenizers[0], dict(max_new_tokens=8, do_sample=False, return_full_text=False)
    ensemble_arguments = dict(
        assistant_models=case.models[1:], assistant_tokenizers=case.tokenizers[1:], adafuse_config=case.config
    )
    model = enable_adafuse(
        copy.copy(case.models[0]), tokenizer=tok, **(ensemble_arguments if when == "binding" else {})
    )
    pipe = pipeline(
        "text-generation", model=model, tokenizer=tok, **(ensemble_arguments if when == "construction" else {})
    )
    at_call = ensemble_arguments if when == "call" else {}
    expected = [tok.decode(row, skip_special_tokens=True) for row in oracle(case)]
    for more in ({}, {"return_dict_in_generate": True}, {"return_dict_in_generate": True, "output_scores": True}):
        texts = [
            found[0]["generated_text"] for found in pipe(list(PROMPTS), batch_size=2, **settings, **at_call, **more)
        ]
        assert texts == expected, more


def test_nothing_of_the_callers_is_changed():
    case = ensemble(*CHARACTERS, n=8)
    case.models = [copy.deepcopy(model) for model in case.models]
    _, ids, mask = case.main_ids()
    given = [ids.clone(), mask.clone()]
    settings = GenerationConfig(max_new_tokens=8, do_sample=False, repetition_penalty=1.2, return_dict_in_generate=True)
    config = {"max_words": 2}

    def state():
        models = [
            (
                m.config.to_dict(),
                m.generation_config.to_dict(),
                m.config._attn_implementation,
                m.training,
                sorted(vars(m)),
            )
            for m in case.models
        ]
        tokenizers = [
            (t.backend_tokenizer.to_str(), t.init_kwargs, t.padding_side, t.special_tokens_map) for t in case.tokenizers
        ]
        weights = [m.state_dict() for m in case.models]
        return copy.deepcopy([models, tokenizers, settings.to_dict(), config, list(map(list, weights))]), [
            tensor.clone() for named in weights for tensor in named.values()
        ]

    (before, weights), base = state(), type(case.models[0])
    main = enable_adafuse(case.models[0])
    main.generate(
        input_ids=ids, attention_mask=mask, generation_config=settings, tokenizer=case.tokenizers[0],
        assistant_models=case.models[1:], assistant_tokenizers=case.tokenizers[1:], adafuse_config=config,
        logits_processor=[Forbid([3])],
    )  # fmt: skip
    assert disable_adafuse(main) is main and type(main) is base
    after, weights_after = state()
    assert torch.equal(ids, given[0]) and torch.equal(mask, given[1])
    assert before == after
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_after, strict=True))


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_of_an_enabled_model_generates_the_same(clone):
    case = ensemble(*TWO, n=6)
    expected = case.fast().sequences
    cloned = clone(enable_adafuse(copy.copy(case.models[0]), case.models[1:], case.tokenizers[1:], case.tokenizers[0]))
    case.models = [cloned, *case.models[1:]]
    assert torch.equal(case.fast().sequences, expected)
    assert type(disable_adafuse(cloned)) is type(tiny_model("llama"))
