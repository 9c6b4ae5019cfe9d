"""The notebooks: every cell runs, on the members that ship with the package, and shows what is committed."""

from __future__ import annotations

import base64
import io
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import numpy
import pytest
from matplotlib import pyplot
from run_notebooks import NOTEBOOKS, main, run_cell, run_notebook
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
        "'eighty' in ''.join(committed.text for committed in rounds)",
        "'eighty' not in ''.join(committed.text for committed in without_branches)",
    ],
    "choosing_tau_M_B": [
        "(between, len(margins)) == (19, 207)",
        # Both tokenizers begin all 50 prompts with the same 2 tokens, which a batch reads once.
        "prompt_tokens + 2 * 2 * 49 == sum("
        "len(one(question.prompt).input_ids) for one in (tokenizer, assistant_tokenizer) for question in questions)",
        "round(100 * default['accuracy'].error) == 6",
    ],
    "quality": [
        "max(by_name[f'member {k} alone'].accuracy.value for k in (1, 2, 3)) < 0.6 < span.accuracy.value",
        "by_name['1 + 2 + 3, robust'].accuracy.value >= by_name['1 + 2 + 3, word, root'].accuracy.value",
        "by_name['1 + 2 + 3, robust'].accuracy.value > span.accuracy.value",
    ],
    "paper": [
        "table1['differences'][0]['value'] > 3 * table1['differences'][0]['standard_error']",
        "[cell['who'] for cell in table2['cells']] == ['2 members', '3 members']",
        "fig3['partings']['demo'][0]['scores'] == [0.0, 100.0]",
        "[cell['n'] for cell in fig7['cells']] == [60] * 10 and [cell['n'] for cell in fig6['cells']] == [60] * 7",
        "fig2['cells'][3]['value'] == fig6['cells'][4]['value']",
        "fig5['times'][-1]['who'] == 'AdaFuse, B = 3' and len(fig5['taken']) == 3",
    ],
    "methods": [
        "max(one.accuracy.value for one in alone) + 0.2 < results['adafuse'].accuracy.value",
        "results['deepen'].accuracy.value < results['sweetspan'].accuracy.value < results['robust'].accuracy.value",
        "own_methods[1.0].accuracy.value < own_methods[9.0].accuracy.value",
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


NUMBER = re.compile(r"[-+]?\d+(?:\.(\d+))?(?:e[-+]?\d+)?")
# Outputs whose numbers another run gives otherwise, by a piece of the cell's source: seconds; how many tokens passes
# take along, which follows from how long a pass takes; and sizes of files that transformers writes.
UNSTEADY = {
    ('paper("fig5"', "text/plain"),
    ('paper("fig5"', "image/png"),
    ('output.stats["members"]', "text/plain"),
    ('sweep("', "image/png"),
    ("stat().st_size", "text/plain"),
}


def shown(notebook):
    """What the cells show: of each output the cell's source, the kind, and the text or picture."""
    return [
        (cell.source, kind, content)
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        for kind, content in (output.get("data") or {"text/plain": output.get("text")}).items()
    ]


def differences(now, then, num_questions):
    """The first line or the kind of each output that another run shows otherwise."""
    assert [output[:2] for output in now] == [output[:2] for output in then]
    found = []
    for (source, kind, new), (_, _, old) in zip(now, then, strict=True):
        is_steady = not any(piece in source and kind == of_kind for piece, of_kind in UNSTEADY)
        if kind == "image/png":
            found += [source] * (is_steady and not is_same_picture(new, old))
        elif len(new.splitlines()) != len(old.splitlines()):
            found.append(source)
        else:
            lines = zip(new.splitlines(), old.splitlines(), strict=True)
            found += [line for line, other in lines if not is_same_line(line, other, num_questions, is_steady)]
    return found


def is_same_line(new, old, num_questions, is_steady=True):
    """Whether a line has the same words, and numbers as near as rounding on another processor leaves them."""
    if len({" ".join(NUMBER.sub("#", line).split()) for line in (new, old)}) == 2:
        return False
    pairs = zip(NUMBER.finditer(new), NUMBER.finditer(old), strict=True)
    return not is_steady or all(
        abs(float(one[0]) - float(other[0])) <= tolerance(old, other, num_questions) for one, other in pairs
    )


def tolerance(line, number, num_questions):
    """How far a number may be off. The answer to one of `num_questions` questions may be another one."""
    if "±" in line or re.match(r"\d+ of \d", line):
        return 100 / num_questions + 0.1
    if line.startswith("|"):  # the lengths of rounds
        return 2 / num_questions * abs(float(number[0]))
    return max(1e-3 * abs(float(number[0])), 1.01 * 10 ** -len(number[1]) if number[1] else 0)


def is_same_picture(new, old):
    """Whether two pictures, as base64 of PNG, differ in less than one pixel of 200."""
    first, second = (pyplot.imread(io.BytesIO(base64.b64decode(content))) for content in (new, old))
    return first.shape == second.shape and (numpy.abs(first - second).max(-1) > 0.25).mean() < 0.005


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, desk):
    # Here and not in a kernel of its own: each would import torch anew.
    notebook, namespace = run_notebook(path)
    assert [claim for claim in CLAIMS[path.stem] if not eval(claim, namespace)] == []
    committed = shown(nbformat.read(path, as_version=4))
    found = differences(shown(notebook), committed, namespace.get("NUM_QUESTIONS", math.inf))
    assert found == [], f"run python tests/run_notebooks.py {path.stem}"


