"""Enabling and disabling leave no trace; what is bound is checked at once, and is the default of a call."""

from __future__ import annotations

import copy

import pytest
import torch
from support.calls import BYTES, CHARS, PROMPT, arguments, inputs_of, no_forward, own, ran, state_of, with_attention
from support.tiny import tiny_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hf_adafuse import AdaFuseConfig, AdaFuseGenerationMixin, disable_adafuse, enable_adafuse


def test_enabling_swaps_the_class_and_nothing_else():
    model = own()
    before = state_of(model)
    weights = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in model.state_dict().items()}
    assert enable_adafuse(model) is model
    cls = type(model)
    assert (
        cls is not LlamaForCausalLM and issubclass(cls, LlamaForCausalLM) and isinstance(model, AdaFuseGenerationMixin)
    )
    assert (cls.__name__, cls.__qualname__, cls.__module__, cls.__doc__) == (
        LlamaForCausalLM.__name__,
        LlamaForCausalLM.__qualname__,
        LlamaForCausalLM.__module__,
        LlamaForCausalLM.__doc__,
    )
    assert state_of(model)[1:] == before[1:]
    assert {name: (tensor.data_ptr(), tensor.shape) for name, tensor in model.state_dict().items()} == weights
    assert enable_adafuse(model) is model and type(model) is cls
    assert type(enable_adafuse(own("llama", seed=1))) is cls
    assert disable_adafuse(model) is model
    assert type(model) is LlamaForCausalLM and state_of(model) == before
    assert disable_adafuse(model) is model and type(model) is LlamaForCausalLM


def test_disabling_leaves_a_class_of_ones_own_alone():
    class Mine(AdaFuseGenerationMixin, LlamaForCausalLM):
        pass

    model = Mine(tiny_model().config)
    assert type(enable_adafuse(model, adafuse_config=True)) is Mine
    assert type(disable_adafuse(model)) is Mine


def test_an_enabled_model_alone_generates_as_ever():
    plain, model = own(), enable_adafuse(own())
    given = inputs_of(BYTES, "She", PROMPT) | dict(max_new_tokens=8)
    for mode in (dict(do_sample=False), dict(num_beams=2, do_sample=False), dict(do_sample=True, top_k=5)):
        torch.manual_seed(0)
        expected = plain.generate(**given, **mode, output_scores=True, return_dict_in_generate=True)
        torch.manual_seed(0)
        got = model.generate(**given, **mode, output_scores=True, return_dict_in_generate=True)
        assert type(got) is type(expected) and torch.equal(got.sequences, expected.sequences)
        assert all(torch.equal(a, b) for a, b in zip(got.scores, expected.scores, strict=True))


def test_bound_assistants_are_the_default_and_a_call_overrides_them():
    bound, other = own("gpt2", "characters"), own("qwen3", "byte_level")
    main = enable_adafuse(own(), [bound], [CHARS], BYTES, AdaFuseConfig(max_words=1))
    given = inputs_of(BYTES) | dict(max_new_tokens=5, do_sample=False)
    expected = enable_adafuse(own()).generate(
        **given,
        tokenizer=BYTES,
        assistant_models=[bound],
        assistant_tokenizers=[CHARS],
        adafuse_config={"max_words": 1},
    )
    assert torch.equal(main.generate(**given), expected)
    assert ran(bound, lambda: main.generate(**given)) > 0
    override = dict(assistant_models=[other], assistant_tokenizers=[BYTES])
    assert ran(bound, lambda: main.generate(**given, **override)) == 0
    assert ran(other, lambda: main.generate(**given, **override)) > 0
    # The bound tokenizers belong to the bound assistants.
    with no_forward(main, bound, other), pytest.raises(ValueError, match=r"`assistant_tokenizers\[0\]` must be"):
        main.generate(**given, assistant_models=[other])
    assert ran(bound, lambda: main.generate(**given, adafuse_config=False)) == 0
    assert ran(bound, lambda: main.generate(**given, assistant_models=[])) == 0
    enable_adafuse(main)
    assert ran(bound, lambda: main.generate(**given)) == 0
    enable_adafuse(main, [bound], [CHARS], BYTES)
    disable_adafuse(main)
    assert torch.equal(main.generate(**given), own().generate(**given))
    enable_adafuse(main)  # what was bound before is gone
    assert ran(bound, lambda: main.generate(**given)) == 0


def test_what_is_no_model_cannot_be_disabled():
    with pytest.raises(ValueError, match="`model` must be a transformers model, but is None"):
        disable_adafuse(None)


def test_assistants_that_are_no_list_are_refused_in_a_call_too():
    main = enable_adafuse(own())
    for given in (torch.tensor([1, 2]), ""):
        with no_forward(main), pytest.raises(ValueError, match="`assistant_models` must be a list, but is "):
            main.generate(**inputs_of(BYTES), assistant_models=given, max_new_tokens=2)


