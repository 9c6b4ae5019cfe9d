"""Settings that earlier versions wrote: read as what they were, with one warning that says what to write today."""

from __future__ import annotations

import dataclasses
import json
import warnings

import pytest
from support.cases import Case
from support.tiny import TOKENIZERS, tiny_model
from transformers import GenerationConfig

from hf_adafuse import AdaFuseConfig
from hf_adafuse.decoding.strategies.registry import make_strategy

pytestmark = [pytest.mark.every_case, pytest.mark.fast]

# What `AdaFuseConfig().to_dict()` was.
DEFAULTS = {
    "margin_threshold": 0.7,
    "max_words": 3,
    "num_branches": 3,
    "max_word_tokens": 32,
    "word_boundary": "whitespace",
    "model_weights": None,
    "nll_normalization": "token",
    "commitment": "adaptive",
    "exploration": "diverse",
    "fusion": "span",
    "word_mean": "arithmetic",
    "word_part": "whole",
    "empty_text": "any",
    "length_exponent": 1.0,
    "prompt_sharpness": 1.0,
    "online_rate": 0.0,
    "switch_margin": 0.0,
    "certainty_gate": None,
    "do_sample": None,
    "method": "adafuse",
}
ROBUST = DEFAULTS | {
    "fusion": "word",
    "word_mean": "root",
    "word_part": "weighted",
    "empty_text": "all",
    "model_weights": "examples",
    "prompt_sharpness": 20.0,
    "online_rate": 1.0,
}
WAS_ROBUST = AdaFuseConfig.robust().changed({"model_weights": "examples"})


def words(**options):
    return AdaFuseConfig(method="words", method_options=options)


