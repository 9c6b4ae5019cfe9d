"""A made-up package of rooms as flat files: they run, and flatten again to the same."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_adafuse.hub.flatten import flattened, write_code

# Two rooms and the package's own folder. `unused` is not needed by the entry.
PACKAGE = {
    "__init__.py": "raise ImportError('the package itself is not there')\n",
    "settings.py": "LIMIT = 3\n",
    "low/__init__.py": '"""The room below."""\n',
    "low/tools.py": "from ..settings import LIMIT\n\n\ndef double(x):\n    return min(2 * x, LIMIT)\n",
    "low/names.py": "NAMES = ['a', 'b']\n",
    "low/unused.py": "from .tools import double\n",
    "high/__init__.py": '"""The room above."""\n',
    "high/deep/shapes.py": "from ...low.names import NAMES\n\nSQUARE = NAMES[0]\n",
    "high/work.py": '''"""Does the work: write `from ..low.tools import double`.

from ..low.tools import double
"""

from __future__ import annotations

from math import (
    floor,
)

from ..low.names import NAMES  # not `from ..low.names import x`
from ..low.tools import (
    double as twice,
)
from ..settings import LIMIT as MOST, \\
    LIMIT
from .deep.shapes import SQUARE
from .plain import PLAIN

TEXT = "from ..low.tools import double"
LINES = """
from ..low.tools import double
    from .plain import PLAIN
"""


def late():
    from ..low.tools import double

    return [double(1), twice(9), MOST, LIMIT, NAMES, SQUARE, PLAIN, floor(1.5), TEXT, LINES]
''',
    "high/plain.py": "from __future__ import annotations\n\nPLAIN = 'plain'\n",
}
FLAT_WORK = (
    PACKAGE["high/work.py"]
    .replace("from ..low.names import NAMES", "from .names import NAMES")
    .replace("from ..low.tools import (", "from .tools import (")
    .replace("from ..settings import", "from .settings import")
    .replace("from .deep.shapes import", "from .shapes import")
    .replace("    from ..low.tools import double\n\n    return", "    from .tools import double\n\n    return")
)
FLAT = {
    "settings.py": PACKAGE["settings.py"],
    "tools.py": PACKAGE["low/tools.py"].replace("from ..settings", "from .settings"),
    "names.py": PACKAGE["low/names.py"],
    "shapes.py": PACKAGE["high/deep/shapes.py"].replace("from ...low.names", "from .names"),
    "plain.py": PACKAGE["high/plain.py"],
    "work.py": FLAT_WORK,
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return folder


def files_in(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def package(tmp_path):
    return write(tmp_path / "package", PACKAGE)


def test_what_the_entry_needs_lies_side_by_side(package, tmp_path):
    write_code(tmp_path / "flat", package / "high" / "work.py")
    assert files_in(tmp_path / "flat") == FLAT
    assert files_in(package) == PACKAGE  # the source is only read


def test_the_flat_files_run(package, tmp_path):
    write_code(tmp_path / "flat", package / "high" / "work.py")
    code = "from flat.work import *; print(late())"
    child = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    text, lines = "from ..low.tools import double", "\nfrom ..low.tools import double\n    from .plain import PLAIN\n"
    # double(1), and double(9) no more than LIMIT.
    assert child.stdout.strip() == repr([2, 3, 3, 3, ["a", "b"], "a", "plain", 1, text, lines])


def test_flat_files_flatten_to_themselves(package, tmp_path):
    write_code(tmp_path / "flat", package / "high" / "work.py")
    write_code(tmp_path / "again", tmp_path / "flat" / "work.py")
    assert files_in(tmp_path / "again") == files_in(tmp_path / "flat")


def test_a_folder_that_is_there_keeps_its_other_files(package, tmp_path):
    write(tmp_path / "flat", {"config.json": "{}", "plain.py": "OLD = 1\n"})
    write_code(os.fspath(tmp_path / "flat"), package / "high" / "work.py")
    assert files_in(tmp_path / "flat") == {**FLAT, "config.json": "{}"}


def test_an_entry_by_a_relative_name(package, tmp_path, monkeypatch):
    monkeypatch.chdir(package / "high")
    write_code(tmp_path / "flat", Path("work.py"))
    assert files_in(tmp_path / "flat") == FLAT


def test_modules_that_import_each_other(tmp_path):
    write(tmp_path, {"a/one.py": "from ..b.two import x\n", "b/two.py": "def x():\n    from ..a.one import x\n"})
    write_code(tmp_path / "flat", tmp_path / "a" / "one.py")
    expected = {"one.py": "from .two import x\n", "two.py": "def x():\n    from .one import x\n"}
    assert files_in(tmp_path / "flat") == expected


# One module


def flat(tmp_path, source):
    """The code of `high/module.py` made flat, and what it needs, by their names below the package's folder."""
    folder = write(tmp_path.resolve(), {"high/module.py": source})
    code, needed = flattened(folder / "high" / "module.py")
    return code, [path.relative_to(folder).as_posix() for path in needed]


