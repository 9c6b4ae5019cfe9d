"""What asks for sampling: the call and the settings of AdaFuse do, a default does not."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from support.adapted import PEFT_WARNINGS, with_adapters
from support.calls import BYTES, CHARS, inputs_of, own
from support.chats import propagating
from support.tiny import TOKENIZERS, tiny_model
from transformers import GenerationConfig, pipeline
from transformers.utils.logging import warning_once

import hf_adafuse.pipelines
from hf_adafuse import AdaFuseConfig, enable_adafuse
from hf_adafuse.call import sampling
from hf_adafuse.call.sampling import SamplingRequest, requested_sampling, warper_of

pytestmark = PEFT_WARNINGS

TASKS = ["text-generation", hf_adafuse.pipelines.TASK]
PROMPT = "Once upon a time"
CONFIG = AdaFuseConfig(max_word_tokens=4)


def ensemble(**settings):
    return dict(
        assistant_models=[tiny_model("gpt2", "characters")],
        assistant_tokenizers=[CHARS],
        adafuse_config=AdaFuseConfig(max_word_tokens=4, **settings),
    )


def main(**generation_config):
    """An enabled model with these defaults."""
    model = enable_adafuse(own())
    model.generation_config.update(**generation_config)
    return model


def answers(model, times=4, n=8, given=None, **kwargs):
    """The texts of several seeds: one where nothing is sampled."""
    found = set()
    for seed in range(times):
        torch.manual_seed(seed)
        given_now = inputs_of(BYTES, PROMPT) | dict(tokenizer=BYTES, max_new_tokens=n) | (given or ensemble()) | kwargs
        output = model.generate(**{name: value for name, value in given_now.items() if value is not None})
        found.add(tuple(output[0].tolist()))
    return found


def is_sampled(model, **kwargs):
    """Whether a call samples; where it does not, it gives the text of one that says so."""
    found = answers(model, **kwargs)
    if len(found) > 1:
        return True
    clean = {name: value for name, value in kwargs.items() if name in ("given", "n")}
    clean["given"] = dict(clean.get("given") or ensemble())
    clean["given"]["adafuse_config"] = AdaFuseConfig(max_word_tokens=4)
    assert found == answers(enable_adafuse(own()), times=1, do_sample=False, **clean)
    return False


# Calls of `generate()`.


def test_a_call_asks():
    assert is_sampled(main(), do_sample=True)
    assert not is_sampled(main())
    assert not is_sampled(main(), do_sample=False)
    assert is_sampled(main(do_sample=False), do_sample=True)


@pytest.mark.parametrize("defaults", [dict(do_sample=True), dict(do_sample=True, temperature=0.6, top_p=0.9, top_k=20)])
def test_a_models_default_does_not_ask_and_nothing_warns(defaults, caplog):
    warning_once.cache_clear()
    model = main(**defaults)
    with caplog.at_level(logging.WARNING), propagating():
        assert not is_sampled(model)
        assert not is_sampled(model, do_sample=False)
    assert caplog.text == ""
    assert is_sampled(model, do_sample=True)


def test_settings_alone_do_not_ask():
    assert not is_sampled(main(do_sample=True), temperature=0.9, top_k=3)


@pytest.mark.slow
@pytest.mark.parametrize("own_default", [None, False, True])
def test_a_config_of_the_call_asks_where_it_is_not_the_models_own(own_default):
    model = main(do_sample=own_default)
    if own_default:
        model.generation_config.temperature = 0.7
    other = GenerationConfig(do_sample=True, temperature=0.9, max_new_tokens=8)
    assert is_sampled(model, generation_config=other, max_new_tokens=None)
    same = copy.deepcopy(model.generation_config)  # as `transformers serve` passes it
    same.max_new_tokens = 8
    assert not is_sampled(model, generation_config=same, max_new_tokens=None)
    if own_default:
        same.temperature = 0.9  # as where its client asks for a temperature
        assert is_sampled(model, generation_config=same, max_new_tokens=None)
        same.do_sample = False
        assert not is_sampled(model, generation_config=same, max_new_tokens=None)
    silent = GenerationConfig(max_new_tokens=8)  # says nothing of sampling
    assert not is_sampled(model, generation_config=silent, max_new_tokens=None)


def test_an_argument_goes_before_the_config_of_the_call():
    model = main()
    assert requested_sampling({"do_sample": False}, GenerationConfig(do_sample=True), model.generation_config) == (
        SamplingRequest(False, {})
    )
    asked = requested_sampling(
        {"temperature": 0.3}, GenerationConfig(do_sample=True, temperature=0.9, top_k=7), model.generation_config
    )
    assert asked == SamplingRequest(True, {"temperature": 0.3, "top_k": 7})
    assert requested_sampling({}, None, model.generation_config) == SamplingRequest(False, {})
    assert requested_sampling({"do_sample": True, "top_p": None}, None, None) == SamplingRequest(True, {})


def test_the_settings_of_adafuse_go_before_the_call():
    for model in (main(), main(do_sample=True)):
        assert is_sampled(model, given=ensemble(do_sample=True))
        assert is_sampled(model, given=ensemble(do_sample=True), do_sample=False)
        assert not is_sampled(model, given=ensemble(do_sample=False), do_sample=True)
        assert not is_sampled(model, given=ensemble(do_sample=False), do_sample=True, temperature=0.9)


@pytest.mark.slow
def test_settings_that_are_bound_or_kept_with_a_model():
    assistants = {name: value for name, value in ensemble().items() if name != "adafuse_config"}
    for do_sample in (True, False):
        settings = AdaFuseConfig(max_word_tokens=4, do_sample=do_sample)
        bound = enable_adafuse(own(), tokenizer=BYTES, adafuse_config=settings, **assistants)
        found = answers(bound, given={"tokenizer": BYTES}, do_sample=not do_sample)
        assert (len(found) > 1) is do_sample
        kept = main()
        kept.generation_config.adafuse_config = settings.to_dict()
        found = answers(kept, given=assistants, do_sample=not do_sample)
        assert (len(found) > 1) is do_sample
    over = enable_adafuse(own(), tokenizer=BYTES, adafuse_config=AdaFuseConfig(do_sample=False), **assistants)
    assert len(answers(over, given=dict(adafuse_config=AdaFuseConfig(do_sample=True)))) > 1
    free = enable_adafuse(own(), tokenizer=BYTES, adafuse_config=AdaFuseConfig(max_word_tokens=4), **assistants)
    assert len(answers(free, given={"tokenizer": BYTES})) == 1
    assert len(answers(free, given={"tokenizer": BYTES}, do_sample=True)) > 1


def test_the_settings_of_the_call_are_those_it_is_sampled_with():
    """A temperature of nearly nothing is the greedy text, wherever it is said; the model's own is taken else."""
    greedy = answers(main(), times=1)
    heavier = ensemble(model_weights=[2.0, 1.0])
    expected = answers(main(), times=1, given=heavier, do_sample=True, temperature=0.001)
    for model, said in [
        (main(), dict(do_sample=True, temperature=0.001)),
        (main(), dict(generation_config=GenerationConfig(do_sample=True, temperature=0.001, max_new_tokens=8))),
        (main(), dict(generation_config=GenerationConfig(do_sample=True, max_new_tokens=8), temperature=0.001)),
        (main(temperature=0.5), dict(do_sample=True, top_k=1, temperature=0.001)),
    ]:
        n = dict(max_new_tokens=None) if "generation_config" in said else {}
        if "generation_config" in said and "temperature" in said:
            said["generation_config"].temperature = said.pop("temperature")
        assert answers(model, given=heavier, **said, **n) == expected != greedy
    # The main model's own temperature is for itself; the assistant draws by its own.
    assert len(answers(main(temperature=0.001), given=heavier, do_sample=True)) > 1
    alone = dict(adafuse_config=AdaFuseConfig(max_word_tokens=4))
    assert len(answers(main(temperature=0.001), given=alone, do_sample=True)) == 1
    assert len(answers(main(temperature=0.001), given=alone, do_sample=True, temperature=1.0)) > 1


