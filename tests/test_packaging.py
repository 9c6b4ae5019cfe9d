"""Packaging: what the README, setup.cfg and tests/constraints.txt say of each other, and what git holds."""

import ast
import os
import re
import subprocess
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.project import ROOT, setup_cfg

TOP_LEVEL = {"setup.cfg", "setup.py", "README.md", "LICENSE", "hf_adafuse", "tests", "notebooks"}

# Traces of the machine the project was written on, and of where its packages came from.
MACHINE = re.compile(r"(?<![\w.$}-])/(?:work|opt|root|home|mnt)/|pypi\.org|pythonhosted|extra-index-url|find-links")
DATA_SUFFIXES = {".safetensors", ".json", ".jsonl", ".txt", ".png"}


def requirements():
    """Returns every requirement of setup.cfg, those of the extras included, but for extras naming each other."""
    config = setup_cfg()
    blocks = [config["options"]["install_requires"], *config["options.extras_require"].values()]
    lines = [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]
    return [requirement for requirement in map(Requirement, lines) if requirement.name != "hf_adafuse"]


def constraints():
    lines = (ROOT / "tests/constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def readme_command(marker):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(rf"^<!-- {marker} -->\n+```bash\n(.*?)\n```$", text, flags=re.DOTALL | re.MULTILINE)
    assert len(found) == 1, f"README.md has {len(found)} commands marked <!-- {marker} -->"
    return found[0]


def project_files():
    """Returns the files git holds or would take with `git add .`, as paths from the root."""
    # `safe.directory`: a checkout owned by someone else, as CI machines have it, is read all the same.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted(name for name in listed.split("\0") if name and (ROOT / name).exists())


@pytest.mark.parametrize("marker", ["run-command", "test-command"])
def test_readme_commands_start_afresh_with_the_tested_versions(marker):
    command = readme_command(marker)
    assert "python3 -m venv " in command
    installs = re.findall(r"pip install [^&|;\n]*", command)
    assert installs
    assert all("-c tests/constraints.txt" in install for install in installs)


def test_readme_test_command_runs_the_whole_suite():
    assert re.search(r'-e "\.\[test\]".* -m pytest -n auto$', readme_command("test-command"))


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_requirements_are_ranges(requirement):
    operators = {specifier.operator for specifier in requirement.specifier}
    assert ">=" in operators
    assert operators <= {">=", "<", "!="}


def test_transformers_range_is_closed_and_its_start_is_tested():
    (transformers,) = [requirement for requirement in requirements() if requirement.name == "transformers"]
    assert "<" in {specifier.operator for specifier in transformers.specifier}
    oldest = re.search(r"^oldest_transformers=(.+)$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert f">={oldest.removesuffix('.0')}" in str(transformers.specifier).split(",")


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_constraints_hold_one_version_of_each_requirement(requirement):
    (pin,) = [pin for pin in constraints() if pin.name == requirement.name]
    (specifier,) = pin.specifier
    assert specifier.operator == "=="
    assert requirement.specifier.contains(specifier.version)


def test_version_is_a_literal():
    # `version = attr:` reads a literal without importing the package, which would need torch at build time.
    tree = ast.parse((ROOT / "hf_adafuse/__init__.py").read_text(encoding="utf-8"))
    targets = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    assert re.fullmatch(r"\d+\.\d+\.\d+", ast.literal_eval(targets["__version__"]))


def test_every_file_of_the_package_is_shipped():
    patterns = setup_cfg()["options.package_data"]["hf_adafuse"].split()
    names = [name.removeprefix("hf_adafuse/") for name in project_files() if name.startswith("hf_adafuse/")]
    data = [name for name in names if not name.endswith(".py")]
    # `**` of setuptools also stands for no folder at all.
    shipped = [pattern.replace("**/", "") for pattern in patterns]
    assert [name for name in data if not any(fnmatch(name, pattern) for pattern in shipped)] == []
    assert "py.typed" in data
    folders = {Path(name).parent for name in names if name.endswith(".py")}
    assert [str(folder) for folder in sorted(folders) if f"{folder}/__init__.py".removeprefix("./") not in names] == []


def test_entry_points_are_there():
    lines = [line for value in setup_cfg()["options.entry_points"].values() for line in value.splitlines() if line]
    assert len(lines) >= 2
    for line in lines:
        module, name = line.split("=")[1].strip().split(":")
        assert callable(getattr(import_module(module), name))


def test_top_level_holds_only_what_belongs_there():
    top = {name.split("/")[0] for name in project_files()}
    assert sorted(name for name in top - TOP_LEVEL if not name.startswith(".")) == []


def test_no_trace_of_the_machine():
    this = Path(__file__).relative_to(ROOT).as_posix()
    names = [name for name in project_files() if name != this and Path(name).suffix not in DATA_SUFFIXES]
    names.append("tests/constraints.txt")
    found = {name: MACHINE.findall((ROOT / name).read_text(encoding="utf-8")) for name in names}
    assert {name: traces for name, traces in found.items() if traces} == {}


@pytest.mark.parametrize("text", ["cd /work/main", '"/opt/x"', "PATH=/home/me/bin", "--find-links=x"])
def test_a_trace_of_the_machine_is_found(text):
    assert MACHINE.search(text)


@pytest.mark.parametrize("text", ["https://example.org/work/x", "net/work/", "../opt/x", "$root/work/x"])
def test_other_paths_are_no_trace(text):
    assert not MACHINE.search(text)


def test_ci_script_can_be_run():
    assert os.access(ROOT / ".ci/run", os.X_OK)