def test_what_is_bound_is_checked_at_once():
    assistant, main = own("gpt2", "characters"), own()
    before = state_of(main)
    refusals = [
        (([assistant], [CHARS, CHARS], BYTES), "`assistant_tokenizers` must be one per assistant model"),
        (([assistant], None, BYTES), r"`assistant_tokenizers\[0\]` must be a tokenizer"),
        (([assistant], [CHARS], None), "`tokenizer` must be a tokenizer"),
        (([assistant], [CHARS], BYTES, {"model_weights": [1.0]}), "`model_weights` must be one per member"),
        (([assistant], [CHARS], BYTES, {"max_words": 0}), "`max_words` must be"),
        ((torch.tensor([1, 2]), None, BYTES), "`assistant_models` must be a list, but is tensor"),
        (("", None, BYTES), "`assistant_models` must be a list, but is ''"),
        (([assistant], torch.tensor(1), BYTES), "`assistant_tokenizers` must be a list, but is tensor"),
        (([with_attention("flex_attention")], [BYTES], BYTES), "'flex_attention'"),
    ]
    for given, match in refusals:
        with no_forward(main, assistant), pytest.raises(ValueError, match=match):
            enable_adafuse(main, *given)
        assert state_of(main) == before
    # A refusal leaves what was bound before.
    enable_adafuse(main, [assistant], [CHARS], BYTES)
    with pytest.raises(ValueError, match="`max_words` must be"):
        enable_adafuse(main, [assistant], [CHARS], BYTES, {"max_words": 0})
    assert ran(assistant, lambda: main.generate(**inputs_of(BYTES), max_new_tokens=2, do_sample=False)) > 0


def test_an_enabled_model_is_saved_as_its_base(tmp_path):
    main = enable_adafuse(own(), [own("gpt2", "characters")], [CHARS], BYTES, True)
    main.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LlamaForCausalLM and loaded.config.architectures == ["LlamaForCausalLM"]
    given = inputs_of(BYTES) | dict(max_new_tokens=5, do_sample=False)
    assert torch.equal(loaded.generate(**given), own().generate(**given))
    assert loaded.state_dict().keys() == own().state_dict().keys()


def test_an_enabled_class_loads_too(tmp_path):
    cls = type(enable_adafuse(own()))
    own().save_pretrained(tmp_path)
    loaded = cls.from_pretrained(tmp_path)
    assert isinstance(loaded, AdaFuseGenerationMixin)
    assert type(disable_adafuse(loaded)) is LlamaForCausalLM


def test_an_enabled_model_is_copied_and_pickled():
    import pickle

    main = enable_adafuse(copy.deepcopy(own()))
    for twin in (copy.deepcopy(main), copy.copy(main), pickle.loads(pickle.dumps(main))):
        assert type(twin) is type(main)
        assert torch.equal(twin.generate(**arguments()), main.generate(**arguments()))
        assert type(disable_adafuse(twin)) is LlamaForCausalLM
    assert isinstance(main, AdaFuseGenerationMixin)


class OwnArguments(LlamaForCausalLM):
    """As BLIP-2's, and much code from the Hub: `generate()` with arguments of its own."""

    def generate(self, input_ids, attention_mask=None, **kwargs):
        return "own", super().generate(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


class HandsOn(LlamaForCausalLM):
    """`generate()` that only adds something to transformers' own."""

    def generate(self, *args, **kwargs):
        return super().generate(*args, **kwargs)


class HandsOnByName(LlamaForCausalLM):
    def generate(self, inputs=None, generation_config=None, **kwargs):
        return super().generate(inputs, generation_config, **kwargs)


def made(cls):
    model = cls(tiny_model("llama", "byte_level").config).eval()
    model.load_state_dict(tiny_model("llama", "byte_level").state_dict())
    return model


def test_a_generate_with_arguments_of_its_own_stays_as_it_is():
    plain, model = made(OwnArguments), enable_adafuse(made(OwnArguments))
    inputs = inputs_of(BYTES, PROMPT)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    given = dict(max_new_tokens=8, do_sample=False)
    for args, kwargs in (((ids, mask), {}), ((ids,), dict(attention_mask=mask)), ((), dict(inputs))):
        expected, got = plain.generate(*args, **kwargs, **given), model.generate(*args, **kwargs, **given)
        assert got[0] == "own" and torch.equal(got[1], expected[1])


def test_an_ensemble_of_it_is_refused_by_name():
    assistants = dict(assistant_models=[own("gpt2")], assistant_tokenizers=[BYTES])
    match = r"transformers' `generate\(\)` with AdaFuse, but OwnArguments has its own, with the arguments input_ids, "
    with pytest.raises(ValueError, match=match):
        enable_adafuse(made(OwnArguments), **assistants, tokenizer=BYTES)
    model = enable_adafuse(made(OwnArguments))
    with no_forward(model), pytest.raises(ValueError, match=match):
        model.generate(**inputs_of(BYTES, PROMPT), **assistants, tokenizer=BYTES)
    model.generation_config.adafuse_config = {"num_branches": 2}
    with no_forward(model), pytest.raises(ValueError, match=match):
        model.generate(**inputs_of(BYTES, PROMPT), tokenizer=BYTES)


@pytest.mark.parametrize("cls", [HandsOn, HandsOnByName])
def test_a_generate_that_hands_on_what_it_is_given_knows_ensembles(cls):
    call = arguments(max_new_tokens=8)
    expected, got = (enable_adafuse(made(one)).generate(**call) for one in (LlamaForCausalLM, cls))
    assert torch.equal(got, expected)
