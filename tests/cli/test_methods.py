"""`--method` and `--option`: what the settings become, and what is refused before a model is loaded."""

from __future__ import annotations

import argparse

import pytest

from hf_adafuse import AdaFuseConfig
from hf_adafuse.cli import main
from hf_adafuse.cli.config_flags import adafuse_config, add_config_arguments


def parsed(*flags):
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    return parser.parse_args(flags)


class Stored:
    """A model whose generation config has settings."""

    def __init__(self, settings):
        self.generation_config = argparse.Namespace(adafuse_config=settings)


def test_a_method_with_its_options():
    config = adafuse_config(parsed("--method", "unite", "--option", "top_k=3", "--option", "zero_repeated=true"))
    assert config == AdaFuseConfig(method="unite", method_options={"top_k": 3, "zero_repeated": True})
    config = adafuse_config(parsed("--method", "safe", "--option", "num_tokens=3", "--option", "ensemble=gac"))
    assert config.method_options == {"num_tokens": 3, "ensemble": "gac"}
    config = adafuse_config(parsed("--method", "majority", "--option", r"pattern=\d+", "--weights", "2,1"))
    assert config.method_options == {"pattern": r"\d+"}
    assert config.model_weights == (2.0, 1.0)


def test_flags_go_over_stored_settings_of_the_same_method_alone():
    stored = Stored({"method": "unite", "top_k": 3, "max_word_tokens": 5})
    assert adafuse_config(parsed("--option", "zero_repeated=true"), stored).method_options == {
        "top_k": 3, "zero_repeated": True,
    }  # fmt: skip
    assert adafuse_config(parsed("--method", "gac"), stored) == AdaFuseConfig(method="gac")
    assert adafuse_config(parsed("--method", "gac"), Stored({"method": "words"})) == AdaFuseConfig(method="gac")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--method", "unit"], "`--method` must be one of adafuse, words, unite, gac"),
        (["--method", "unit"], ", but is 'unit'. Did you mean unite?"),
        (["--method", "mine"], ", but is 'mine'. Choose one of these.\n"),
        (["--method", "unite", "--option", "top_n=3"], "top_n"),
        (
            ["--method", "unite", "--option", "topk=5"],
            "`adafuse_config` must be made of fields of AdaFuseConfig and options of method 'unite' (top_k, "
            "zero_repeated), but has 'topk'. Did you mean top_k? Correct it.\n",
        ),
        (["--method", "unite", "--option", "top_k=0"], "`top_k` must be"),
        (["--method", "unite", "--option", "top_k"], "NAME=VALUE"),
        (["--option", "top_k=3"], "top_k"),
        (["--method", "unite", "--branches", "2"], "--branches"),
        (["--method", "unite", "--preset", "robust"], "--preset"),
        (["--method", "majority", "--option", "pattern=("], "`pattern` must be"),
        (["--method", "sweetspan", "--option", "num_words=0"], "`num_words` must be"),
        (["--method", "gac", "--option", "threshold=2"], "`threshold` must be"),
        (["--method", "safe", "--option", "sharpening=softmax"], "`sharpening` must be"),
        (["--method", "specfuse", "--option", "score=votes"], "`score` must be"),
    ],
    ids=" ".join,
)
def test_what_is_wrong_is_refused_before_models_are_loaded(flags, named, capsys):
    assert main(["generate", "hello", "--model", "no-such-folder", *flags]) == 2
    assert named in capsys.readouterr().err
