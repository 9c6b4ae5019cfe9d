"""`AdaFuseConfig`: every field's range and message, what `adafuse_config` may be, and the ways there and back."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch

from hf_adafuse import AdaFuseConfig, SpanStrategy, register_strategy
from hf_adafuse.decoding.strategies.registry import STRATEGIES, make_strategy, options_of
from hf_adafuse.settings.config_checks import OPTIONS_OF_PRESETS, USES

pytestmark = [pytest.mark.every_case, pytest.mark.fast]

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
    "prompt_sharpness": 1.0,
    "online_rate": 0.0,
    "switch_margin": 0.0,
    "certainty_gate": None,
    "do_sample": None,
    "method": "adafuse",
}
NOT_DEFAULTS = {
    "margin_threshold": 0.25,
    "max_words": 5,
    "num_branches": 2,
    "max_word_tokens": 7,
    "word_boundary": "unicode",
    "model_weights": [1.0, 0.5],
    "nll_normalization": "byte",
    "commitment": "adaptive",
    "exploration": "beam",
    "prompt_sharpness": 1.0,
    "online_rate": 1.5,
    "switch_margin": 0.25,
    "certainty_gate": 0.9,
    "do_sample": True,
    "method": "adafuse",
    "horizon": True,
    "length_exponent": 0.5,
}
# Those that are of no use with the ones above.
OTHERS = DEFAULTS | {
    "commitment": "fixed",
    "model_weights": "examples",
    "prompt_sharpness": 8.0,
    "method": "words",
    "mean": "geometric",
    "part": "distinct",
    "allow_blank": False,
}
# With what a field is of use.
WITH = {"prompt_sharpness": {"model_weights": "prompt"}}
COUNTS = ("max_words", "num_branches", "max_word_tokens")
CHOICES = {
    "word_boundary": ("whitespace", "unicode"),
    "nll_normalization": ("token", "byte"),
    "commitment": ("adaptive", "fixed"),
    "exploration": ("diverse", "beam"),
}
NUMBERS = ("prompt_sharpness", "online_rate", "switch_margin")
REFUSED = [
    *[("margin_threshold", value) for value in (-0.01, -1, math.nan, math.inf, -math.inf, "0.7", None, True, [0.7])],
    *[(name, value) for name in COUNTS for value in (0, -1, 1.0, 2.5, math.nan, "3", None, True, False, [3])],
    *[(name, value) for name in CHOICES for value in ("", "Token", "greedy", None, 0, True, ["token"], {})],
    *[
        ("model_weights", value)
        for value in ([], (), [0.0, 1.0], [-1.0, 1.0], [math.nan], [math.inf], [True], ["1"], [None], [[1.0]])
    ],
    *[("model_weights", value) for value in ([1e308, 1e308], [1.0, 1e-320], [1.0, 10**400])],
    *[("model_weights", value) for value in (1.0, 1, True, False, "12", b"12", {"a": 1.0}, {})],
    *[("do_sample", value) for value in ("true", 2, [], {})],
    *[(name, value) for name in NUMBERS for value in (-0.1, math.nan, -math.inf, "1", None, True)],
    *[(name, value) for name in NUMBERS if name != "switch_margin" for value in (math.inf, 1e308, 10**400)],
    *[("certainty_gate", value) for value in (0, -0.5, 1.5, math.nan, "0.5", True)],
    ("model_weights", "promt"),
]


def test_defaults_are_the_papers():
    assert AdaFuseConfig().to_dict() == DEFAULTS
    assert [field.name for field in dataclasses.fields(AdaFuseConfig)] == [*DEFAULTS, "method_options"]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=repr)
def test_a_field_out_of_range_is_refused(name, value):
    with pytest.raises(ValueError, match=f"^`{name}` must be ") as error:
        AdaFuseConfig(**{name: value})
    _assert_form(str(error.value), name, value)
    with pytest.raises(ValueError, match=f"^`{name}` must be ") as again:
        AdaFuseConfig.from_dict({name: value})
    assert str(again.value) == str(error.value)


def _assert_form(message: str, name: str, value: object) -> None:
    """`` `field` must be <rule>, but is <value>. <what to do> ``"""
    head, _, tail = message.partition(", but is ")
    assert head.startswith(f"`{name}` must be ") and len(head) > len(f"`{name}` must be "), message
    shown = repr(list(value) if name == "model_weights" and isinstance(value, tuple) else value)
    assert tail.startswith(f"{shown}. "), message
    advice = tail.removeprefix(f"{shown}. ")
    assert len(advice) > 10 and advice.endswith("."), message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("margin_threshold", value) for value in (0, 0.0, 1, 1.1, 1e9)],
        *[(name, value) for name in COUNTS for value in (1, 2, 10**6)],
        *[(name, value) for name, values in CHOICES.items() for value in values],
        *[
            ("model_weights", value)
            for value in (None, [1], [0.1, 5], (2.0, 3), range(1, 3), "prompt", [1e100, 1e-100])
        ],
        *[(name, value) for name in NUMBERS for value in (0.0, 0.5, 2, 10)],
        *[(name, 1e6) for name in NUMBERS],
        *[("certainty_gate", value) for value in (None, 0.001, 1, 1.0)],
        ("switch_margin", math.inf),
    ],
    ids=repr,
)
def test_the_ends_of_each_range_are_accepted(name, value):
    others = WITH.get(name, {})
    config = AdaFuseConfig(**{name: value}, **others)
    given = tuple(value) if name == "model_weights" and value not in (None, "prompt") else value
    assert getattr(config, name) == given
    assert config.to_dict() == DEFAULTS | others | {name: list(given) if isinstance(given, tuple) else given}


def test_weights_are_kept_as_floats_and_not_as_the_callers_list():
    weights = [1, 2]
    config = AdaFuseConfig(model_weights=weights)
    weights.append(3)
    assert config.model_weights == (1.0, 2.0)
    assert all(type(weight) is float for weight in config.model_weights)
    config.to_dict()["model_weights"].append(3)
    assert config.model_weights == (1.0, 2.0)


@pytest.mark.parametrize(
    ("unknown", "hint"),
    [
        ({"zzz": 0.5}, f"The fields are {', '.join(DEFAULTS)}, method_options. "),
        ({"max_word": 1, "max_words": 2}, "Did you mean max_words?"),
        ({"Max_words": 2}, "Did you mean max_words?"),
        ({"num_branch": 1}, "Did you mean num_branches?"),
    ],
)
def test_an_unknown_field_is_refused(unknown, hint):
    with pytest.raises(ValueError, match=r"^`adafuse_config` must be .+, but has .+\. .+") as error:
        AdaFuseConfig.from_dict(unknown)
    name = next(iter(unknown))
    assert f"but has {name!r}. {hint}" in str(error.value)
    with pytest.raises(TypeError, match=name):
        AdaFuseConfig(**unknown)


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("model_weights", np.array([1, 2]), (1.0, 2.0)),
        ("model_weights", np.array([0.5, 2], dtype=np.float32), (0.5, 2.0)),
        ("model_weights", torch.tensor([0.5, 2]), (0.5, 2.0)),
        ("model_weights", [np.float16(0.5), torch.tensor(2), Fraction(1, 4)], (0.5, 2.0, 0.25)),
        ("max_words", np.int64(3), 3),
        ("num_branches", torch.tensor(2), 2),
        ("margin_threshold", np.float32(0.5), 0.5),
        ("margin_threshold", np.array(0.5), 0.5),
        ("certainty_gate", torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        ("do_sample", np.True_, True),
        ("method", np.str_("gac"), "gac"),
    ],
    ids=repr,
)
def test_numbers_of_other_libraries_become_pythons_own(name, value, plain):
    config = AdaFuseConfig.from_dict({name: value})
    found = getattr(config, name)
    assert found == plain and type(found) is type(plain)
    assert config == AdaFuseConfig.from_dict(json.loads(json.dumps(config.to_dict())))


def test_options_may_be_numbers_of_other_libraries_too():
    config = AdaFuseConfig.from_dict({"method": "unite", "top_k": np.int64(5)})
    assert make_strategy(config).top_k == 5 and type(config.method_options["top_k"]) is int


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_words", np.int64(0)),
        ("max_words", np.float64(2)),
        ("max_words", np.True_),
        ("max_words", np.array([3])),
        *[(name, np.array(["a", "b"])) for name in (*CHOICES, "method", "switch_margin", "prompt_sharpness")],
        *[(name, torch.tensor([1, 2])) for name in (*CHOICES, "method", "switch_margin", "prompt_sharpness")],
        ("margin_threshold", np.float32("nan")),
        ("model_weights", np.ones((2, 2))),
        ("model_weights", torch.tensor([1.0, -1.0])),
        ("model_weights", torch.tensor(1.0)),
    ],
    ids=repr,
)
def test_their_ranges_are_the_same(name, value):
    with pytest.raises(ValueError, match=f"^`{name}` must be "):
        AdaFuseConfig(**{name: value})
    for read in (AdaFuseConfig.from_dict, AdaFuseConfig.robust().changed):
        with pytest.raises(ValueError, match=f"^`{name}` must be "):
            read({name: value})


def test_keys_of_mixed_types_are_refused_too():
    with pytest.raises(ValueError, match=r"^`adafuse_config` must be "):
        AdaFuseConfig.from_dict({1: 2, "margin": 0.5})


def test_frozen():
    config = AdaFuseConfig()
    for name in DEFAULTS:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, OTHERS[name])
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(config, name)
    assert config == AdaFuseConfig()


@pytest.mark.parametrize("values", [DEFAULTS, NOT_DEFAULTS, OTHERS], ids=["defaults", "not defaults", "others"])
def test_round_trips(values):
    config = AdaFuseConfig.from_dict(values)
    assert config.to_dict() == values
    assert AdaFuseConfig.from_dict(config.to_dict()) == config
    assert AdaFuseConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(config, protocol)) == config
    assert copy.deepcopy(config) == config and copy.copy(config) == config
    assert hash(AdaFuseConfig.from_dict(values)) == hash(config)
    assert dataclasses.replace(config, max_words=9).to_dict() == values | {"max_words": 9}


def test_missing_fields_take_their_defaults():
    assert AdaFuseConfig.from_dict({}) == AdaFuseConfig()
    assert AdaFuseConfig.from_dict({"max_words": 1}) == AdaFuseConfig(max_words=1)


def test_what_adafuse_config_may_be():
    config = AdaFuseConfig(max_words=1)
    assert AdaFuseConfig.coerce(config) is config
    assert AdaFuseConfig.coerce({"max_words": 1}) == config
    assert AdaFuseConfig.coerce(True) == AdaFuseConfig.robust()
    assert AdaFuseConfig.coerce({}) == AdaFuseConfig()
    assert AdaFuseConfig.coerce("robust") == AdaFuseConfig.robust() != AdaFuseConfig()
    assert AdaFuseConfig.coerce("paper") == AdaFuseConfig()
    assert AdaFuseConfig.coerce(False) is None
    assert AdaFuseConfig.coerce(None) is None


@pytest.mark.parametrize("value", ["0.7", 0.7, 0, 1, [("max_words", 1)], AdaFuseConfig, {1, 2}], ids=repr)
def test_anything_else_is_refused(value):
    with pytest.raises(ValueError, match=r"^`adafuse_config` must be ") as error:
        AdaFuseConfig.coerce(value)
    assert f", but is {value!r}. " in str(error.value)


@pytest.mark.parametrize("value", [None, 5, "robust", [1], [("max_words", 1)]], ids=repr)
def test_settings_that_are_no_dict_are_refused(value):
    for read in (AdaFuseConfig.from_dict, AdaFuseConfig.robust().changed):
        with pytest.raises(ValueError, match=r"^`adafuse_config` must be a dict of fields and options, ") as error:
            read(value)
        _assert_form(str(error.value), "adafuse_config", value)


@pytest.mark.parametrize("value", [5, 0, "x", "", [1], [], True, False], ids=repr)
@pytest.mark.parametrize("beside", [{"method": "words", "mean": "root"}, {"preset": "robust"}, {"horizon": True}, {}])
def test_options_that_are_no_dict_are_refused_beside_others_too(tmp_path, beside, value):
    given = {**beside, "method_options": value}
    path = tmp_path / "adafuse.json"
    path.write_text(json.dumps(given), encoding="utf-8")
    for read, values in [
        (AdaFuseConfig.from_dict, given),
        (AdaFuseConfig.from_file, path),
        (AdaFuseConfig.robust().changed, {"method_options": value}),
    ]:
        with pytest.raises(ValueError, match=r"^`method_options` must be a dict, ") as error:
            read(values)
        _assert_form(str(error.value), "method_options", value)


@pytest.mark.parametrize("value", [None, 5, {}, ["adafuse.json"]], ids=repr)
def test_what_is_no_name_of_a_file_is_refused(value):
    with pytest.raises(ValueError, match=r"^`adafuse_config` must be a file in JSON that holds settings, but is "):
        AdaFuseConfig.from_file(value)


@pytest.mark.parametrize("members", [5, "llama", "", [1], {"a": 1}, False], ids=repr)
def test_the_members_of_a_file_are_a_list_of_names(tmp_path, members):
    path = tmp_path / "adafuse.json"
    path.write_text(json.dumps({"adafuse_config": {}, "members": members}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"^`members` must be a list of names in the file ") as error:
        AdaFuseConfig.from_file(path)
    _assert_form(str(error.value), "members", members)
    path.write_text(json.dumps({"adafuse_config": {}, "members": None}), encoding="utf-8")
    assert AdaFuseConfig.from_file(path) == (AdaFuseConfig(), [])


def test_a_peer_has_its_options_beside_the_fields():
    values = {"method": "sweetspan", "num_words": 2, "max_word_tokens": 5}
    config = AdaFuseConfig.from_dict(values)
    assert config == AdaFuseConfig(method="sweetspan", method_options={"num_words": 2}, max_word_tokens=5)
    assert config != AdaFuseConfig(method="sweetspan", method_options={"num_words": 3}, max_word_tokens=5)
    assert config.to_dict() == DEFAULTS | values
    assert AdaFuseConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert pickle.loads(pickle.dumps(config)) == config
    given = {"num_words": 2}
    config = AdaFuseConfig(method="sweetspan", method_options=given)
    given["num_words"] = 9
    assert config.method_options == {"num_words": 2}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"method": ""}, "method"),
        ({"method": 3}, "method"),
        ({"method_options": "mean"}, "method_options"),
        ({"method_options": {"top_k": 2}}, "top_k"),
        ({"method_options": {"mean": "root"}}, "mean"),
        ({"method": "words", "method_options": {"length_exponent": 0.5}}, "length_exponent"),
    ],
    ids=repr,
)
def test_what_does_not_go_with_a_method_is_refused(values, named):
    with pytest.raises(ValueError, match=r"must be .+, but .+\. .+") as error:
        AdaFuseConfig(**values)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("values", "name", "needed"),
    [
        ({"prompt_sharpness": 2.0}, "prompt_sharpness", '`model_weights` "prompt" or "examples"'),
        ({"prompt_sharpness": 2.0, "model_weights": [1, 2]}, "prompt_sharpness", "`model_weights` "),
        ({"prompt_sharpness": 2.0, "method": "unite"}, "prompt_sharpness", "`model_weights` "),
        ({"exploration": "beam", "commitment": "fixed"}, "exploration", '`commitment="adaptive"`'),
    ],
    ids=str,
)
def test_what_would_not_be_used_is_refused(values, name, needed):
    with pytest.raises(ValueError, match=f"^`{name}` must be ") as error:
        AdaFuseConfig(**values)
    _assert_form(str(error.value), name, values[name])
    assert f" without {needed}" in str(error.value)
    with pytest.raises(ValueError, match=f"^`{name}` must be "):  # as an older version may have stored it
        AdaFuseConfig.coerce(AdaFuseConfig().to_dict() | values)


def test_settings_that_are_changed_take_what_they_alone_use_with_them():
    robust = AdaFuseConfig.robust()
    changed = robust.changed({"model_weights": [2, 1], "max_words": 1})
    assert changed == dataclasses.replace(robust, model_weights=(2, 1), prompt_sharpness=1.0, max_words=1)
    assert robust.changed({"max_words": 1}) == dataclasses.replace(robust, max_words=1)
    assert robust.changed({"method": "words", "max_words": 1}) == dataclasses.replace(robust, max_words=1)
    assert robust.changed({"method": "adafuse", "max_words": 1}) == AdaFuseConfig(max_words=1)  # those alone
    for values in ({"mean": "geometric"}, {"method_options": {"mean": "geometric"}}):
        options = {"mean": "geometric", "part": "weighted", "allow_blank": False}
        assert robust.changed(values) == dataclasses.replace(robust, method_options=options)
    assert AdaFuseConfig.from_dict({"length_exponent": 0.5}).changed({"horizon": True}).method_options == {
        "length_exponent": 0.5,
        "horizon": True,
    }
    assert AdaFuseConfig(exploration="beam").changed({"commitment": "fixed"}) == AdaFuseConfig(commitment="fixed")


# Per method, fields that it does not use.
USELESS = {
    "words": {"nll_normalization": "byte"},
    "unite": {"nll_normalization": "byte", "num_branches": 2, "certainty_gate": 0.5, "online_rate": 1.0},
    "sweetspan": {"num_branches": 2, "commitment": "fixed", "exploration": "beam", "switch_margin": 1.0},
    "majority": {"margin_threshold": 0.5, "max_words": 2},
}


@pytest.mark.parametrize(("method", "name"), [(method, name) for method in USELESS for name in USELESS[method]])
def test_a_field_that_the_method_does_not_use_is_refused(method, name):
    value = USELESS[method][name]
    with pytest.raises(ValueError, match=f"^`{name}` must be ") as error:
        AdaFuseConfig(**{"method": method, name: value})
    _assert_form(str(error.value), name, value)
    assert f" with method '{method}', which does not use it" in str(error.value)
    make_strategy(AdaFuseConfig(method=method))
    make_strategy(AdaFuseConfig(**{name: value}))  # AdaFuse uses all fields


@pytest.mark.parametrize("method", ["adafuse", "words"])
def test_adafuse_and_the_word_rule_use_what_says_how_members_propose(method):
    fields = {name: NOT_DEFAULTS[name] for name in DEFAULTS if name not in ("method", "nll_normalization")}
    make_strategy(AdaFuseConfig(**{**fields, "word_boundary": "whitespace", "method": method}))


def test_a_method_of_ones_own_says_which_fields_it_uses():
    class Branching(SpanStrategy):
        uses = ("num_branches",)

    class Wrong(SpanStrategy):
        uses = ("branches",)

    register_strategy("branching", Branching)
    make_strategy(AdaFuseConfig(method="branching", num_branches=2))
    with pytest.raises(ValueError, match=r"^`max_words` must be 3 with method 'branching', which does not use it"):
        make_strategy(AdaFuseConfig(method="branching", max_words=2))
    with pytest.raises(ValueError, match=r"^`cls.uses` must be names of fields of .+, but has \['branches'\]\. "):
        register_strategy("wrong", Wrong)


def test_the_fields_and_options_that_are_known_without_the_methods_are_the_methods():
    assert {method: cls.uses for method, cls in STRATEGIES.items() if method in USES} == USES
    own = [method for method, cls in STRATEGIES.items() if cls.__module__.startswith("hf_adafuse.")]
    assert sorted(own) == sorted(USES)
    for method, options in OPTIONS_OF_PRESETS.items():
        assert options == tuple(options_of(method))


OPTIONS = [
    *[("words", "mean", value) for value in ("arithmetic", "root", "geometric")],
    *[("words", "part", value) for value in ("whole", "distinct", "weighted")],
    *[("words", "allow_blank", value) for value in (True, False)],
    *[("adafuse", "horizon", value) for value in (True, False)],
    *[("adafuse", "length_exponent", value) for value in (0, 0.0, 0.5, 2, 10)],
]
WRONG_OPTIONS = [
    *[("words", name, value) for name in ("mean", "part") for value in ("", "Root", None, 0, True, ["root"], {})],
    *[("words", "allow_blank", value) for value in ("any", "all", None, 0, 1, [])],
    *[("adafuse", "horizon", value) for value in ("true", None, 0, 1, [])],
    *[("adafuse", "length_exponent", value) for value in (-0.1, 11, math.nan, math.inf, -math.inf, "1", None, True)],
    *[("adafuse", "length_exponent", value) for value in (1e308, 10**400)],
    # No float holds 10**400. With a learning rate beyond 200 the logits of DeePEn overflow.
    *[("deepen", "learning_rate", value) for value in (-0.1, math.inf, 101, 1e308, 10**400)],
    *[("deepen", "num_steps", value) for value in (0, 1.0, 10**400)],
    *[
        (method, name, 10**400)
        for method, name in [("specfuse", "learning_rate"), ("anchor", "beta"), ("gac", "threshold")]
    ],
    *[(method, name, 10**400) for method, name in [("unite", "top_k"), ("sweetspan", "filter_ratio")]],
]


@pytest.mark.parametrize(("method", "name", "value"), OPTIONS, ids=repr)
def test_the_values_of_options(method, name, value):
    config = AdaFuseConfig.from_dict({"method": method, name: value})
    assert getattr(make_strategy(config), name) == value
    assert config.to_dict() == DEFAULTS | {"method": method, name: value}


@pytest.mark.parametrize(("method", "name", "value"), WRONG_OPTIONS, ids=repr)
def test_an_option_out_of_range_is_refused(method, name, value):
    with pytest.raises(ValueError, match=f"^`{name}` must be ") as error:
        make_strategy(AdaFuseConfig.from_dict({"method": method, name: value}))
    _assert_form(str(error.value), name, value)


def test_a_dict_may_change_a_preset():
    """The same as `--preset robust --branches 1` in the shell."""
    changed = AdaFuseConfig.coerce({"preset": "robust", "num_branches": 1})
    assert changed == dataclasses.replace(AdaFuseConfig.robust(), num_branches=1)
    assert AdaFuseConfig.coerce({"preset": "paper", "num_branches": 1}) == AdaFuseConfig(num_branches=1)
    assert AdaFuseConfig.from_dict({"preset": "robust", "num_branches": 1}) == changed
    assert AdaFuseConfig.coerce({"num_branches": 1}) == AdaFuseConfig(num_branches=1)
    with pytest.raises(ValueError, match=r"`preset` must be one of \['paper', 'robust'\], but is 'best'\. Check the"):
        AdaFuseConfig.coerce({"preset": "best"})
