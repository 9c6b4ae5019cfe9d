"""What follows from a model alone: found once where models stay as they are, and looked for again elsewhere."""

from __future__ import annotations

import copy
import gc
import threading

import torch
from support.tiny import tiny_model

from hf_adafuse.trees.adapters import model_fingerprint
from hf_adafuse.trees.backend_probe import choose_backend
from hf_adafuse.trees.model_call import device_of
from hf_adafuse.trees.model_facts import ModelFacts, cached_while_unchanged, unchanged_models


class Counted:
    def __init__(self):
        self.calls = []

    def __call__(self, model, *args):
        self.calls.append((model, *args))
        return len(self.calls)


def test_once_for_each_model_and_argument():
    count, facts = Counted(), ModelFacts()
    find = cached_while_unchanged(count)
    one, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    assert [find(one), find(one)] == [1, 2]  # outside of the context
    with unchanged_models(facts):
        assert [find(one), find(one), find(other), find(one, "a"), find(one, "a")] == [3, 3, 4, 5, 5]
    assert find(one) == 6
    found = []

    def look_again():
        with unchanged_models(facts):
            found.append(find(other))

    thread = threading.Thread(target=look_again)
    thread.start()
    thread.join()
    assert found == [4]


def test_a_model_that_is_gone_is_forgotten():
    facts = ModelFacts()
    with unchanged_models(facts):
        model = torch.nn.Linear(1, 1)
        cached_while_unchanged(str)(model)
        assert len(facts._found) == 1
        del model
        gc.collect()
        assert len(facts._found) == 0


def test_modules_are_looked_through_once(monkeypatch):
    """The backend, the device and the switches of adapters need a walk over all modules."""
    model, walks = tiny_model("llama", "byte_level", 0), []
    walk = torch.nn.Module.modules
    choose_backend(model, torch.device("cpu"))  # by the self-test, the first time

    def look():
        walks.clear()
        found = choose_backend(model, device_of(model)), model_fingerprint(model)
        return found, len(walks)

    monkeypatch.setattr(
        torch.nn.Module, "modules", lambda *args, **kwargs: (walks.append(args), walk(*args, **kwargs))[1]
    )
    expected, number = look()
    assert number > 0 and look() == (expected, number)
    with unchanged_models(ModelFacts()):
        assert look() == (expected, number) and look() == (expected, 0)


def test_a_model_that_is_changed_is_seen_outside():
    model = copy.deepcopy(tiny_model("llama", "byte_level", 0))
    before = model_fingerprint(model)
    with unchanged_models(ModelFacts()):
        assert model_fingerprint(model) == before
    assert model_fingerprint(model.to(torch.bfloat16)) != before
