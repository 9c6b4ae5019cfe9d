"""Options and surroundings of the tests: no network, few threads, transformers' deprecations are errors."""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, default=80, help="random cases compared with the oracle")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case_number" in metafunc.fixturenames:
        metafunc.parametrize("case_number", range(metafunc.config.getoption("--cases")))


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other


@pytest.fixture(autouse=True)
def look_ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What rides and how far ahead the first member proposes follow from measured times; in a test, from the test."""

    def fix(num_rounds: int, is_flat: bool = False) -> None:
        monkeypatch.setattr("hf_adafuse.decoding.MAX_ROUNDS", num_rounds)
        monkeypatch.setattr("hf_adafuse.decoding.pays", lambda *_: True)
        monkeypatch.setattr("hf_adafuse.look_ahead.WinRecord.odds", lambda *_: 0.5)
        monkeypatch.setattr("hf_adafuse.look_ahead.PassTimes.is_flat", is_flat)

    fix(0)
    return fix
