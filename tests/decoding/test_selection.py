"""Selection by calibrated confidence beyond its oracle: probabilities, features, refusals, files, exports, servers."""

from __future__ import annotations

import ast
import json
import math
import random
from contextlib import ExitStack

import numpy as np
import pytest
from support.cases import PROMPTS, Case, random_calibration, random_case
from support.stand_in import StandIn, serving
from support.tiny import TOKENIZERS, tiny_model
from test_methods_oracle import calibrated_case
from transformers import AutoModelForCausalLM

from hf_adafuse import AdaFuseConfig, AdaFuseEnsemble, ServedModel, enable_adafuse, export_adafuse
from hf_adafuse.confidence import Calibration
from hf_adafuse.confidence.features import feature_names, filled
from hf_adafuse.decoding.scored_spans import END, ScoredSpan
from hf_adafuse.decoding.strategies.registry import make_strategy
from hf_adafuse.decoding.word_splitter import split_words


def selecting(case, **options):
    fields = {"model_weights": case.config.model_weights, "max_word_tokens": case.config.max_word_tokens}
    fields |= {"word_boundary": case.config.word_boundary, "nll_normalization": case.config.nll_normalization}
    case.config = AdaFuseConfig(method="select", method_options=options, **fields)
    return case


def places(rounds, num_members):
    """Per member, the features of its answer; `None` where that could not be committed."""
    found = [next(one.features for one in rounds[0].candidates if k in one.proposers) for k in range(num_members)]
    return [features or None for features in found]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_confidence_is_the_probability_that_the_calibration_gives(number):
    case = calibrated_case(number)
    calibration = Calibration.from_dict(case.config.method_options["calibration"])
    output = case.fast()
    assert output.confidence == [rounds.confidence for rounds in output.rounds]
    for rounds, confidence in zip(output.rounds, output.confidence, strict=True):
        assert rounds.is_calibrated
        own = places(rounds, len(case.models))
        (probabilities,) = calibration.probabilities(filled([own], calibration.centres))
        possible = [value for value, features in zip(probabilities, own, strict=True) if features]
        assert confidence == pytest.approx(max(possible))
        winner = rounds[0].candidates[rounds[0].winner]
        assert winner.decided_by == [pytest.approx(confidence)]
        assert rounds[0].criterion == "probability of being right" and rounds[0].highest_wins


@pytest.mark.slow
def test_without_a_calibration_the_confidence_is_a_score_and_the_highest_one_wins():
    for number in range(1, 8):
        output = selecting(random_case(number)).fast()
        for rounds in output.rounds:
            assert not rounds.is_calibrated
            assert all(one.features == [] for one in rounds[0].candidates)
            found = [one for one in rounds[0].candidates if one.dropped is None]
            found = [one for one in found if one.ends] or found
            shown = [one.decided_by[0] for one in found]
            assert rounds[0].candidates[rounds[0].winner].decided_by[0] == pytest.approx(max(shown))
            if len(rounds) == 1 and rounds[0].is_whole and rounds[0].words == split_words(rounds.text):
                num_words = sum(one is not None for one in rounds[0].confidences)
                assert rounds.confidence == pytest.approx(max(shown) ** num_words**0.5, rel=1e-4)


def test_an_answer_that_came_to_no_end_is_taken_where_no_other_did():
    strategy = make_strategy(AdaFuseConfig(method="select"))
    sure, unsure = [[[-0.1], [-0.1]]], [[[-2.0], [-2.0]]]
    loop, other = (ScoredSpan((" a", " a"), sure, [2, 2], (0,)), ScoredSpan((" b", " c"), sure, [2, 2], (1,)))
    whole = ScoredSpan((" d", END), unsure, [2, 1], (1,))
    choice = strategy.choose([loop, whole], [1.0], None)
    assert choice.winner == 1 and choice.scores[0] < choice.scores[1] and choice.notes == {0: "came to no end"}
    assert strategy.choose([loop, other], [1.0], None).winner == 0  # no answer is whole
    forbidden = ScoredSpan((" e", END), [[[-math.inf], [-0.1]]], [2, 1], (1,))
    assert strategy.choose([loop, whole, forbidden], [1.0], None).notes == {0: "came to no end"}
    assert strategy.choose([loop, forbidden], [1.0], None).winner == 0
    strategy.stop_texts = [" c"]
    assert strategy.choose([loop, other], [1.0], None).winner == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 5, 10, 15])
