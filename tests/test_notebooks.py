"""The notebooks: every cell runs, on the members that ship with the package, and shows what is committed."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from run_notebooks import NOTEBOOKS, run_cell, run_notebook
from transformers import dynamic_module_utils

ROOT = Path(__file__).parent.parent

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


def ruff(*arguments):
    command = [sys.executable, "-m", "ruff", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


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
def test_notebooks_are_committed_with_what_they_show(path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert any(cell.outputs for cell in cells)


def test_notebooks_are_linted():
    # `ruff` reads notebooks too; this fails when a setting leaves them out.
    listed = ruff("check", "--show-files")
    assert {Path(line).name for line in listed.splitlines()} >= {path.name for path in NOTEBOOKS}
    ruff("check", "notebooks")
    ruff("format", "--check", "notebooks")


def shown(notebook):
    """Per cell, what it shows: texts without their numbers, which differ between machines, and how many pictures."""
    return [
        [
            re.sub(r"[-+]?\d+(\.\d+)?|/\S+|\s+", "#", output.get("text") or output.data["text/plain"])
            for output in cell.outputs
        ]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, desk):
    # Here and not in a kernel of its own: each would import torch anew.
    notebook, namespace = run_notebook(path)
    assert [claim for claim in CLAIMS[path.stem] if not eval(claim, namespace)] == []
    assert shown(notebook) == shown(nbformat.read(path, as_version=4)), f"run python tests/run_notebooks.py {path.stem}"


@pytest.mark.parametrize(
    ("source", "shown"), [("x = 1\nx + 1", 2), ("x = 1", None), ("x = 1\nif x:\n    x", None), ("x = 1\nx;", None)]
)
def test_a_cell_shows_its_last_expression(source, shown):
    assert run_cell(source, {}) == shown
