"""Logits processors and the flags that stand for some: never violated, and as the oracle applies them."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from support.hosts import CHARACTERS, PAD_IS_EOS, PROMPTS, Forbid, eager_to_end, ensemble, new_ids, oracle, plain
from support.tiny import eos_ids
from transformers import generation as host

from hf_adafuse.members.processors import ProcessorStep, PromptProcessors


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


@pytest.mark.slow
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


@pytest.mark.parametrize("members", [PAD_IS_EOS, CHARACTERS], ids=["pad_is_eos", "characters"])
def test_min_length_is_counted_in_the_main_models_ids(members):
    """The prompts of two members have other lengths."""
    case = eager_to_end(ensemble(*members, n=8))
    for prompt in case.prompts:
        case.prompts = [prompt]
        length = len(case.main_ids()[0][0])
        assert new_ids(case, case.fast(min_length=length + 5)) == new_ids(case, case.fast(min_new_tokens=5))
        assert new_ids(case, case.fast(min_length=length)) == new_ids(case, case.fast())


@pytest.mark.parametrize("method", ["adafuse", "unite", "sweetspan"])
def test_an_end_of_minus_one_never_comes(method):
    """Also where a member gives the last token of its vocabulary much probability, which has the index -1."""
    case = eager_to_end(ensemble(*CHARACTERS, n=8, method=method, model_weights=(1.0, 20.0, 1.0)))
    output = case.fast(eos_token_id=-1)
    assert new_ids(case, output) == new_ids(case, case.fast(eos_token_id=[]))
    assert {len(row) for row in new_ids(case, output)} == {8}
    case.models[1] = copy.copy(case.models[1])
    never = [copy.copy(case.models[1].generation_config) for _ in range(2)]
    never[0].eos_token_id, never[1].eos_token_id = -1, []
    texts = []
    for case.models[1].generation_config in never:
        texts.append([[one.nlls for one in committed.candidates] for committed in case.fast().rounds[0]])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("ends", [7, [3], [2, 400, -1], []], ids=["int", "one", "outside", "none"])
@pytest.mark.parametrize(
    "make",
    [lambda eos: host.MinLengthLogitsProcessor(8, eos), lambda eos: host.MinNewTokensLengthLogitsProcessor(3, 5, eos)],
    ids=["min_length", "min_new_tokens"],
)
def test_what_may_not_end_yet_is_as_transformers_has_it(make, ends, num_rows, dtype, monkeypatch):
    """Without a look through the vocabulary; those that derive from them are asked themselves."""
    processor, isin, looks = make(ends), torch.isin, []
    if ends == []:  # then it is a tensor of floats; these may be given, too
        processor.eos_token_id = torch.tensor([4.0, 3.5])
    derived = copy.copy(processor)
    derived.__class__ = type("Derived", (type(processor),), {})
    monkeypatch.setattr(torch, "isin", lambda *given, **named: looks.append(1) or isin(*given, **named))
    prompt = [1, 2, 3]
    for length in (3, 7, 8, 9):
        ids = [[(row + position) % 10 for position in range(length)] for row in range(num_rows)]
        scores = torch.randn(num_rows, 10).to(dtype)
        expected, before = processor(torch.tensor(ids), scores), scores.clone()
        looks.clear()
        found = PromptProcessors([ProcessorStep(processor, [prompt])], len(prompt))(ids, scores)
        assert torch.equal(found, expected) and found.dtype is dtype and bool(looks) == (ends == [])
        assert torch.equal(scores, before)
        looks.clear()
        assert (
            torch.equal(PromptProcessors([ProcessorStep(derived, [prompt])], len(prompt))(ids, scores), expected)
            and looks
        )


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