@pytest.mark.parametrize(
    ("new", "old", "same"),
    [
        ("nll  1.486", "nll 1.487", True),
        ("nll 1.486", "nll 1.496", False),
        ("nll 0.000", "nll -0.001", True),
        ("3 rounds", "4 rounds", False),
        ("123.4 s", "123.5 s", True),
        ("'robust': '90.0 ± 3.9'", "'robust': '91.7 ± 3.6'", True),
        ("'robust': '90.0 ± 3.9'", "'robust': '93.3 ± 3.2'", False),
        ("49 of 60 are right", "50 of 60 are right", True),
        ("48 of 60 are right", "50 of 60 are right", False),
        ("| 2 words | 1.77 (44.6 / 33.7 / 21.7) |", "| 2 words | 1.78 (45.5 / 33.3 / 21.2) |", True),
        ("| 2 words | 1.77 (44.6 / 33.7 / 21.7) |", "| 2 words | 1.73 (47.1 / 32.9 / 20.0) |", False),
        ("Written in /tmp/folder/paper", "Written in /tmp/folder/papers", False),
        ("by 0", "by -", False),
    ],
)
def test_stale_numbers_are_found(new, old, same):
    cell = ("x", "text/html")
    assert differences([(*cell, new)], [(*cell, old)], 60) == ([] if same else [new])


def test_stale_pictures_are_found():
    def picture(height):
        figure, ax = pyplot.subplots(figsize=(4, 3))
        ax.bar([1], [height])
        ax.set_ylim(0, 100)
        content = io.BytesIO()
        figure.savefig(content, format="png")
        pyplot.close(figure)
        return base64.b64encode(content.getvalue()).decode()

    assert is_same_picture(picture(50), picture(50)) and not is_same_picture(picture(50), picture(54))


def test_seconds_are_not_compared():
    cells = [('fig5 = paper("fig5")', "text/plain", f"| llama | {seconds} |") for seconds in ("0.5", "0.8")]
    assert differences(cells[:1], cells[1:], 60) == []


def test_a_name_that_no_notebook_has_is_refused():
    with pytest.raises(ValueError, match=r"`NAME` must be one of .*'quickstart'.*, but is 'quikstart'"):
        main(["quality", "quikstart"])


@pytest.mark.parametrize(
    ("source", "shown"), [("x = 1\nx + 1", 2), ("x = 1", None), ("x = 1\nif x:\n    x", None), ("x = 1\nx;", None)]
)
def test_a_cell_shows_its_last_expression(source, shown):
    assert run_cell(source, {}) == shown