def test_features_of_a_batch_are_those_alone(number):
    case = selecting(random_case(number), with_features=True)
    together = case.fast()
    for row, prompt in enumerate(case.prompts):
        (alone,) = Case(case.models, case.tokenizers, case.config, [prompt], case.max_new_tokens).fast().rounds
        for one, other in zip(together.rounds[row][0].candidates, alone[0].candidates, strict=True):
            assert one.text == other.text and len(one.features) == len(other.features)
            for value, expected in zip(one.features, other.features, strict=True):
                assert (value is None) == (expected is None)
                assert value is None or value == pytest.approx(expected, abs=1e-3, rel=1e-4)


def test_members_that_agree_cost_little_more_than_one():
    tokenizer, models = TOKENIZERS["byte_level"](), [tiny_model(), tiny_model()]
    output = selecting(Case(models, [tokenizer] * 2, AdaFuseConfig(), PROMPTS[:1], 12)).fast()
    first, second = output.stats["members"]
    assert first["forward_passes"] > 4 and second["forward_passes"] <= 3
    assert len(output.rounds[0][0].candidates) == 1


def test_a_calibration_may_be_named_by_its_file(tmp_path):
    case = calibrated_case(2)
    expected = case.fast()
    values = case.config.method_options["calibration"]
    for name, content in {
        "adafuse.json": {"members": ["a"], "adafuse_config": {"method": "select", "calibration": values}},
        "alone.json": values,
    }.items():
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
        output = selecting(case, calibration=str(tmp_path / name)).fast()
        assert output.sequences.tolist() == expected.sequences.tolist()
        assert output.confidence == pytest.approx(expected.confidence)
    (tmp_path / "none.json").write_text('{"adafuse_config": null}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"`calibration` must be .+, but '.+none.json' holds none\. Fit one"):
        make_strategy(AdaFuseConfig(method="select", method_options={"calibration": str(tmp_path / "none.json")}))


def test_an_exported_ensemble_holds_the_calibration_and_not_the_name_of_its_file(tmp_path):
    case = Case([tiny_model()], [TOKENIZERS["byte_level"]()], AdaFuseConfig(), PROMPTS[:2], 8)
    values = random_calibration(1, 1)
    (tmp_path / "adafuse.json").write_text(json.dumps(values), encoding="utf-8")
    selecting(case, calibration=str(tmp_path / "adafuse.json"))
    folder = export_adafuse(tmp_path / "it", case.models[0], case.tokenizers[0], adafuse_config=case.config)
    expected = case.fast()
    (tmp_path / "adafuse.json").unlink()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.adafuse_config["calibration"] == values
    text = (folder / "custom_generate" / "exported.py").read_text("utf-8")
    assert ast.literal_eval(text.partition("ADAFUSE_CONFIG = ")[2].partition("\n\n#")[0])["calibration"] == values
    case.models = [enable_adafuse(model)]
    case.config = AdaFuseConfig.from_dict(model.generation_config.adafuse_config)
    assert case.fast().sequences.tolist() == expected.sequences.tolist()


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)])
def test_members_behind_servers_give_the_local_text(which):
    """With a calibration that does not look at the entropies, which are not known of them."""
    names = ["byte_level", "sentencepiece"]
    case = Case(
        [tiny_model("llama", name, seed) for seed, name in enumerate(names)],
        [TOKENIZERS[name]() for name in names],
        AdaFuseConfig(),
        PROMPTS[:3],
        10,
    )
    values = random_calibration(5, 2)
    for at, name in enumerate(feature_names(2)):
        if name.startswith("first entropy"):
            values["own"][at] = values["prompt"][at] = values["products"][0][at] = values["products"][1][at] = 0.0
    expected = selecting(case, calibration=values).fast()
    with ExitStack() as stack:
        for k in which:
            model, tokenizer = case.models[k], case.tokenizers[k]
            url = stack.enter_context(serving(StandIn(model, tokenizer)))
            case.models[k] = ServedModel(url, tokenizer=tokenizer, eos_token_id=model.generation_config.eos_token_id)
        output = case.fast()
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert output.confidence == pytest.approx(expected.confidence, abs=1e-3)
    unknown = [
        feature_names(2)[at] for at, value in enumerate(output.rounds[0][0].candidates[0].features) if value is None
    ]
    assert unknown == [f"first entropy, member {k}" for k in which]