def flat_or_refusal(tmp_path, source):
    try:
        return flat(tmp_path, source)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("source", "expected", "needed"),
    [
        ("from ..low.tools import x\n", "from .tools import x\n", "low/tools.py"),
        ("from ..tools import x\n", "from .tools import x\n", "tools.py"),
        ("from .tools import x\n", "from .tools import x\n", "high/tools.py"),
        ("from .deep.er.tools import x\n", "from .tools import x\n", "high/deep/er/tools.py"),
        ("from ..low.low import low\n", "from .low import low\n", "low/low.py"),
        ("if True:\n    from ..low.tools import x\n", "if True:\n    from .tools import x\n", "low/tools.py"),
        ("from ..low.tools import (\n    x,\n)\n", "from .tools import (\n    x,\n)\n", "low/tools.py"),
        ("from ..low.tools import x, \\\n    y\n", "from .tools import x, \\\n    y\n", "low/tools.py"),
        ("from ..low.tools import x as y  # é\n", "from .tools import x as y  # é\n", "low/tools.py"),
        ("from ..low.tools import x", "from .tools import x", "low/tools.py"),  # no newline at the end
    ],
)
def test_a_relative_import_loses_the_room(tmp_path, source, expected, needed):
    assert flat(tmp_path, source) == (expected, [needed])


@pytest.mark.parametrize(
    "source",
    [
        "import os.path\nfrom os.path import join\nimport low.tools as tools\n",
        '"""Docs.\n\nfrom ..low.tools import x\n"""\n',
        "TEXT = 'from ..low.tools import x'\n",
        "# from ..low.tools import x\n",
        'TEXT = f"""\nfrom ..low.tools import {x}\n"""\n',
        "",
    ],
)
def test_all_else_stays(tmp_path, source):
    assert flat(tmp_path, source) == (source, [])


@pytest.mark.parametrize(
    "source",
    [
        "TEXT = 'from ..a.b import c'; from ..a.b import c\n",
        "from  ..a.b  import c\n",
        "from ..a.b \\\n    import c\n",
        "from ..a.b import(c)\n",
        "TEXT = 'x\u2028y\x0cz'\nfrom ..a.b import c\n",
    ],
    ids=["beside_a_string", "spaces", "broken_line", "bracket", "odd_line_ends"],
)
def test_an_import_in_an_odd_form_is_made_flat_or_refused(tmp_path, source):
    """What must not be: that it is silently left as it is, or that the text beside it is rewritten."""
    expected = ast.parse(source)
    statement = expected.body[-1]
    statement.level, statement.module = 1, "b"
    found = flat_or_refusal(tmp_path, source)
    if isinstance(found, str):
        assert "module.py" in found and "line" in found
    else:
        assert ast.dump(ast.parse(found[0])) == ast.dump(expected)
        assert found[1] == ["a/b.py"]


# Refusals


@pytest.mark.parametrize(("source", "line"), [("from . import x\n", 1), ("import os\n\nfrom .. import x, y\n", 3)])
def test_an_import_that_transformers_overlooks_is_refused(tmp_path, source, line):
    write(tmp_path, {"a/one.py": "from ..b.two import x\n", "b/two.py": source, "b/x.py": ""})
    with pytest.raises(ValueError, match=rf"b/two.py must have the form `from .x import y`, but line {line} has not"):
        write_code(tmp_path / "flat", tmp_path / "a" / "one.py")


@pytest.mark.parametrize("depth", ["near", "far"])
def test_two_modules_of_one_name_are_refused(tmp_path, depth):
    files = {"a/one.py": "from ..b.two import x\nfrom ..c.two import y\n", "b/two.py": "x = 1\n", "c/two.py": "y = 2\n"}
    if depth == "far":  # the second is found by another module
        files |= {"a/one.py": "from ..b.two import x\nfrom .three import y\n", "a/three.py": "from ..c.two import y\n"}
    write(tmp_path, files)
    with pytest.raises(ValueError, match=r"must have names of their own, but .* share one") as caught:
        write_code(tmp_path / "flat", tmp_path / "a" / "one.py")
    assert os.path.join("b", "two.py") in str(caught.value) and os.path.join("c", "two.py") in str(caught.value)


def test_a_module_of_the_entrys_name_in_another_room_is_refused(tmp_path):
    write(tmp_path, {"a/one.py": "from ..b.one import x\n", "b/one.py": "x = 1\n"})
    with pytest.raises(ValueError, match="must have names of their own"):
        write_code(tmp_path / "flat", tmp_path / "a" / "one.py")
