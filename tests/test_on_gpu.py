"""The check that waits for a GPU: all of it runs on CPU with tiny sizes, and what fails, hangs or dies costs no more
than itself."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import on_gpu
import pytest
from on_gpu import PARTS, PLACES, Part, Row, run, table
from support.cases import random_case

SCRIPT = Path(on_gpu.__file__)


@pytest.mark.slow
def test_every_part_runs_on_cpu(tmp_path):
    """As by hand: from a bare checkout, in another folder."""
    command = [sys.executable, SCRIPT, "--device", "cpu", "--minutes", "4", "--out", "found.json"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert [(part["part"], part["ended"]) for part in found["parts"]] == [(part.name, "done") for part in PARTS]
    assert all(part["rows"] for part in found["parts"])
    printed = done.stdout[done.stdout.index("part  ") :]
    for part in found["parts"]:
        for what, values in part["rows"].items():
            assert values.get("right", True), (part["part"], what, values)
            assert what in printed


def test_without_a_gpu_the_script_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["on_gpu.py"])
    with pytest.raises(SystemExit):
        on_gpu.main()
    assert "`--device` must be cpu, but is cuda" in capsys.readouterr().err


@pytest.mark.slow
def test_what_needs_an_extra_is_left_out_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(on_gpu, "HAS_ICU", False)
    monkeypatch.setattr(on_gpu, "METHODS", ("unite", "spans"))
    monkeypatch.setitem(sys.modules, "icu4py", None)
    monkeypatch.setitem(sys.modules, "icu4py.breakers", None)
    (_, unite), (_, spans) = on_gpu.methods(PLACES["cpu"])
    assert unite["right"] and spans == {"left_out": "icu4py is not installed"}
    needs_it = next(number for number in range(40) if random_case(number).config.word_boundary == "unicode")
    monkeypatch.setattr(on_gpu, "random_case", lambda number: random_case(needs_it))
    place = PLACES["cpu"]
    (cases,) = on_gpu.oracle(place._replace(sizes=dataclasses.replace(place.sizes, cases=1)))
    assert cases.found["equal"] == "1 of 1"


def yields(place):
    yield Row("first", {"right": True, "count": 1})
    yield Row("first", {"right": True, "count": 2})


def yields_and_raises(place):
    yield Row("before", {"right": True})
    raise RuntimeError("a GPU's error")


def dies(place):
    yield Row("before", {"right": True})
    time.sleep(0.2)  # until it has been sent
    os._exit(7)


def hangs(place):
    yield Row("before", {"right": True})
    time.sleep(600)


def is_wrong(place):
    yield Row("wrong", {"right": False, "count": 0})


@pytest.mark.slow
def test_a_part_that_fails_costs_no_other(tmp_path, capsys):
    parts = [Part("raises", 60, yields_and_raises), Part("dies", 60, dies), Part("wrong", 60, is_wrong),
             Part("hangs", 2, hangs), Part("last", 60, yields)]  # fmt: skip
    out = tmp_path / "found.json"
    results = run(parts, PLACES["cpu"], 240, out)
    raises, dies_, wrong, hung, last = results
    assert "RuntimeError: a GPU's error" in raises.ended and "yields_and_raises" in raises.ended  # where it came from
    assert dies_.ended == "its process died, exit code 7"
    assert hung.ended == "cut off: its time was up"
    assert [result.rows for result in (raises, dies_, hung)] == [{"before": {"right": True}}] * 3
    assert wrong.ended == last.ended == "done" and last.rows == {"first": {"right": True, "count": 2}}
    assert [result.is_right for result in results] == [False, False, False, False, True]
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [part["ended"] for part in found["parts"]] == [result.ended for result in results]
    lines = table(results).splitlines()
    assert [" NO " in line for line in lines[1:]] == [False, True, False, True, True, False, True, False]
    assert "first: count 2" in capsys.readouterr().out


@pytest.mark.slow
def test_when_the_time_is_up_the_rest_is_not_reached():
    hung, last = run([Part("hangs", 60, hangs), Part("last", 60, yields)], PLACES["cpu"], 3)
    assert hung.ended == "cut off: the time of all parts was up" and last.ended == "not reached" and not last.is_right
