"""A member that fails during decoding: the error names it and the round, and carries what was committed so far."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import functools
import pickle

import pytest
import torch
from support.tiny import TOKENIZERS, tiny_model
from transformers import LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from hf_adafuse import AdaFuseConfig, AdaFuseDecodingError, disable_adafuse, enable_adafuse

BYTES, CHARS = TOKENIZERS["byte_level"](), TOKENIZERS["characters"]()
MEMBERS = [("llama", "byte_level", 0), ("gpt2", "characters", 0), ("qwen3", "byte_level", 1)]
NAMES = ["the main model", "assistant 1 (GPT2LMHeadModel)", "assistant 2 (Qwen3ForCausalLM)"]
KINDS = ["raise", "memory", "nan", "one-nan"]


def members():
    """Models of one's own: shallow copies with hooks of their own."""
    models = [copy.copy(tiny_model(*member)) for member in MEMBERS]
    for model in models:
        model._forward_hooks, model._forward_pre_hooks = (
            copy.copy(model._forward_hooks),
            copy.copy(model._forward_pre_hooks),
        )
    return [enable_adafuse(models[0]), *models[1:]]


def call(models, prompts=("Once upon a time",), **changes):
    inputs = BYTES(list(prompts), padding=True, return_tensors="pt", return_token_type_ids=False)
    given = dict(
        **inputs,
        tokenizer=BYTES,
        assistant_models=models[1:],
        assistant_tokenizers=[CHARS, BYTES],
        adafuse_config=AdaFuseConfig(num_branches=2, max_words=2, max_word_tokens=2),
        max_new_tokens=16,
        min_new_tokens=16,
        do_sample=False,
        return_dict_in_generate=True,
    )
    return models[0].generate(**given | changes)


class Commits(BaseStreamer):
    """What was committed: the ids of the prompt, then those of each round."""

    def __init__(self):
        self.puts = []

    def put(self, value):
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.puts.append("end")


@contextlib.contextmanager
def failing(model, kind, at):
    """Forward pass number `at` of the model fails; gives the exception that it raises, if it does."""
    count = [0]
    raised = {
        "raise": RuntimeError("the weights are on fire"),
        "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    }.get(kind)

    def hook(module, args, kwargs, output):
        count[0] += 1
        if count[0] != at:
            return None
        if raised is not None:
            raise raised
        logits = output.logits.clone()
        if kind == "nan":
            logits[:] = torch.nan
        else:  # the last entry of the first row's first query: a real token, not the filler of a batch
            logits[0, -1 if count[0] == 1 else 0, -1] = torch.nan
        output.logits = logits
        return output

    handle = model.register_forward_hook(hook, with_kwargs=True)
    try:
        yield raised
    finally:
        handle.remove()


@functools.cache
def undisturbed():
    """The committed ids (prompt first), the text of each round, and at which round each member's passes lay."""
    models, commits, passes = members(), Commits(), []
    call(models)  # the self-tests, once for models of this kind
    for model in models:
        seen = []
        passes.append(seen)
        model.register_forward_pre_hook(lambda *_, seen=seen: seen.append(len(commits.puts) if seen else 0))
    output = call(models, streamer=commits)
    assert commits.puts.pop() == "end"
    assert sum(commits.puts, []) == output.sequences[0].tolist()
    return commits.puts, [committed.text for committed in output.rounds[0]], passes


def test_the_run_that_is_disturbed_has_something_to_lose():
    puts, texts, passes = undisturbed()
    assert len(texts) >= 3 and len(puts) == len(texts) + 1
    assert all(len(seen) >= 4 and seen[0] == 0 and seen[1] == 1 and seen[-1] >= 2 for seen in passes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", range(3), ids=["main", "first", "second"])
def test_the_error_names_the_member_and_the_round_and_keeps_the_text(k, kind):
    puts, texts, passes = undisturbed()
    for at, number in enumerate(passes[k], start=1):
        models, commits = members(), Commits()
        with failing(models[k], kind, at) as raised, pytest.raises(AdaFuseDecodingError) as caught:
            call(models, streamer=commits)
        error, committed = caught.value, max(number - 1, 0)
        assert (error.member, error.round) == (NAMES[k], number), f"pass {at}"
        assert error.texts == ["".join(texts[:committed])]
        assert error.sequences == [sum(puts[: committed + 1], [])]
        assert commits.puts == [*puts[: committed + 1], "end"]  # who waits for the text is told
        message = str(error)
        assert message.startswith(f"{NAMES[k]} failed in round {number}: ") and repr(error.texts[0]) in message
        if raised is None:
            assert "NaN" in message and error.__cause__ is not None
        else:
            assert error.__cause__ is raised and str(raised) in message and type(raised).__name__ in message
        assert isinstance(error, RuntimeError)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raise", "nan"])
@pytest.mark.parametrize("k", [0, 1])
def test_in_a_batch_each_row_keeps_its_text(k, kind):
    prompts = ["She", "Once upon a time", "the cat"]
    models = members()
    output, counted = call(models, prompts), []
    handle = models[k].register_forward_pre_hook(lambda *_: counted.append(1))
    call(models, prompts)
    handle.remove()
    total, width = len(counted), BYTES(prompts, padding=True, return_tensors="pt").input_ids.shape[1]
    numbers = []
    for at in sorted({1, 2, *range(3, total, 2), total}):
        with failing(models[k], kind, at), pytest.raises(AdaFuseDecodingError) as caught:
            call(models, prompts)
        error = caught.value
        numbers.append(error.round)
        assert error.member == NAMES[k] and len(error.texts) == len(error.sequences) == 3
        nums_done = []
        for row, rounds in enumerate(output.rounds):  # each prompt is in a round of its own
            texts = ["".join(committed.text for committed in rounds[:done]) for done in range(len(rounds) + 1)]
            done = texts.index(error.texts[row])
            length = width + sum(committed.num_tokens for committed in rounds[:done])
            assert error.sequences[row] == output.sequences[row, :length].tolist()
            nums_done.append(done)
        assert max(error.round - 1, 0) in nums_done
    assert numbers[:2] == [0, 1] and numbers[-1] <= max(map(len, output.rounds))
    assert len(set(numbers)) >= 3


def test_a_nan_in_the_filler_of_a_batch_is_nobodys():
    """Short rows of a pass are filled up; what the model makes of the filler does not matter."""
    models, prompts = members(), ["She", "Once upon a time there was", "the cat"]
    expected = call(models, prompts)
    seen = []

    def hook(module, args, kwargs, output):
        mask = kwargs["attention_mask"]
        if mask is not None and mask.dim() == 2:  # left padding of the prompts
            logits = output.logits.clone()
            if logits.shape[1] == mask.shape[1]:
                logits[mask == 0] = torch.nan
                seen.append(True)
            output.logits = logits
        return output

    models[0].register_forward_hook(hook, with_kwargs=True)
    assert torch.equal(call(models, prompts).sequences, expected.sequences)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf], ids=["inf", "-inf"])
