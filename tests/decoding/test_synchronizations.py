"""How often the host waits for numbers of a device: on an accelerator each time the queue of its kernels runs dry.
Counted by what asks for them, on CPU.
"""

from __future__ import annotations

import sys

import pytest
import torch
from support.kinds import MANY, case_of, force
from support.tiny import tiny_model
from torch.overrides import TorchFunctionMode
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from hf_adafuse.call.stopping import StopCheck
from hf_adafuse.decoding.decoder import Decoder
from hf_adafuse.decoding.progress import Prompt
from hf_adafuse.trees.backend import to_device

_WAITING = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__", "equal")


class Waits(TorchFunctionMode):
    """Counts what makes the host wait, but for what is asked of ids that are on the host."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in _WAITING and not (args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.bool):
            self.count += 1
        return func(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    """Notes which functions of ours make tensors of numbers, or send them, to a device."""

    def __init__(self):
        super().__init__()
        self.senders = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = [*args[1:], *(kwargs or {}).values()]
        if func.__name__ in ("to", "tensor", "as_tensor") and any(isinstance(one, torch.device) for one in given):
            frame = sys._getframe(1)
            while frame is not None and "hf_adafuse" not in frame.f_globals.get("__name__", ""):
                is_model = frame.f_globals["__name__"].startswith("transformers.")
                frame = None if is_model else frame.f_back
            self.senders += [frame.f_code.co_name] if frame is not None else []
        return func(*args, **(kwargs or {}))


@pytest.fixture
def waits(monkeypatch):
    """Of the decoding loop: the prompts' reading and the output are before and after it."""
    waits, run = Waits(), Decoder.run

    def counted(self):
        with waits:
            run(self)

    monkeypatch.setattr(Decoder, "run", counted)
    return waits


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("backend", ["tree-attention", "branch-rows"])
def test_the_host_waits_once_a_pass(backend, batch, waits, monkeypatch):
    """And at most once a member, round and prompt for candidates whose first token was not foreseen."""
    force(monkeypatch, backend)
    output = case_of(tiny_model("llama", "byte_level"), batch=batch, n=16).fast()
    passes = sum(member["forward_passes"] for member in output.stats["members"])
    unforeseen = 2 * sum(len(rounds) for rounds in output.rounds)
    assert passes <= waits.count + 2 * batch  # of the passes that read the prompts, too, numbers are read
    assert waits.count <= passes + unforeseen


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("backend", ["tree-attention", "branch-rows", MANY, "uncached"])
@pytest.mark.filterwarnings("ignore:.* reads the whole text again:UserWarning")
def test_the_host_waits_for_no_copy(backend, batch, monkeypatch):
    """After a pass has been begun an ordinary copy to the device would wait for its end."""
    force(monkeypatch, backend)
    copies, run = Copies(), Decoder.run

    def watched(self):
        with copies:
            run(self)

    monkeypatch.setattr(Decoder, "run", watched)
    case_of(tiny_model("llama", "byte_level"), batch=batch, n=12).fast()
    assert copies.senders.count("to_device") > 20
    assert {*copies.senders} - {"prefill", "_read_prompts"} == {"to_device"}  # those come once for each prompt


def test_numbers_are_sent_to_a_gpu_from_pinned_memory():
    calls = []

    class Gpu(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func.__name__ in ("pin_memory", "to"):
                calls.append((func.__name__, *args[1:], kwargs or {}))
                return args[0]
            return func(*args, **(kwargs or {}))

    with Gpu():
        sent = to_device([[1, 2], [3, 4]], torch.device("cuda"))
    assert calls == [("pin_memory", {}), ("to", torch.device("cuda"), {"non_blocking": True})]
    assert sent.tolist() == to_device([[1, 2], [3, 4]], torch.device("cpu")).tolist() == [[1, 2], [3, 4]]


def test_a_model_alone_waits_for_nothing_else(waits):
    case = case_of(tiny_model("llama", "byte_level"), batch=1, n=16)
    case.models, case.tokenizers = case.models[:1], case.tokenizers[:1]
    output = case.fast()
    assert waits.count == output.stats["members"][0]["forward_passes"] > 4


def test_what_transformers_stops_by_is_asked_on_the_host():
    criteria = [MaxLengthCriteria(5), MaxTimeCriteria(1e6), EosTokenCriteria(7)]
    check = StopCheck(criteria, 1, torch.device("meta"), with_scores=False)  # nothing could be read from there
    assert [check(Prompt(0, ids)) for ids in ([1, 2], [1, 2, 3, 4, 5], [1, 7])] == [None, "length", "stop"]
