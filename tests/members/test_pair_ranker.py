"""PairRM equals a plain computation of each pair, in both layouts, and what is none is refused."""

from __future__ import annotations

import re

import pytest
import torch
from support.blender_models import LAYOUTS, PlainPairRM, pair_weights, save_pair_rm
from support.calls import FORM
from support.tiny import tiny_model

from hf_adafuse.members import pair_ranker
from hf_adafuse.members.pair_ranker import load_pair_ranker

CPU = torch.device("cpu")
SOURCE = "The capital of France"
ANSWERS = ["is Paris.", "", "is Lima, and there was a cat", "is Paris!"]


def assert_plain(ranker, plain, source, answers):
    table = ranker(source, answers)
    for i, first in enumerate(answers):
        for j, second in enumerate(answers):
            expected = 0.0 if i == j else plain.logit(source, first, second)
            assert table[i][j] == pytest.approx(expected, abs=1e-5)
    return table


@pytest.mark.parametrize("num_tasks", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_equals_the_plain_computation_of_each_pair(layout, num_tasks, tmp_path):
    folder = save_pair_rm(tmp_path / "rm", layout, num_tasks=num_tasks)
    table = assert_plain(load_pair_ranker(folder, CPU), PlainPairRM(folder), SOURCE, ANSWERS)
    assert len({round(value, 4) for row in table for value in row}) == 13  # nothing is constant


def test_both_layouts_of_the_same_weights_give_equal_logits(tmp_path):
    own, hf = (load_pair_ranker(save_pair_rm(tmp_path / layout, layout), CPU) for layout in LAYOUTS)
    assert own(SOURCE, ANSWERS) == hf(SOURCE, ANSWERS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_short_prompt_leaves_its_room_to_the_answers(layout, tmp_path):
    limits = {"source_maxlength": 12, "candidate_maxlength": 6}
    folder = save_pair_rm(tmp_path / "rm", layout, **limits)
    ranker, plain = load_pair_ranker(folder, CPU), PlainPairRM(folder, **limits)
    answers = ["is a b", "is a c"]
    short, cut = (assert_plain(ranker, plain, source, answers) for source in ("The", "The capital of France"))
    assert short[0][1] != short[1][0]  # six characters are left of each
    assert cut[0][1] == cut[1][0] != 0  # three


@pytest.mark.slow
def test_without_limits_in_the_config_they_are_those_of_the_release(tmp_path):
    folder = save_pair_rm(tmp_path / "rm", "hf")
    source, answers = "The tree " * 200, ["was there " * 60, "was a tree " * 60]
    plain = PlainPairRM(folder)
    assert len(plain.ids(source, *answers)) == 1224 + 2 * 412
    assert_plain(load_pair_ranker(folder, CPU), plain, source, answers)


def test_what_is_spelled_like_a_marker_is_none(tmp_path):
    ranker = load_pair_ranker(save_pair_rm(tmp_path / "rm"), CPU)
    spelled = ["a<|candidate1|>b", "c<|candidate2|>d[SEP]e"]
    assert ranker("x<|source|>y", spelled) == ranker("x y", ["a b", "c d e"])


def test_one_answer_has_nothing_to_be_compared_with(tmp_path):
    ranker = load_pair_ranker(save_pair_rm(tmp_path / "rm"), CPU)
    assert ranker(SOURCE, ["is Paris"]) == [[0.0]] and ranker(SOURCE, []) == []


def test_it_is_loaded_once_and_draws_no_random_number(tmp_path, monkeypatch):
    folder, seen = save_pair_rm(tmp_path / "rm"), []
    real = pair_ranker.PairScorer.from_pretrained
    monkeypatch.setattr(
        pair_ranker.PairScorer, "from_pretrained", lambda name, **kw: (seen.append(name), real(name, **kw))[1]
    )
    before = torch.get_rng_state()
    first = load_pair_ranker(folder, CPU)
    first(SOURCE, ANSWERS)
    assert load_pair_ranker(folder, CPU) is first and seen == [folder]
    assert torch.equal(torch.get_rng_state(), before)
    assert not first._model.training and first._model.dtype == torch.float32


def refused(folder):
    with pytest.raises(ValueError, match=FORM) as error:
        load_pair_ranker(str(folder), CPU)
    assert re.match(r'`ranker` must be "nll", or the Hub name or a folder of a PairRM, but ', str(error.value))
    return str(error.value)


def test_what_is_nowhere_is_refused(tmp_path):
    assert "nowhere" in refused(tmp_path / "nowhere")


def test_another_model_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path / "llama")
    save_pair_rm(tmp_path / "rm", "own", ranker_type="summareranker")
    (tmp_path / "llama" / "tokenizer.json").write_bytes((tmp_path / "rm" / "tokenizer.json").read_bytes())
    (tmp_path / "llama" / "tokenizer_config.json").write_bytes((tmp_path / "rm" / "tokenizer_config.json").read_bytes())
    assert "ranker_type" in refused(tmp_path / "llama")
    assert "ranker_type" in refused(tmp_path / "rm")


@pytest.mark.parametrize("name", ["head_layer.4.bias", "pretrained_model.encoder.layer.1.output.dense.weight"])
def test_missing_weights_are_refused(name, tmp_path):
    weights = {key: value for key, value in pair_weights(0, 1).items() if key != name}
    assert name in refused(save_pair_rm(tmp_path / "rm", weights=weights))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_of_other_sizes_are_refused(layout, tmp_path):
    refused(save_pair_rm(tmp_path / "rm", layout, n_tasks=4))


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(tmp_path):
    assert "its tokenizer has" in refused(save_pair_rm(tmp_path / "rm", vocab_size=20))


def test_an_encoder_whose_config_is_nowhere_is_refused(tmp_path):
    assert "no-such" in refused(save_pair_rm(tmp_path / "rm", "own", model_name=str(tmp_path / "no-such")))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_broken_files_are_refused(name, tmp_path):
    folder = save_pair_rm(tmp_path / "rm")
    (tmp_path / "rm" / name).write_text("broken")
    refused(folder)


def test_logits_that_are_no_numbers_are_an_error(tmp_path):
    weights = pair_weights(0, 1) | {"head_layer.4.weight": torch.full((1, 16), torch.nan)}
    ranker = load_pair_ranker(save_pair_rm(tmp_path / "rm", weights=weights), CPU)
    with pytest.raises(RuntimeError, match=FORM):
        ranker(SOURCE, ANSWERS)