@pytest.mark.parametrize("k", [0, 1])
def test_logits_without_a_distribution_are_a_failure_too(k, value):
    """An overflow to infinity, or no possible token at all: the probabilities would be NaN."""
    models = members()

    def hook(module, args, kwargs, output):
        output.logits = torch.full_like(output.logits, value)
        return output

    models[k].register_forward_hook(hook, with_kwargs=True)
    with pytest.raises(AdaFuseDecodingError) as caught:
        call(models)
    assert (caught.value.member, caught.value.round) == (NAMES[k], 0)


def test_after_an_error_the_model_works():
    models = members()
    expected, plain = call(models), tiny_model(*MEMBERS[0])
    inputs = BYTES("Once upon a time", return_tensors="pt", return_token_type_ids=False)
    keys = [sorted(vars(model)) for model in models]
    versions = [[parameter._version for parameter in model.parameters()] for model in models]
    for at in (1, 3):
        for k in range(3):
            with failing(models[k], "raise", at), pytest.raises(AdaFuseDecodingError):
                call(models)
    assert [sorted(vars(model)) for model in models] == keys
    assert [[parameter._version for parameter in model.parameters()] for model in models] == versions
    assert torch.equal(call(models).sequences, expected.sequences)
    assert disable_adafuse(models[0]) is models[0] and type(models[0]) is LlamaForCausalLM
    ordinary = models[0].generate(**inputs, max_new_tokens=8, do_sample=False)
    assert torch.equal(ordinary, plain.generate(**inputs, max_new_tokens=8, do_sample=False))


def test_generation_can_go_on_from_the_error():
    """Its `sequences` are a prompt like any other."""
    puts, _, passes = undisturbed()
    models = members()
    with failing(models[0], "memory", passes[0].index(3) + 1), pytest.raises(AdaFuseDecodingError) as caught:
        call(models)
    ids = torch.tensor(caught.value.sequences)
    assert ids[0].tolist() == sum(puts[:3], [])
    output = call(models, input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, min_new_tokens=2)
    assert torch.equal(output.sequences[:, :-2], ids)


def test_the_error_crosses_processes():
    models = members()
    with failing(models[1], "memory", 3), pytest.raises(AdaFuseDecodingError) as caught:
        call(models)
    error = caught.value
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is AdaFuseDecodingError and str(twin) == str(error)
        assert (twin.member, twin.round, twin.texts, twin.sequences) == (
            error.member,
            error.round,
            error.texts,
            error.sequences,
        )


def test_in_a_thread_with_a_streamer_the_error_reaches_the_caller():
    models = members()
    with failing(models[2], "raise", 2), concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(call, models, streamer=Commits())
        with pytest.raises(AdaFuseDecodingError, match=r"assistant 2 .* failed in round 1: RuntimeError: the weights"):
            future.result(timeout=120)


class Oops(Exception):
    pass


def test_what_the_caller_breaks_is_not_blamed_on_a_member():
    models = members()

    def broken(*args, **kwargs):
        raise Oops

    with pytest.raises(Oops):
        call(models, logits_processor=[broken])
    with pytest.raises(Oops):
        call(models, stopping_criteria=[broken])


def test_an_interrupt_is_not_a_failure():
    models = members()

    def interrupt(*_):
        raise KeyboardInterrupt

    models[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        call(models)