@pytest.mark.parametrize("setting", [dict(top_p=-0.5), dict(temperature=-1.0), dict(top_k=-3), dict(min_p=3.0)])
def test_a_setting_out_of_its_range_is_refused_before_any_pass(setting):
    """By transformers where it sees the call sample, and by us where AdaFuse's own settings say so."""
    model = main()
    runs = []
    handles = [
        one.register_forward_pre_hook(lambda *_: runs.append(1)) for one in (model, tiny_model("gpt2", "characters"))
    ]
    answers(model, times=1)
    runs.clear()
    with pytest.raises(ValueError, match=next(iter(setting))):
        answers(model, given=ensemble(do_sample=True), **setting)
    with pytest.raises(ValueError, match=next(iter(setting))):
        answers(model, do_sample=True, **setting)
    for handle in handles:
        handle.remove()
    assert not runs


def test_a_warper_is_that_of_ordinary_sampling():
    """Bit for bit the scores that `generate()` draws from."""
    model, scores = own(), torch.randn(1, len(BYTES), generator=torch.Generator().manual_seed(0)) * 3
    for settings in (
        {}, dict(temperature=0.7), dict(top_k=5), dict(top_k=0, top_p=0.5), dict(top_k=0), dict(min_p=0.1, top_k=0),
        dict(typical_p=0.4), dict(epsilon_cutoff=0.02, top_k=0), dict(eta_cutoff=0.02, top_k=0), dict(top_h=0.5),
        dict(temperature=1.7, top_k=30, top_p=0.9, min_p=0.01),
    ):  # fmt: skip
        config = GenerationConfig(do_sample=True, num_beams=1, **{"top_k": 50, **settings})
        config._eos_token_tensor = None
        processors = model._get_logits_processor(config, 1, torch.tensor([[1]]), device=scores.device, model_kwargs={})
        ordinary = processors(torch.tensor([[1]]), scores)
        for asked, kept in ((settings, None), ({}, GenerationConfig(**settings))):
            warper = warper_of(model, kept, asked, scores.device)
            assert not warper.is_greedy and torch.equal(warper(scores), ordinary), settings


