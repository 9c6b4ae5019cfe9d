"""Options of the tests, and which of them a part runs. The fixtures are in `support/fixtures.py`."""

from __future__ import annotations

import os
from collections.abc import Sequence

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# NumPy's threads wait for each other by spinning: where tests are run side by side, fits took a hundred times as long.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import pytest

# Of a test with many cases (sets of parameters), how many a part runs; and of random cases, one of how many.
CASES_OF_PARTS = {"short": (1, 40), "long": (10, 4)}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, default=240, help="random cases compared with the oracle")
    help = "short: a case of each test; long: slow tests, and more cases, without those of the short part; all"
    parser.addoption("--part", choices=("short", "long", "all"), default="short", help=help)


def pytest_configure(config: pytest.Config) -> None:
    # With `-n` the first process only hands tests out, and need not wait for torch to be imported.
    if not config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        config.pluginmanager.import_plugin("support.fixtures")


# By the name of the argument that is a case's number, how many of `--cases` make one: some take longer.
CASES_PER_NUMBER = {
    "case_number": 1,
    "method_number": 4,
    "served_number": 20,
    "structured_number": 10,
    "real_number": 40,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, cases in CASES_PER_NUMBER.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, range(-(-metafunc.config.getoption("--cases") // cases)))


def _is_random(item: pytest.Item) -> bool:
    return bool(CASES_PER_NUMBER.keys() & getattr(item, "fixturenames", ()))


def chosen(items: Sequence[pytest.Item], part: str) -> set[pytest.Item]:
    """Of each test its first case and others spread over the rest."""
    most, one_of = CASES_OF_PARTS[part]
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    found = set()
    for cases in tests.values():
        number = max(most, len(cases) // one_of) if _is_random(cases[0]) else most
        if cases[0].get_closest_marker("every_case"):
            number = len(cases)
        if part != "short" or not cases[0].get_closest_marker("slow"):
            number = min(number, len(cases))
            found |= {cases[index * len(cases) // number] for index in range(number)}
    return found


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    if part == "all" or any("::" in argument for argument in config.args):  # a test that is named runs whole
        return
    kept = chosen(items, part)
    if part == "long":
        kept -= chosen(items, "short")
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
