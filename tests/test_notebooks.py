"""The notebooks: clean as committed, and every cell runs, on the members that ship with the package."""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
import nbformat
import pytest
from transformers import dynamic_module_utils

matplotlib.use("Agg")  # before the first figure: there is no screen

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# What the texts say of the results: with other members in the package, it is these that must be written anew.
CLAIMS = {
    "quickstart": [
        "together == ' one hundred and eighty'",
        "together not in alone.values()",
        "sorted(alone) == ['GPTNeoXForCausalLM', 'LlamaForCausalLM']",
    ],
    "inside_a_round": [
        "rounds[0].margins[0][0] >= 0.7 > rounds[0].margins[1][0]",
        "'eighty' in str(rounds)",
        "'eighty' not in str(without_branches)",
    ],
    "choosing_tau_M_B": [
        "sum(0.3 <= m < 0.9 for r in default['rounds'] for c in r for ms in c.margins for m in ms) < 30",
        "len(questions) == 50",
        "0.05 < default['error'] < 0.07",
    ],
    "quality": [
        "max(by_name[f'member {k} alone'].accuracy for k in (1, 2, 3)) < 60 < span.accuracy",
        "by_name['1 + 2 + 3, robust'].accuracy >= by_name['1 + 2 + 3, word, root'].accuracy",
        "by_name['1 + 2 + 3, robust'].accuracy > span.accuracy",
    ],
    "paper": [
        "table1['differences'][0]['value'] > 3 * table1['differences'][0]['standard_error']",
        "[cell['who'] for cell in table2['cells']] == ['2 members', '3 members']",
        "fig3['partings']['demo'][0]['scores'] == [0.0, 1.0]",
        "[cell['n'] for cell in fig7['cells']] == [60] * 10 and [cell['n'] for cell in fig6['cells']] == [60] * 7",
        "fig2['cells'][3]['value'] == fig6['cells'][4]['value']",
        "fig5['times'][-1]['who'] == 'AdaFuse, B = 3' and len(fig5['taken']) == 3",
    ],
    "methods": [
        "max(one.accuracy for one in alone) + 20 < results['adafuse'].accuracy",
        "results['deepen'].accuracy < results['sweetspan'].accuracy < results['robust'].accuracy",
        "own_methods[1.0].accuracy < own_methods[9.0].accuracy",
    ],
    "publish_to_the_hub": ["answer(ensemble) == ' one hundred and eighty'", "answer(plain) != answer(ensemble)"],
}


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def ruff(*arguments):
    command = [sys.executable, "-m", "ruff", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def run_cell(source, namespace):
    """Runs a cell as a notebook does; returns what it would display, the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), namespace)
    return None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A place where a notebook may leave files: the folder it runs in, temporary folders, transformers' modules."""
    from matplotlib import pyplot

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    pyplot.close("all")


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} == set(CLAIMS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_clean(path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells
    assert [cell.outputs for cell in cells] == [[]] * len(cells)
    assert [cell.execution_count for cell in cells] == [None] * len(cells)


def test_notebooks_are_linted():
    # `ruff` reads notebooks too; this fails when a setting leaves them out.
    listed = ruff("check", "--show-files")
    assert {Path(line).name for line in listed.splitlines()} >= {path.name for path in NOTEBOOKS}
    ruff("check", "notebooks")
    ruff("format", "--check", "notebooks")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, desk):
    # Here and not in a kernel of its own: each would import torch anew.
    namespace = {"__name__": "__main__"}
    displayed = []
    for cell in code_cells(path):
        value = run_cell(cell.source, namespace)
        if value is not None:
            html = value._repr_html_() if hasattr(value, "_repr_html_") else None
            displayed.append(html or repr(value))
    assert displayed
    assert all(displayed)
    assert [claim for claim in CLAIMS[path.stem] if not eval(claim, namespace)] == []


@pytest.mark.parametrize(("source", "shown"), [("x = 1\nx + 1", 2), ("x = 1", None), ("x = 1\nif x:\n    x", None)])
def test_a_cell_shows_its_last_expression(source, shown):
    assert run_cell(source, {}) == shown
