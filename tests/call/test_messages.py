"""Messages say what to do: for processors, wrapped models and settings that the caller did not write."""

from __future__ import annotations

import io
import sys

import pytest
import torch
from support.calls import BYTES, arguments, assert_refused, no_forward, own
from transformers import ProcessorMixin

from hf_adafuse import enable_adafuse
from hf_adafuse.cli import main


class Processor(ProcessorMixin):
    def __init__(self):
        self.tokenizer = BYTES

    def __repr__(self):
        return "line\n" * 30


def test_a_processor_holds_the_tokenizer():
    model = enable_adafuse(own())
    for name, given in (("tokenizer", Processor()), ("assistant_tokenizers", [Processor()])):
        match = r"must be a tokenizer, but is a Processor, which holds one\. Pass its `\.tokenizer`"
        with no_forward(model), pytest.raises(ValueError, match=match) as caught:
            model.generate(**arguments(**{name: given}))
        assert str(caught.value).startswith(f"`{name}") and "\n" not in str(caught.value)


def wrapped(kind):
    model = own()
    return {"DataParallel": torch.nn.DataParallel, "OptimizedModule": torch.compile}[kind](model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, where it is compiled first
@pytest.mark.parametrize(("kind", "name"), [("DataParallel", "module"), ("OptimizedModule", "_orig_mod")])
def test_a_wrapped_model_holds_the_model(kind, name):
    with pytest.raises(ValueError, match=rf"but is {kind}\. Pass the model inside it: its `\.{name}`\."):
        enable_adafuse(wrapped(kind))


def test_a_wrapped_assistant_holds_the_model():
    assert_refused(
        arguments(assistant_models=[wrapped("DataParallel")]), r"has DataParallel as .*: its `\.module`\.", form=False
    )


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (dict(num_beams=4), r"pass `num_beams=1` in the call, or set `model\.generation_config\.num_beams = 1`"),
        (dict(prompt_lookup_num_tokens=3), r"set `model\.generation_config\.prompt_lookup_num_tokens = None`"),
        (dict(cache_implementation="static"), r"pass `cache_implementation='dynamic'` in the call"),
        (dict(guidance_scale=1.5), r"pass `guidance_scale=1\.0` in the call"),
        (dict(output_attentions=True), r"pass `output_attentions=False` in the call"),
    ],
)
def test_settings_of_the_repository_say_where_they_stand(settings, advice):
    model = enable_adafuse(own())
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    assert_refused(arguments(), rf"stands in the model's own `generation_config`: {advice}", main=model)
    (name, value), *_ = settings.items()
    if name != "prompt_lookup_num_tokens":
        given = {"num_beams": 1, "cache_implementation": "dynamic", "guidance_scale": 1.0, "output_attentions": False}
        assert model.generate(**arguments(**{name: given[name]})).shape[0] == 1


def test_settings_of_the_call_are_to_be_left_out():
    assert_refused(arguments(num_beams=2), r"Leave out `num_beams`, `assistant_model`")


def test_a_standard_output_that_lacks_characters_shows_marks(monkeypatch, capsys):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr("hf_adafuse.cli.generate.run", lambda args: [sys.stdout.write("Jos\u00e9 \u732b\n"), 0][1])
    assert main(["generate", "x"]) == 0
    sys.stdout.flush()
    assert raw.getvalue() == b"Jos? ?\n"
    said = capsys.readouterr().err
    assert said.count("standard output is ascii") == 1 and "PYTHONIOENCODING=utf-8" in said
