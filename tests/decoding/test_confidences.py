"""How sure members are of words: the numbers, against plain forward passes, in every way of decoding."""

import json
import math
from itertools import pairwise

import pytest
import torch
from support.cases import PROMPTS as MANY_PROMPTS
from support.hosts import PROMPTS, ensemble, new_ids
from test_sampling import sampled

from hf_adafuse import AdaFuseConfig
from hf_adafuse.cli import main
from hf_adafuse.confidence.word_confidence import text_confidence
from hf_adafuse.rounds.round_lists import AdaFuseRounds
from hf_adafuse.rounds.trace_text import show_confidences

# Three models with one tokenizer: what is committed has the same ids for all.
SAME = ("llama/characters/0", "gpt2/characters/1", "mistral/characters/2")
COPIES = ("llama/byte_level/0",) * 3  # who writes a text in the same ids
# Methods and settings, and whether the members' weights are equal.
WAYS = {
    "span": AdaFuseConfig(max_word_tokens=4),
    "weights": AdaFuseConfig(max_word_tokens=4, model_weights=(3.0, 1.0, 0.5)),
    "word": AdaFuseConfig(method="words", max_word_tokens=4),
    "rerank": AdaFuseConfig(max_word_tokens=4, method="rerank"),
    "spans": AdaFuseConfig(max_word_tokens=4, method="spans", method_options={"unit": "word"}),
}


def plain_confidences(case, prompt_ids, committed, ids, before):
    """By plain forward passes: a word's probability under each model, and the mean of the models."""
    starts, at = [], 0
    for token in ids:
        starts.append(at)
        at += len(case.ref_members()[0].token_bytes(token))
    bounds = [0]
    for word in committed.words:
        bounds.append(bounds[-1] + len(word.encode()))
    products = []
    for model in case.models:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt_ids, *before, *ids]]), use_cache=False).logits[0]
        first = len(prompt_ids) + len(before) - 1
        log_probs = logits.log_softmax(-1)[range(first, first + len(ids)), ids].tolist()
        products.append(
            [
                math.exp(sum(value for value, start in zip(log_probs, starts) if low <= start < high))
                for low, high in pairwise(bounds)
            ]
        )
    weights = committed.weights or [1.0]
    return [sum(w * p for w, p in zip(weights, of_word)) / sum(weights) for of_word in zip(*products)]


@pytest.mark.parametrize("way", WAYS)
def test_confidences_are_those_of_plain_forward_passes(way):
    case = ensemble(*COPIES, prompts=MANY_PROMPTS, n=24)
    case.config = WAYS[way]
    output = case.fast()
    num_checked = 0
    for prompt_ids, new, rounds in zip(case.main_ids()[0], new_ids(case, output), output.rounds):
        before = []
        for committed in rounds:
            ids = new[len(before) : len(before) + committed.num_tokens - committed.ends]
            assert len(committed.confidences) == len(committed.words)
            if committed.is_whole and committed.words:
                expected = plain_confidences(case, prompt_ids, committed, ids, before)
                assert committed.confidences == pytest.approx(expected, abs=1e-5)
                num_checked += len(expected)
            before += new[len(before) : len(before) + committed.num_tokens]
    assert num_checked >= 10


@pytest.mark.slow
def test_members_that_differ_each_count_with_their_own_probability():
    """In first rounds: what members propose may have other ids than a text is encoded in, and then prefixes differ."""
    case = ensemble(*SAME, prompts=[f"{prompt} {word}" for prompt in MANY_PROMPTS for word in ("a", "the", "of")], n=24)
    case.config = AdaFuseConfig(max_word_tokens=4, model_weights=(3.0, 1.0, 0.5))
    output, main, num_checked = case.fast(), case.ref_members()[0], 0
    for prompt_ids, new, (committed, *_) in zip(case.main_ids()[0], new_ids(case, output), output.rounds):
        ids = new[: committed.num_tokens - committed.ends]
        is_main_alone = committed.candidates[committed.winner].proposers == [0]
        if is_main_alone and committed.is_whole and main.encode(committed.text) == (ids, True):
            expected = plain_confidences(case, prompt_ids, committed, ids, [])
            assert committed.confidences == pytest.approx(expected, abs=1e-5)
            num_checked += 1
    assert num_checked >= 3