# Ordinary calls.


@pytest.mark.parametrize("defaults", [{}, dict(do_sample=True, temperature=0.8)])
def test_an_ordinary_call_samples_as_before(defaults):
    """Bit for bit, with the same seed, and torch's generator is left where it was left."""
    plain, enabled = own(), own()
    for model in (plain, enabled):
        model.generation_config.update(**defaults)
    enable_adafuse(enabled)
    calls = [dict(), dict(do_sample=True), dict(do_sample=True, num_return_sequences=3, top_k=5), dict(num_beams=2),
             dict(generation_config=GenerationConfig(do_sample=True, max_new_tokens=7, top_p=0.5)),
             dict(do_sample=True, num_beams=2, temperature=1.3)]  # fmt: skip
    for call in calls:
        texts = []
        for model in (plain, enabled):
            torch.manual_seed(3)
            n = {} if "generation_config" in call else dict(max_new_tokens=9)
            texts.append(
                (
                    model.generate(**inputs_of(BYTES, PROMPT, "She"), **n, **call).tolist(),
                    torch.get_rng_state().tolist(),
                )
            )
        assert texts[0] == texts[1], call


@pytest.mark.parametrize("how", [dict(), dict(do_sample=True, temperature=0.7)])
def test_a_pipeline_of_an_ordinary_call_samples_as_before(how):
    texts = []
    for model in (own(), enable_adafuse(own())):
        torch.manual_seed(3)
        texts.append(
            pipeline("text-generation", model=model, tokenizer=BYTES, device="cpu")(PROMPT, max_new_tokens=9, **how)
        )
    assert texts[0] == texts[1]


