"""Options and surroundings of the tests: no network, few threads, transformers' deprecations are errors."""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, default=320, help="random cases compared with the oracle")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case_number" in metafunc.fixturenames:
        metafunc.parametrize("case_number", range(metafunc.config.getoption("--cases")))


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other


@pytest.fixture(autouse=True)
def look_ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """How far ahead the first member proposes follows from measured times; in a test from the test, 0 by default."""

    def fix(num_rounds: int) -> None:
        monkeypatch.setattr("hf_adafuse.look_ahead.LookAhead.num_rounds", lambda *_: num_rounds)

    fix(0)
    return fix
