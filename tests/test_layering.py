"""The package's shape: imports go one way, files and functions stay small, every module says what it is.

Files and functions are allowed a few lines more than the house rule (250 and 40), so that a fix is not a refactoring.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hf_adafuse"

# A core module imports only modules named before it.
LEAVES = ("config", "words", "scoring", "outputs")
CORE = (
    *LEAVES,
    "chat",
    "trace",
    "trace_html",
    "rounds",
    "reading",
    "vocabulary",
    "kv_cache",
    "attention_mask",
    "adapters",
    "processors",
    "logits_process",
    "stopping_criteria",
    "token_nodes",
    "reader",
    "skinny",
    "model_call",
    "memory",
    "slot_cache",
    "token_tree",
    "row_tree",
    "state_tree",
    "reencode_tree",
    "self_test",
    "proposals",
    "look_ahead",
    "member",
    "pool",
    "progress",
    "decoding",
    "ensemble",
    "prompts",
    "continuation",
    "session",
    "generation",
    "exported",
    "repository",
    "generate",
    "modeling_adafuse",
    "__init__",
)
# What is built around the core: may import all of it, is imported by none of it.
AROUND = ("__main__", "cli", "pipelines", "hub", "model_card", "demo", "evaluation", "benchmarks", "plots")

MAX_FILE_LINES = 260
MAX_FUNCTION_LINES = 45

SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
CORE_SOURCES = {Path(name).stem: text for name, text in SOURCES.items() if "/" not in name and Path(name).stem in CORE}


def package_imports(source):
    """Yields each import of the package's own modules: the module's name, or `None` where the form is not allowed.

    A Hub repository holds flat files, found by their `from .x import y`; nothing deeper than `.x` exists there.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (None for alias in node.names if alias.name.split(".")[0] == "hf_adafuse")
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            if node.module.split(".")[0] == "hf_adafuse":
                yield None
        elif isinstance(node, ast.ImportFrom):
            flat = node.level == 1 and "." not in (node.module or "")
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from names if flat else [None]


def import_problems(name, source):
    """Lists what is wrong with the imports of core module `name`."""
    allowed = () if name in LEAVES else CORE[: CORE.index(name)]
    for module in package_imports(source):
        if module is None:
            yield f"{name}: write an import of the package's own modules as `from .x import y`"
        elif module not in allowed:
            yield f"{name} must not import {module}"


def size_problems(name, source):
    """Lists what is too long in the module, and says when it has no docstring."""
    tree = ast.parse(source)
    if len(source.splitlines()) > MAX_FILE_LINES:
        yield f"{name} has {len(source.splitlines())} lines, more than {MAX_FILE_LINES}"
    if not ast.get_docstring(tree):
        yield f"{name} has no docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{name}: {node.name} has {lines} lines, more than {MAX_FUNCTION_LINES}"


def test_every_module_has_a_place():
    top = {name.split("/")[0].removesuffix(".py") for name in SOURCES}
    assert sorted(top - {*CORE, *AROUND}) == [], "add the module to CORE or AROUND"


@pytest.mark.parametrize("name", sorted(CORE_SOURCES))
def test_core_imports_go_one_way(name):
    assert list(import_problems(name, CORE_SOURCES[name])) == []


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_modules_are_small_and_documented(name):
    assert list(size_problems(name, SOURCES[name])) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("config", "from .words import WordRule"),  # a leaf imports nothing
        ("member", "from .decoding import Decoder"),  # upwards
        ("member", "from .member import Member"),  # itself
        ("member", "from .cli import main"),  # out of the core
        ("member", "from . import decoding"),
        ("member", "def late():\n    from .decoding import Decoder"),
        ("member", "from ..words import WordRule"),
        ("member", "from .demo.data import PAIR"),
        ("member", "from hf_adafuse.words import WordRule"),
        ("member", "import hf_adafuse.words as words"),
    ],
)
def test_a_wrong_import_is_found(name, source):
    assert len(list(import_problems(name, source))) == 1


def test_right_imports_pass():
    source = "import torch\nfrom torch import nn\nfrom . import kv_cache\nfrom .words import (\n    WordRule,\n)"
    assert list(import_problems("member", source)) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "has no docstring"),
        ('"""Doc."""\n' + "x = 1\n" * MAX_FILE_LINES, f"has {MAX_FILE_LINES + 1} lines"),
        ('"""Doc."""\nclass A:\n    def f(self):\n' + "        x = 1\n" * MAX_FUNCTION_LINES, "f has 46 lines"),
    ],
)
def test_a_wrong_size_is_found(source, message):
    (problem,) = size_problems("some_module", source)
    assert message in problem