# Pipelines.


def pipe(task, model=None, given=None, default=None, **kwargs):
    if model is None:
        model = own()
        model.generation_config.do_sample = default
        enable_adafuse(model, tokenizer=BYTES, **(given or ensemble()))
    return pipeline(task, model=model, tokenizer=BYTES, device="cpu", **kwargs)


def ids_of(task_pipe, times=4, prompt=PROMPT, **kwargs):
    found = set()
    for seed in range(times):
        torch.manual_seed(seed)
        records = task_pipe(prompt, return_tensors=True, **kwargs)
        records = records if isinstance(prompt, str) else [record for one in records for record in one]
        found.add(tuple(tuple(record["generated_token_ids"]) for record in records))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT, "She"]], ids=["one", "two"])
@pytest.mark.parametrize("default", [None, True])
@pytest.mark.parametrize("task", TASKS)
def test_a_pipelines_default_does_not_ask(task, default, prompt, caplog):
    warning_once.cache_clear()
    task_pipe = pipe(task, default=default)
    with caplog.at_level(logging.WARNING), propagating():
        (texts,) = ids_of(task_pipe, prompt=prompt, max_new_tokens=8)
    (same,) = ids_of(task_pipe, prompt=prompt, max_new_tokens=8, do_sample=False)
    assert texts == same and "sampl" not in caplog.text
    assert len(ids_of(task_pipe, prompt=prompt, max_new_tokens=8, do_sample=True)) > 1
    if prompt != PROMPT:
        assert len(ids_of(task_pipe, prompt=prompt, max_new_tokens=8, batch_size=2)) == 1
        assert len(ids_of(task_pipe, prompt=prompt, max_new_tokens=8, batch_size=2, do_sample=True)) > 1


@pytest.mark.parametrize("bound", [{}, {"tokenizer": BYTES}], ids=["nothing", "tokenizer"])
@pytest.mark.parametrize("task", TASKS)
def test_an_ensemble_in_the_arguments_of_a_pipeline(task, bound, caplog, tmp_path):
    """Only transformers' own pipeline of a model to which nothing is bound samples by its own default, and says so."""
    samples_unasked = task == TASKS[0] and not bound
    model = enable_adafuse(own(), **bound)
    BYTES.save_pretrained(tmp_path)
    model.name_or_path = str(tmp_path)  # the tokenizer is found by the name: transformers' pipeline passes none
    task_pipe, given = pipe(task, model=model, max_new_tokens=8), ensemble()
    warning_once.cache_clear()
    with caplog.at_level(logging.WARNING), propagating():
        assert (len(ids_of(task_pipe, **given)) > 1) is samples_unasked
        assert len(ids_of(task_pipe, do_sample=False, **given)) == 1
    assert caplog.text.count("pass `do_sample=False` for the greedy text") == samples_unasked
    assert len(ids_of(task_pipe, do_sample=True, **given)) > 1


