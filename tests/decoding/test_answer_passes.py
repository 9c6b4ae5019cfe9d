"""How many passes whole answers take: a member writes all of the batch, then the next; scores are read together."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from support.cases import PROMPTS, Case, counts
from support.tiny import TOKENIZERS, tiny_model
from support.toys import run, toy, word_tokenizer

from hf_adafuse import AdaFuseConfig
from hf_adafuse.decoding.strategies.drafting import AnswerProposer
from hf_adafuse.members.member import Member
from hf_adafuse.trees.kv_cache_backend import KVCacheBackend
from hf_adafuse.trees.pass_policy import Policy

pytestmark = pytest.mark.fast

METHODS = ["rerank", "majority", "select", "peer-review"]


@pytest.fixture(autouse=True)
def _without_drafts(monkeypatch):
    monkeypatch.setattr(Policy, "longest_draft", 0)


def answers(table):
    """A toy that answers by these chains of words: `{"One": "a b"}`."""
    rows = {}
    for prompt, answer in table.items():
        words = [prompt, *answer.split(), "</s>"]
        rows |= {word: {after: 0.9} for word, after in pairwise(words)}
    return rows


def test_a_batch_by_hand():
    """Three prompts of a word, whose answers are of 2, 1 and 5 words by the main model, of 1, 4 and 2 by the other."""
    own = {"One": "a b", "Two": "c", "Six": "d e f g h"}, {"One": "k", "Two": "l m n o", "Six": "p q"}
    tokenizer = word_tokenizer(
        sorted({word for table in own for item in table.items() for word in " ".join(item).split()})
    )
    members = [(toy(tokenizer, answers(table)), tokenizer) for table in own]
    output = run(members, {"method": "rerank"}, prompt=["One", "Two", "Six"])
    assert [len(rounds[0].candidates) for rounds in output.rounds] == [2, 2, 2]
    # pass  main model       the other one
    # 1     One Two Six      One Two Six
    # 2     a c d            a b, c, d e f g h: it scores them, and begins k l p
    # 3     b e              m q
    # 4     f                n
    # 5     g                o
    # 6     h
    # 7     k, l m n o, p q: it scores them
    assert counts(output) == [(7, 3 + 8 + 7), (5, 3 + 8 + 7)]


@pytest.mark.parametrize("most_shared", [3072, 0], ids=["one row", "a row a prompt"])
@pytest.mark.parametrize("method", METHODS)
def test_a_member_takes_as_many_passes_as_its_longest_answer_has_tokens(method, most_shared, monkeypatch):
    monkeypatch.setattr(Policy, "most_shared_columns", most_shared)
    num_new, members = 40, [tiny_model("llama", "byte_level", seed) for seed in range(3)]
    case = Case(members, [TOKENIZERS["byte_level"]()] * 3, AdaFuseConfig(method=method), PROMPTS[:5], num_new)
    passes = [passes for passes, _ in counts(case.fast())]
    # What the prompts share and the rest of them, the own answer, and those of the others: before and after it.
    most = [1 + num_new - 1 + scoring for scoring in (1, 2, 1)]
    if method == "peer-review":
        most = [number + 2 + 1 for number in most]  # what rating prompts share, the rest of them, the answers in them
    # Rows that are filled up are read in parts, so that little is filled up.
    parts = 0 if most_shared else 2 * (2 if method == "peer-review" else 1)
    assert all(number <= bound + parts for number, bound in zip(passes, most, strict=True)), passes


def test_answers_are_scored_in_passes_that_hold_few_logits(monkeypatch):
    """Of long answers so many tokens a pass, whatever their number: at most 256 MB of logits, or 16 tokens a prompt."""
    tokenizers, widths = [TOKENIZERS["byte_level"]()] * 2, []
    members = [tiny_model("llama", "byte_level", seed) for seed in range(2)]
    case = Case(members, tokenizers, AdaFuseConfig(method="rerank"), PROMPTS[:3], 30)
    expected, begin = case.fast(), Member.begin_pass

    def watched(self, needs, likely):
        widths.extend(len(nodes) for nodes, _ in needs.values())
        return begin(self, needs, likely)

    monkeypatch.setattr(Member, "begin_pass", watched)
    monkeypatch.setattr("hf_adafuse.decoding.long_spans._MOST_LOGITS", 1)
    monkeypatch.setattr("hf_adafuse.decoding.long_spans._LEAST_TOKENS", 5)
    output = case.fast()
    assert 5 <= max(widths) <= 5 + 1  # the first token of an own answer comes along
    assert output.sequences.tolist() == expected.sequences.tolist()
    for rounds, others in zip(output.rounds, expected.rounds, strict=True):
        for one, other in zip(rounds[0].candidates, others[0].candidates, strict=True):
            assert one.nlls == pytest.approx(other.nlls, abs=1e-4)


def other_tokenizers(method="rerank"):
    """A batch of members that have no tokens in common."""
    names = ["byte_level", "wordpiece", "sentencepiece"]
    members = [tiny_model("llama", name, seed) for seed, name in enumerate(names)]
    tokenizers = [TOKENIZERS[name]() for name in names]
    return Case(members, tokenizers, AdaFuseConfig(method=method), PROMPTS[:4], 24)


@pytest.mark.parametrize("stop", [None, "e", " the", "\n"])
def test_an_answer_that_is_stopped_early_is_the_same(stop, monkeypatch):
    """What follows the token that ends an answer is not read; the answer is that which is read to the end of a word."""
    case, options = other_tokenizers(), {} if stop is None else {"stop_strings": [stop]}
    output = case.fast(**options)
    monkeypatch.setattr(AnswerProposer, "_is_stopped", lambda self, word: False)
    expected = case.fast(**options)
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert [rounds.text for rounds in output.rounds] == [rounds.text for rounds in expected.rounds]
    assert sum(tokens for _, tokens in counts(output)) <= sum(tokens for _, tokens in counts(expected))
    for rounds, others in zip(output.rounds, expected.rounds, strict=True):
        assert [one.text for one in rounds[0].candidates] == [one.text for one in others[0].candidates]


def similar_members(number):
    """Copies of a model with a little noise: their answers begin alike."""
    members = [tiny_model("llama", "byte_level", number)]
    for seed in (1, 2):
        other = copy.deepcopy(members[0])
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter += 0.05 * parameter.std() * torch.randn(parameter.shape, generator=generator)
        members.append(other)
    return members


@pytest.mark.parametrize("number", range(4))
def test_scores_that_were_freed_are_read_again(number, monkeypatch):
    """What another answer needs after a token whose scores are gone is read anew: the result is the same."""
    forget, again = KVCacheBackend.forget, []
    monkeypatch.setattr(KVCacheBackend, "forget", lambda self, node: (again.append(node), forget(self, node))[1])
    tokenizers = [TOKENIZERS["byte_level"]()] * 3
    case = Case(similar_members(number), tokenizers, AdaFuseConfig(method="rerank"), PROMPTS[:3], 24)
    output = case.fast()
    num_again = len(again)
    monkeypatch.setattr(Member, "can_forget", False)
    expected = case.fast()
    assert num_again > 0 and len(again) == num_again
    assert output.sequences.tolist() == expected.sequences.tolist()
    for rounds, others in zip(output.rounds, expected.rounds, strict=True):
        for one, other in zip(rounds[0].candidates, others[0].candidates, strict=True):
            assert one.text == other.text and one.nlls == pytest.approx(other.nlls, abs=1e-4)
