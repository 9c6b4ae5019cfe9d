"""Fixtures of all tests: few threads, transformers' deprecations are errors, costs of passes that no clock decides."""

from __future__ import annotations

import functools
import logging
import ssl
from collections.abc import Callable, Iterator

import pytest
import torch

from hf_adafuse.decoding.strategies.registry import STRATEGIES
from hf_adafuse.kernels import small_batch_linear
from hf_adafuse.kernels.native_product import MAX_TOKENS
from hf_adafuse.members.model_handle import ModelHandle
from hf_adafuse.trees.pass_costs import PassCosts
from hf_adafuse.trees.pass_policy import POLICIES, AcceleratorPolicy, Policy


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other


@pytest.fixture(autouse=True, scope="session")
def _certificates_once() -> None:
    """To read them takes 25 ms, and every HTTP client would read them anew, for servers on this machine."""
    ssl.create_default_context = functools.cache(ssl.create_default_context)


@pytest.fixture(autouse=True)
def _no_deprecated_name(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """transformers says by its log, not by a warning, that a cache's old name was read: nothing of ours may read it."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)
    said = [record.getMessage() for when in ("setup", "call") for record in caplog.get_records(when)]
    assert [text for text in said if "deprecated" in text and "past_key_values" in text] == []


@pytest.fixture(autouse=True)
def _same_methods() -> Iterator[None]:
    """After a test the registered methods are those before it, in their order, which users see."""
    methods = dict(STRATEGIES)
    yield
    STRATEGIES.clear()
    STRATEGIES.update(methods)


@pytest.fixture
def short_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All members read 256 tokens at most: rotary positions, which most tiny members have, set no limit."""
    monkeypatch.setattr(ModelHandle, "max_length", property(lambda self: 256))


@pytest.fixture(autouse=True)
def look_ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """
    What else goes into a pass, and how far ahead the first member proposes, follows from measured times; in a test it
    follows from a made-up curve of costs, on which a pass of several tokens costs like one of one, or twice as much.
    """

    def fix(num_rounds: int, is_flat: bool = False) -> None:
        curve = {1: 1.0} if is_flat else {1: 1.0, 2: 2.0}
        monkeypatch.setattr(
            "hf_adafuse.members.member.costs_of", lambda model, device: PassCosts(curve, is_measured=False)
        )
        monkeypatch.setattr(Policy, "max_rounds_ahead", num_rounds)
        monkeypatch.setattr("hf_adafuse.decoding.speculation.pays_ahead", lambda *seconds: True)

    fix(0)
    return fix


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Weights of the tests' models fall into parts, as large ones do where there is no kernel; as with two threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(small_batch_linear, "can_multiply", lambda *shape: False)
    for name, value in {"_LARGE_PART": 256, "_SMALL_PART": 64, "_FEWEST_ROWS": 2, "_ROW_MULTIPLE": 1}.items():
        monkeypatch.setattr(small_batch_linear, name, value)
    small_batch_linear._tuner.cache_clear()
    yield
    small_batch_linear._tuner.cache_clear()


@pytest.fixture
def small_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The weights of the tests' models are multiplied by the kernel, without a trial."""
    for name, value in {
        "_LEAST_BYTES": 0,
        "timing_allowed": lambda: False,
        "_UNTRIED": range(1, MAX_TOKENS + 1),
    }.items():
        monkeypatch.setattr(small_batch_linear, name, value)
    small_batch_linear._tuner.cache_clear()
    yield
    small_batch_linear._tuner.cache_clear()


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is decided otherwise on an accelerator is so on CPU."""
    monkeypatch.setitem(POLICIES, "cpu", AcceleratorPolicy)