@pytest.mark.parametrize("is_old", [False, True])
def test_a_config_that_samples_is_warned_of_where_it_may_be_a_pipelines(is_old, caplog, monkeypatch):
    monkeypatch.setattr(sampling, "PIPELINES_PASS_A_CONFIG", is_old)
    own, asks = GenerationConfig(do_sample=False), GenerationConfig(do_sample=True)
    for call, config, warns in [
        ({}, asks, is_old),
        ({"do_sample": True}, asks, False),
        ({"do_sample": False}, asks, False),
        ({}, GenerationConfig(), False),
    ]:
        warning_once.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING), propagating():
            sampling.warn_of_a_pipelines_default(call, config, own, is_bound=True)
        assert caplog.text.count("pass `do_sample=False` for the greedy text") == warns


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_pipeline_is_asked_where_it_is_made_or_called(task):
    made = pipe(task, do_sample=True, max_new_tokens=8)
    assert len(ids_of(made)) > 1
    assert len(ids_of(made, do_sample=False)) == 1
    assert len(ids_of(pipe(task, do_sample=False, max_new_tokens=8))) == 1
    assert len(ids_of(pipe(task, temperature=0.7, max_new_tokens=8))) == 1
    cool = pipe(task, do_sample=True, temperature=0.001, max_new_tokens=8)
    assert len(ids_of(cool)) == 1 and len(ids_of(cool, temperature=1.5)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_config_given_to_a_pipeline(task):
    asks, silent = (
        GenerationConfig(do_sample=True, temperature=0.9, max_new_tokens=8),
        GenerationConfig(max_new_tokens=8),
    )
    assert len(ids_of(pipe(task, generation_config=asks))) > 1
    assert len(ids_of(pipe(task), generation_config=asks)) > 1
    assert len(ids_of(pipe(task), generation_config=silent)) == 1
    assert len(ids_of(pipe(task, generation_config=silent))) == 1
    # In the call it takes the place of what was said before.
    assert len(ids_of(pipe(task, do_sample=True), generation_config=silent)) == 1
    task_pipe = pipe(task)
    task_pipe.model.generation_config.update(do_sample=True, temperature=0.7)
    same = copy.deepcopy(task_pipe.model.generation_config)
    same.max_new_tokens = 8
    assert len(ids_of(task_pipe, generation_config=same)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_the_settings_of_adafuse_go_before_a_pipeline(task):
    assert len(ids_of(pipe(task, given=ensemble(do_sample=True)), max_new_tokens=8)) > 1
    assert len(ids_of(pipe(task, given=ensemble(do_sample=False)), max_new_tokens=8, do_sample=True)) == 1
    assert len(ids_of(pipe(task), max_new_tokens=8, adafuse_config=AdaFuseConfig(do_sample=True))) > 1


@pytest.mark.parametrize("task", TASKS)
def test_several_answers_of_a_pipeline(task):
    (texts,) = ids_of(pipe(task), times=1, max_new_tokens=12, do_sample=True, num_return_sequences=3)
    assert len(set(texts)) == 3
    with pytest.raises(ValueError, match="num_return_sequences"):  # transformers' own message: nothing samples
        pipe(task)(PROMPT, num_return_sequences=3)


def test_a_chats_answers_differ():
    """Each member reads the chat through its own template, once, however many answers are asked for."""
    tokenizers = [copy.deepcopy(TOKENIZERS[name]()) for name in ("byte_level", "characters")]
    for tokenizer, mark in zip(tokenizers, "#*", strict=True):
        tokenizer.chat_template = "{% for m in messages %}" + mark + "{{ m['content'] }}{% endfor %}"
    given = ensemble() | {"assistant_tokenizers": tokenizers[1:]}
    model = enable_adafuse(own(), tokenizer=tokenizers[0], **given)
    chat = [{"role": "user", "content": "She"}]
    task_pipe = pipeline(TASKS[1], model=model, tokenizer=tokenizers[0], device="cpu")
    torch.manual_seed(0)
    records = task_pipe(chat, max_new_tokens=12, do_sample=True, num_return_sequences=3)
    contents = [record["generated_text"][-1]["content"] for record in records]
    assert len(set(contents)) == 3
    torch.manual_seed(0)
    assert task_pipe(chat, max_new_tokens=12, do_sample=True)[0]["generated_text"][-1]["content"] == contents[0]


def test_a_pipeline_of_a_model_with_adapters():
    """PEFT's `generate()` stands between the pipeline and ours."""
    model = with_adapters()
    base = enable_adafuse(model.get_base_model(), tokenizer=BYTES, **ensemble())
    task_pipe = pipe("text-generation", model=model)
    assert task_pipe.model is model and base is not model
    assert len(ids_of(task_pipe, max_new_tokens=8)) == 1
    assert len(ids_of(task_pipe, max_new_tokens=8, do_sample=True)) > 1
