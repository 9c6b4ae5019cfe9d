"""Runs the notebooks and writes what each cell shows into them:

    python tests/run_notebooks.py [NAME ...]

`tests/test_notebooks.py` runs them again and compares what they show.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before the first figure: there is no screen
import nbformat
from matplotlib import pyplot

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
_DOTS_PER_INCH = 72


def run_notebook(path: Path) -> tuple[Any, dict[str, Any]]:
    """The notebook with what its cells show now, and the names that they have defined."""
    notebook = nbformat.read(path, as_version=4)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(cells, start=1):
        cell.execution_count = number
        cell.outputs = _outputs(cell.source, namespace, number)
    return notebook, namespace


def run_cell(source: str, namespace: dict[str, Any]) -> Any:
    """Runs a cell as a notebook does; returns what it would display, the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), namespace)
    value = None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
    return None if source.rstrip().endswith(";") else value


def _outputs(source: str, namespace: dict[str, Any], number: int) -> list[Any]:
    printed, outputs = io.StringIO(), []
    with contextlib.redirect_stdout(printed):
        value = run_cell(source, namespace)
    if printed.getvalue():
        outputs.append(nbformat.v4.new_output("stream", name="stdout", text=_placeless(printed.getvalue())))
    if value is not None:
        html = value._repr_html_() if hasattr(value, "_repr_html_") else None
        data = {"text/plain": repr(value)} if html is None else {"text/html": html, "text/plain": str(value)}
        data = {kind: _placeless(text) for kind, text in data.items()}
        outputs.append(nbformat.v4.new_output("execute_result", data=data, execution_count=number))
    for figure in map(pyplot.figure, pyplot.get_fignums()):
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=_DOTS_PER_INCH)
        data = {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": "a figure"}
        outputs.append(nbformat.v4.new_output("display_data", data=data))
    pyplot.close("all")
    return outputs


def _placeless(text: str) -> str:
    """A text without the place of this checkout, and with one name for all temporary folders."""
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/tmp\w{{8}}", "/tmp/folder", text)
    return text.replace(f"{ROOT}/", "")


def main(names: list[str]) -> None:
    """
    Runs the notebooks of these names, or all.

    Raises:
        ValueError: there is no notebook of a name. None has been run then.
    """
    known = [path.stem for path in NOTEBOOKS]
    if wrong := [name for name in names if name not in known]:
        raise ValueError(f"`NAME` must be one of {known}, but is {wrong[0]!r}. Check the spelling.")
    for path in NOTEBOOKS:
        if not names or path.stem in names:
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)  # where a notebook leaves files
                tempfile.tempdir = folder
                notebook, _ = run_notebook(path)
                tempfile.tempdir = None
                os.chdir(path.parent)
            nbformat.write(notebook, path)


if __name__ == "__main__":
    os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp()
    main(sys.argv[1:])
