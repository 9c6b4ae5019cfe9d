"""The package's shape: imports that go one way, a docstring on every module, and a core that can be made flat."""

import ast
import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.every_case, pytest.mark.fast]

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hf_adafuse"
SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / "setup.cfg", encoding="utf-8")
# From the top down; `lint-imports` holds that all of the package is in one of these.
LAYERS = SETTINGS["importlinter:contract:packages"]["layers"].split()
# What stands around the core: no export has it.
AROUND = ("lab", "cli", "serve", "demo", "__main__")
MOST_AT_THE_TOP = 12
# Packages of which a user imports names: their `__init__` imports these, and has no other code.
PUBLIC_PACKAGES = ("confidence",)

ARCHITECTURE = (PACKAGE / "docs/architecture.md").read_text(encoding="utf-8")
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
CORE = {path: source for path, source in SOURCES.items() if path.partition("/")[0].removesuffix(".py") not in AROUND}
PACKAGES = sorted(path.removesuffix("/__init__.py") for path in CORE if path.endswith("/__init__.py"))


def import_contracts(root):
    """What `lint-imports` says of the contracts in `setup.cfg`, of the package in a folder."""
    command = [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports_command as run; run()"]
    result = subprocess.run([*command, "--no-cache"], cwd=root, capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


def test_imports_go_one_way():
    code, said = import_contracts(ROOT)
    assert code == 0 and "2 kept, 0 broken" in said, said


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("trees/nodes.py", "from ..decoding.decoder import Decoder"),  # upwards, to another package
        (
            "decoding/word_splitter.py",
            "def late():\n    from ..lab.cli import bench",
        ),  # from the core to the lab, when called
        ("members/vocabulary.py", "from .member import Member"),  # in a circle
        ("elsewhere.py", ""),  # in no layer
    ],
)
def test_a_wrong_import_is_found(module, line, tmp_path):
    for path, source in SOURCES.items():
        (tmp_path / "hf_adafuse" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hf_adafuse" / path).write_text(source, encoding="utf-8")
    (tmp_path / "setup.cfg").write_bytes((ROOT / "setup.cfg").read_bytes())
    (tmp_path / "hf_adafuse" / module).write_text(SOURCES.get(module, "") + "\n" + line, encoding="utf-8")
    assert import_contracts(tmp_path)[0] == 1


def wrong_forms(path, source):
    """Lists the imports of the package's own modules that are not of the form `from ..package.x import y`.

    A Hub repository holds flat files: the export makes that form to `from .x import y`, and takes no other.
    """
    depth = path.count("/") + 1
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "hf_adafuse")
        elif isinstance(node, ast.ImportFrom):
            is_absolute = node.level == 0 and node.module.split(".")[0] == "hf_adafuse"
            if is_absolute or node.level > depth or (node.level > 0 and node.module is None):
                yield ast.unparse(node)


@pytest.mark.parametrize("path", sorted(CORE))
def test_imports_can_be_made_flat(path):
    assert list(wrong_forms(path, CORE[path])) == []


@pytest.mark.parametrize(
    "source",
    [
        "from . import vocabulary",
        "from ..trees import nodes\nfrom .. import trees",
        "from ...word_splitter import WordSplitter",
        "from hf_adafuse.decoding.word_splitter import WordSplitter",
        "import hf_adafuse.trees.nodes as nodes",
    ],
)
def test_a_wrong_form_is_found(source):
    assert len(list(wrong_forms("members/member.py", source))) == 1


def test_names_are_unique_across_packages():
    """The export puts the modules of all packages into one folder."""
    names = [Path(path).name for path in CORE if not path.endswith("__init__.py")]
    assert len(names) == len(set(names))


def picture():
    """The first column of the picture of the packages, from the top down: what each line names."""
    (block,) = re.findall(r"^## The packages\n.*?^```\n(.*?)^```$", ARCHITECTURE, flags=re.DOTALL | re.MULTILINE)
    return [name for line in block.splitlines() for name in re.split(" {2,}", line)[0].split(", ")]


def test_the_picture_shows_the_packages():
    assert [name.rstrip("/") for name in picture()] == [name for name in LAYERS if name != "|"]
    assert all((PACKAGE / name).is_dir() == name.endswith("/") for name in picture())


def test_the_picture_says_where_to_start_reading():
    (path,) = re.findall(r"start reading at (\S+)$", ARCHITECTURE, flags=re.MULTILINE)
    assert path.removeprefix("hf_adafuse/") in SOURCES


def test_few_modules_stand_at_the_top():
    top = [path for path in SOURCES if "/" not in path]
    assert len(top) <= MOST_AT_THE_TOP


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_what_it_holds(package):
    source = SOURCES[f"{package}/__init__.py"]
    assert 1 <= len(ast.get_docstring(ast.parse(source)).splitlines()) <= 10
    body = ast.parse(source).body[1:]
    if package in PUBLIC_PACKAGES:
        imports, (names,) = body[:-1], body[-1].targets
        assert names.id == "__all__" and all(isinstance(node, ast.ImportFrom) and node.level == 1 for node in imports)
    else:
        assert not body


@pytest.mark.parametrize("path", sorted(SOURCES))
def test_modules_are_documented(path):
    assert ast.get_docstring(ast.parse(SOURCES[path]))