@pytest.mark.parametrize(
    "method", ["unite", "gac", "deepen", "safe", "specfuse", "sweetspan", "cool-fusion", "majority"]
)
def test_every_method_says_how_sure_it_is(method):
    case = ensemble("llama/byte_level/0", "qwen3/sentencepiece/1", n=8)
    case.config = AdaFuseConfig(method=method, max_word_tokens=4)
    output = case.fast()
    assert len(output.confidence) == len(PROMPTS)
    for confidence, rounds in zip(output.confidence, output.rounds):
        values = [value for committed in rounds for value in committed.confidences]
        assert [len(c.confidences) for c in rounds] == [len(c.words) for c in rounds]
        assert all(value is None or 0 <= value <= 1 for value in values)
        assert confidence == rounds.confidence == text_confidence(values)
        assert (confidence is None) == (not any(value is not None for value in values))
        assert not rounds.is_calibrated


def test_a_token_method_has_the_probability_by_which_it_chose():
    case = ensemble("llama/byte_level/0", "qwen3/sentencepiece/1", n=8)
    case.config = AdaFuseConfig(method="unite")
    for rounds in case.fast().rounds:
        for committed in rounds:
            if committed.words:
                assert committed.confidences == committed.candidates[committed.winner].decided_by


def test_words_of_the_main_model_alone_have_its_probability():
    case = ensemble(*SAME, n=8)
    case.config = AdaFuseConfig(certainty_gate=1e-9, max_word_tokens=4)
    alone = ensemble(SAME[0], n=8)
    alone.config = AdaFuseConfig(margin_threshold=0.0, num_branches=1, max_words=1, max_word_tokens=4)
    for sure, own in zip(case.fast().rounds, alone.fast().rounds):
        values = [value for committed in own for value in committed.confidences]
        assert [value for committed in sure for value in committed.confidences] == pytest.approx(values, abs=1e-6)


def test_sampled_words_have_the_probability_under_the_member_that_drew_them():
    case = ensemble("llama/byte_level/0", n=8)
    torch.manual_seed(0)
    drawn = sampled(case)
    for prompt_ids, new, rounds in zip(case.main_ids()[0], new_ids(case, drawn), drawn.rounds):
        before = []
        for committed in rounds:
            ids = new[len(before) : len(before) + committed.num_tokens - committed.ends]
            if committed.words and committed.is_whole:
                (expected,) = plain_confidences(case, prompt_ids, committed, ids, before)
                assert committed.confidences == pytest.approx([expected], abs=1e-5)
            before += new[len(before) : len(before) + committed.num_tokens]


def test_a_batch_gives_each_prompt_what_it_gives_alone():
    case = ensemble("llama/byte_level/0", "qwen3/sentencepiece/1", n=8)
    together = case.fast().confidence
    for prompt, confidence in zip(PROMPTS, together):
        case.prompts = [prompt]
        assert case.fast().confidence == pytest.approx([confidence], abs=1e-6)


def test_a_text_that_is_cut_has_a_confidence_for_each_word_that_is_left():
    for n in range(1, 8):
        for rounds in ensemble("llama/byte_level/0", "qwen3/sentencepiece/1", n=n).fast().rounds:
            assert [len(c.confidences) for c in rounds] == [len(c.words) for c in rounds]


def test_rounds_without_confidences_have_none():
    assert AdaFuseRounds([]).confidence is None
    assert not AdaFuseRounds([]).is_calibrated


def test_traces_show_them():
    rounds = ensemble("llama/byte_level/0", "qwen3/sentencepiece/1", n=8).fast().rounds[0]
    for committed in rounds:
        assert f"    confidence  {show_confidences(committed.confidences)}" in str(rounds)
    page = rounds.to_html()
    assert "the less sure the members are of the word" in page
    low = min(value for committed in rounds for value in committed.confidences)
    assert f"box-shadow:inset 0 -.3em #D55E00{round(255 * (1 - low)):02x}" in page


def test_confidences_are_shown_with_two_digits():
    assert show_confidences([0.8249, None, 1.0]) == "0.82 - 1.00"


def test_the_command_shows_the_text_and_its_words(capsys):
    prompt = "What is the capital of Peru?"
    assert main(["generate", "--confidence", prompt]) == 0
    text, shown = capsys.readouterr().out.split("\nconfidence  ")
    first, *words = shown.splitlines()
    assert first.endswith("  (a score, not a probability)")
    assert " ".join(line.split()[1] for line in words) == text.strip()
    assert main(["generate", "--json", prompt]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["confidence"] == pytest.approx(float(first.split()[0]), abs=0.006)
    values = [value for committed in result["rounds"] for value in committed["confidences"]]
    assert [float(line.split()[0]) for line in words] == pytest.approx(values, abs=0.006)