def test_wrong_calibrations_are_refused_before_the_first_pass(monkeypatch):
    case = random_case(2)
    monkeypatch.setattr("hf_adafuse.members.member.Member.start", None)
    count = len(case.models)
    with pytest.raises(ValueError, match=rf"as many members as there are, {count}, but is of {count + 1}\. Fit it"):
        selecting(case, calibration=random_calibration(1, count + 1)).fast()
    other = random_calibration(1, count) | {"features": ["something else"]}
    with pytest.raises(ValueError, match=r"`calibration` must be of the \d+ features of this version, but is of \d+"):
        selecting(case, calibration=other).fast()
    few = Calibration.fit(
        np.random.default_rng(0).normal(size=(9, count, 2)), [[1] * count, [0] * count] * 4 + [[1] * count]
    )
    with pytest.raises(ValueError, match=r"features of this version, but is of 2 others\. Fit it again"):
        selecting(case, calibration=few.to_dict()).fast()
    case.config = AdaFuseConfig(method="select", model_weights="prompt")
    with pytest.raises(ValueError, match=r"`model_weights` must be numbers or left out with method 'select'"):
        case.fast()


def test_answers_that_came_to_no_end_are_told_from_others():
    case = random_case(1)
    text, whole = (feature_names(len(case.models)).index(f"word confidence, {name}") for name in ("text", "whole text"))
    case.config = AdaFuseConfig(method="select", method_options={"with_features": True})
    seen = set()
    for case.max_new_tokens in range(3, 25, 3):
        stop = next((one.text[1:3] for one in case.fast().rounds[0][0].candidates if len(one.text) > 3), "zz")
        for stops in (None, [stop]):
            for rounds in case.fast(stop_strings=stops).rounds:
                found = [one for one in rounds[0].candidates if one.features]
                has_stopped = [one.ends or any(text in one.text for text in stops or []) for one in found]
                for one, is_whole in zip(found, has_stopped, strict=True):
                    is_known = is_whole or not any(has_stopped)
                    assert one.features[whole] == (one.features[text] if is_known else None)
                    seen.add((is_whole, is_known, one.ends))
    assert {(True, True, False), (False, False, False), (False, True, False)} <= seen


def test_weights_count_in_agreement_and_score():
    case = random_case(3)
    weights = [100.0, *[1.0] * (len(case.models) - 1)]
    case.config = AdaFuseConfig(method="select", method_options={"with_features": True}, model_weights=weights)
    at = feature_names(len(weights)).index("agreement")
    for rounds in case.fast().rounds:
        own = next(one for one in rounds[0].candidates if 0 in one.proposers)
        assert own.features[at] >= 100 / sum(weights) - 1e-9


def test_an_ensemble_object_takes_it():
    case = calibrated_case(3)
    members = list(zip(case.models, case.tokenizers, strict=True))
    ensemble = AdaFuseEnsemble(members, case.config)
    prompts = random.Random(0).sample(PROMPTS, 3)
    found = ensemble.rounds(prompts, max_new_tokens=6)
    assert all(0 <= rounds.confidence <= 1 and rounds.is_calibrated for rounds in found)
    assert "probability of being right" in str(found[0])