def read(values, how=AdaFuseConfig.from_dict):
    """The settings, and the one message of the one warning that reading them gives; it is read again without any."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = how(values)
    assert [one.category for one in caught] == [FutureWarning]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert AdaFuseConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    make_strategy(config)
    return config, str(caught[0].message)


ALONE = [
    ({"fusion": "span"}, AdaFuseConfig(), "Leave them out"),
    ({"fusion": "horizon"}, AdaFuseConfig(method_options={"horizon": True}), 'Write {"horizon": true} instead'),
    ({"fusion": "word"}, words(), 'Write {"method": "words"} instead'),
    ({"word_mean": "arithmetic"}, AdaFuseConfig(), "Leave them out"),
    ({"word_part": "whole"}, AdaFuseConfig(), "Leave them out"),
    ({"empty_text": "any"}, AdaFuseConfig(), "Leave them out"),
    ({"fusion": "word", "word_mean": "root"}, words(mean="root"), '{"method": "words", "mean": "root"}'),
    ({"fusion": "word", "word_mean": "geometric"}, words(mean="geometric"), '"mean": "geometric"'),
    ({"fusion": "word", "word_part": "distinct"}, words(part="distinct"), '"part": "distinct"'),
    ({"fusion": "word", "word_part": "weighted"}, words(part="weighted"), '"part": "weighted"'),
    ({"fusion": "word", "empty_text": "all"}, words(allow_blank=False), '"allow_blank": false'),
    ({"fusion": "word", "empty_text": "any"}, words(allow_blank=True), '"allow_blank": true'),
    ({"fusion": "word", "length_exponent": 1.0}, words(), '{"method": "words"}'),
    (
        {"fusion": "horizon", "length_exponent": 0.5},
        AdaFuseConfig(method_options={"length_exponent": 0.5, "horizon": True}),
        'Write {"horizon": true} instead',
    ),
]


@pytest.mark.parametrize(("values", "expected", "said"), ALONE, ids=str)
def test_an_earlier_field(values, expected, said):
    config, message = read(values)
    assert config == expected and said in message
    assert all(repr(name) in message for name in values if name != "length_exponent")
    assert read({**values, "num_branches": 2})[0] == dataclasses.replace(expected, num_branches=2)


def test_a_length_exponent_is_an_option_of_the_same_name():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = AdaFuseConfig.from_dict({"length_exponent": 0.5})
    assert make_strategy(config).length_exponent == 0.5 and config.to_dict()["length_exponent"] == 0.5


def test_all_fields_as_they_were_written():
    assert read(DEFAULTS)[0] == AdaFuseConfig()
    assert read(ROBUST)[0] == WAS_ROBUST
    assert read(ROBUST, AdaFuseConfig.coerce)[0] == WAS_ROBUST
    assert read(DEFAULTS | {"length_exponent": 0.5})[0] == AdaFuseConfig(method_options={"length_exponent": 0.5})
    peer = DEFAULTS | {"method": "unite", "top_k": 5, "max_word_tokens": 8}
    assert read(peer)[0] == AdaFuseConfig(method="unite", method_options={"top_k": 5}, max_word_tokens=8)


BESIDE_PRESETS = [
    ({"preset": "robust", "word_part": "whole"}, "robust", {"part": "whole"}, {}),
    ({"preset": "robust", "word_mean": "arithmetic"}, "robust", {"mean": "arithmetic"}, {}),
    ({"preset": "robust", "empty_text": "any", "max_words": 1}, "robust", {"allow_blank": True}, {"max_words": 1}),
    ({"preset": "robust", "fusion": "word"}, "robust", {}, {}),
    ({"preset": "paper", "fusion": "word", "word_mean": "root"}, "words", {"mean": "root"}, {}),
    ({"preset": "paper", "fusion": "horizon"}, "paper", {"horizon": True}, {}),
    ({"preset": "robust", "word_part": "distinct", "model_weights": [2, 1]}, "robust", {"part": "distinct"}, {
        "model_weights": (2, 1), "prompt_sharpness": 1.0,
    }),
]  # fmt: skip


@pytest.mark.parametrize(("values", "base", "options", "fields"), BESIDE_PRESETS, ids=str)
def test_an_earlier_field_beside_a_preset(values, base, options, fields):
    expected = {"robust": AdaFuseConfig.robust(), "paper": AdaFuseConfig(), "words": words()}[base]
    expected = dataclasses.replace(expected, method_options={**expected.method_options, **options}, **fields)
    assert read(values, AdaFuseConfig.coerce)[0] == expected


def test_another_comparison_leaves_the_other_fields_of_a_preset():
    expected = dataclasses.replace(AdaFuseConfig.robust(), method="adafuse", method_options={})
    assert read({"preset": "robust", "fusion": "span"}, AdaFuseConfig.coerce)[0] == expected
    assert read({"fusion": "span"}, AdaFuseConfig.robust().changed)[0] == expected
    horizon = AdaFuseConfig(method_options={"horizon": True, "length_exponent": 0.5})
    assert read({"fusion": "span"}, horizon.changed)[0].method_options == {"length_exponent": 0.5}
    assert read({"fusion": "horizon"}, horizon.changed)[0] == horizon


def test_files(tmp_path):
    path = tmp_path / "adafuse.json"
    for content, members in [(ROBUST, []), ({"adafuse_config": ROBUST, "members": ["a", "b"]}, ["a", "b"])]:
        path.write_text(json.dumps(content), encoding="utf-8")
        (config, found), _ = read_file(path)
        assert config == WAS_ROBUST and found == members
    path.write_text(json.dumps({"preset": "robust", "word_part": "whole"}), encoding="utf-8")
    (config, _), message = read_file(path)
    assert config.method_options["part"] == "whole" and '{"part": "whole"}' in message


def read_file(path):
    with pytest.warns(FutureWarning) as caught:
        found = AdaFuseConfig.from_file(path)
    assert len(caught) == 1
    return found, str(caught[0].message)


def test_a_generation_config_decodes_as_it_did(tmp_path):
    models = [tiny_model("llama", "byte_level", 0), tiny_model("gpt2", "sentencepiece", 1)]
    tokenizers = [TOKENIZERS["byte_level"](), TOKENIZERS["sentencepiece"]()]
    expected = Case(models, tokenizers, WAS_ROBUST, ["Once upon a time"], 8).fast().sequences.tolist()
    GenerationConfig(adafuse_config=ROBUST).save_pretrained(tmp_path)
    stored = GenerationConfig.from_pretrained(tmp_path).adafuse_config
    case = Case(models, tokenizers, stored, ["Once upon a time"], 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        found = case.fast().sequences.tolist()
    assert found == expected
    assert [one.category for one in caught if "earlier version" in str(one.message)] == [FutureWarning]


WRONG = [
    ({"fusion": "spans"}, r"^`fusion` must be one of \['span', 'horizon', 'word'\], but is 'spans'\. "),
    ({"fusion": "word", "word_mean": "median"}, r"^`word_mean` must be one of .+, but is 'median'\. "),
    ({"fusion": "word", "empty_text": True}, r"^`empty_text` must be one of .+, but is True\. "),
    ({"word_mean": "root"}, r"^`word_mean` must be 'arithmetic' with method 'adafuse', .+ but is 'root'\. "),
    ({"fusion": "horizon", "word_part": "distinct"}, r"^`word_part` must be 'whole' with method 'adafuse', "),
    ({"method": "unite", "fusion": "word"}, r"^`fusion` must be 'span' with method 'unite', .+ but is 'word'\. "),
    ({"method": "unite", "fusion": "horizon"}, r"^`fusion` must be 'span' with method 'unite', "),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=str)
def test_what_was_refused_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        AdaFuseConfig.from_dict(values)


def test_an_exponent_of_the_length_does_not_go_with_the_word_rule():
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match="'length_exponent'"):
        AdaFuseConfig.from_dict({"fusion": "word", "length_exponent": 0.5})
    with (
        pytest.warns(FutureWarning),
        pytest.raises(ValueError, match=r"^`nll_normalization` must be 'token' with method 'words'"),
    ):
        AdaFuseConfig.from_dict({"fusion": "word", "nll_normalization": "byte"})


def test_earlier_fields_are_no_arguments():
    for name in ("fusion", "word_mean", "word_part", "empty_text", "length_exponent"):
        with pytest.raises(TypeError, match=name):
            AdaFuseConfig(**{name: DEFAULTS[name]})


def test_settings_of_today_give_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for config in (AdaFuseConfig.robust(), AdaFuseConfig(), words(mean="root"), AdaFuseConfig(method="unite")):
            assert AdaFuseConfig.from_dict(config.to_dict()) == config
        assert AdaFuseConfig.coerce({"preset": "robust", "part": "whole"}).method_options["part"] == "whole"
