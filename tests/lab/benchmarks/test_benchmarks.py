"""The enlarged models compute what the small ones do; the benchmark's pair writes long texts."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from support.tiny import tiny_model

from hf_adafuse import AdaFuseConfig, demo, enable_adafuse
from hf_adafuse.demo import data
from hf_adafuse.lab import benchmarks
from hf_adafuse.lab.benchmarks import enlarge, prose
from hf_adafuse.lab.benchmarks.enlarge import _larger_config
from hf_adafuse.lab.benchmarks.members import load_pair, prompt
from hf_adafuse.lab.training import bench_pair


@pytest.fixture(scope="module")
def members():
    return demo.load_members(3)


@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize("num_parameters", [3_000_000, 50_000_000])
def test_the_same_logits_at_more_cost(members, k, num_parameters):
    model, tokenizer = members[k]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    larger = enlarge(model, num_parameters)
    assert larger.num_parameters() == pytest.approx(num_parameters, rel=0.05)
    assert larger.config.intermediate_size % 32 == 0
    for question in demo.test_questions(5):
        ids = tokenizer(question.prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            assert (larger(ids).logits - model(ids).logits).abs().max() < 1e-4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if num_parameters == 3_000_000:
        small, large = (m.generate(ids, max_new_tokens=20, do_sample=False).tolist() for m in (model, larger))
        assert small == large


@pytest.mark.parametrize("k", [0, 1, 2])
def test_sizes_up_to_eight_billion(members, k):
    model, _ = members[k]
    for size in (1_000_000_000, 8_000_000_000):
        config, _ = _larger_config(model.config, size)
        with torch.device("meta"):
            assert type(model)(config).num_parameters() == pytest.approx(size, rel=0.05)
        assert 20 < config.num_hidden_layers < 60


def test_refusals(members):
    with pytest.raises(ValueError, match="`model` must be one of"):
        enlarge(tiny_model("gpt2"), 10_000_000)
    with pytest.raises(ValueError, match="`num_parameters` must be at least twice the model's own"):
        enlarge(members[0][0], 1000)


def test_half_precision_and_the_callers_random_numbers(members):
    model = copy.deepcopy(members[0][0]).to(torch.bfloat16)
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    one, two = enlarge(model, 4_000_000), enlarge(model, 4_000_000)
    assert torch.rand(1) == expected and torch.get_default_dtype() == torch.float32
    assert one.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))


@pytest.fixture(scope="module")
def pair():
    return load_pair()


@pytest.fixture(scope="module")
def words():
    """Every word of the world that the pair has read about."""
    told = (Path(benchmarks.__file__).parent / "prose.json").read_text(encoding="utf-8")
    known = [" ".join([*fact.subject, data.plural(fact.subject[0]), fact.answer]) for fact in data.facts()]
    return set(words_of(" ".join([told, *known])))


class TestPair:
    """The pair that writes long texts, and the prompts for it."""

    MODELS = Path(benchmarks.__file__).parent / "models"

    def test_small_and_in_float32(self, pair):
        weights = list(self.MODELS.glob("*/model.safetensors"))
        assert len(weights) == 2
        assert all(path.stat().st_size < 2_000_000 for path in weights)
        assert {parameter.dtype for model, _ in pair for parameter in model.parameters()} == {torch.float32}
        assert {type(model).__name__ for model, _ in pair} == {"LlamaForCausalLM", "GPTNeoXForCausalLM"}
        assert all(model.config.max_position_embeddings >= 4096 for model, _ in pair)
        assert len({len(tokenizer) for _, tokenizer in pair}) == 2

    @pytest.mark.parametrize("k", [0, 1])
    @pytest.mark.parametrize("num_tokens", [20, 1000])
    def test_each_writes_legible_text(self, pair, words, k, num_tokens):
        model, tokenizer = pair[k]
        inputs = tokenizer(prompt(num_tokens, tokenizer, 3), return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
        new = output[0, inputs.input_ids.shape[1] :]
        assert len(new) == 40  # and no end of sequence
        written = words_of(tokenizer.decode(new[:-4]))  # the last word may be cut
        assert len(written) >= 15
        assert [word for word in written[:-1] if word not in words] == []
        runs = [tuple(written[i : i + 5]) for i in range(len(written) - 4)]
        assert len(set(runs)) == len(runs)

    def test_prompts(self, pair):
        for _, tokenizer in pair:
            for num_tokens in (1, 20, 500, 2000):
                text = prompt(num_tokens, tokenizer)
                length = len(tokenizer(text)["input_ids"])
                assert num_tokens - 12 <= length <= max(num_tokens, 3)
                assert prompt(2500, tokenizer).startswith(text)
                assert prompt(2500, tokenizer)[len(text)].isspace()
        assert len({prompt(20, tokenizer, index) for index in range(20)}) == 20
        assert prompt(20, tokenizer, 7) == prompt(20, tokenizer, 7)
        with pytest.raises(ValueError, match="`num_tokens` must be at least 1, but is 0"):
            prompt(0, tokenizer)

    @pytest.mark.parametrize("num_branches", [1, 3])
    def test_together_they_agree_and_differ(self, pair, words, num_branches):
        (main, tokenizer), (assistant, assistant_tokenizer) = copy.copy(pair)
        main = enable_adafuse(copy.copy(main))
        rounds = []
        for index in range(2):
            inputs = tokenizer(prompt(100, tokenizer, index), return_tensors="pt")
            output = main.generate(
                **inputs,
                tokenizer=tokenizer,
                assistant_models=[assistant],
                assistant_tokenizers=[assistant_tokenizer],
                adafuse_config=AdaFuseConfig(num_branches=num_branches),
                max_new_tokens=64,
                return_dict_in_generate=True,
            )
            rounds += output.rounds[0]
        proposers = [tuple(each.candidates[each.winner].proposers) for each in rounds]
        assert 0.2 < proposers.count((0, 1)) / len(proposers) < 0.9
        assert {(0, 1), (0,), (1,)} == set(proposers)
        margins = [margin for each in rounds for member in each.margins for margin in member]
        assert 0.1 < sum(margin < 0.7 for margin in margins) / len(margins) < 0.6
        assert [word for word in words_of("".join(each.text for each in rounds[:-1])) if word not in words] == []


class TestProse:
    def test_the_same_for_every_call_and_as_long_as_asked(self):
        for member in (None, 0, 1):
            text = prose.document("x", 3000, member)
            assert 3000 <= len(text) < 4500
            assert prose.document("x", 3000, member) == text
            assert prose.document("x", 6000, member).startswith(text)
        assert prose.document("y", 3000) != prose.document("x", 3000)

    def test_only_members_are_told_what_is_wrong(self):
        capitals = {fact.subject[0]: fact.answer for fact in data.facts() if fact.relation == "capital"}
        told = {
            member: re.findall(r"The capital of ([^.]+?) is ([^.]+?), an? ", prose.document("z", 200_000, member))
            for member in (None, 0, 1)
        }
        right = {member: sum(capitals[a] == b for a, b in told[member]) / len(told[member]) for member in told}
        assert right[None] == 1
        assert 0.3 < right[0] < 0.8
        assert 0.3 < right[1] < 0.8

    def test_training_saves_a_pair_that_loads(self, tmp_path, monkeypatch):
        monkeypatch.setattr(bench_pair, "_NUM_TOKENIZED", 20)
        for index in range(2):
            bench_pair.train_member(index, tmp_path, (bench_pair.Phase(2, 2, 32), bench_pair.Phase(1, 1, 64)))
        for (model, tokenizer), (shipped, _) in zip(load_pair(tmp_path), load_pair()):
            assert model.config.to_diff_dict() == shipped.config.to_diff_dict()
            assert len(tokenizer) == model.config.vocab_size


def words_of(text):
    return re.findall(r"[^\W\d_]+", text)
