"""Report, never fail: which newer releases exist of transformers and of what the extras use, and what they break.

So the next renaming is seen on the day that it is out.

    python .ci/newest.py PYTHON CONSTRAINTS

`PYTHON` is the interpreter of an environment with the pinned versions, which this script copies for each newer release
that it tries; `CONSTRAINTS` is the file with the pinned versions.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What is tried with a newer release of each package: the tests that reach into it.
TESTS = {
    "transformers": [
        "tests/decoding/test_oracle.py", "tests/decoding/test_laws.py", "tests/test_transformers_compat.py",
        "tests/trees/test_backends.py", "tests/call/test_host.py", "tests/test_pipelines.py", "tests/hub",
    ],
    "accelerate": ["tests/call/test_survival.py", "tests/test_transformers_compat.py"],
    "peft": ["tests/members/test_peft.py", "tests/members/test_peft_refusals.py", "tests/test_transformers_compat.py"],
    "lm_eval": ["tests/lab/evaluation"],
    "xgrammar": ["tests/members/test_structured.py", "tests/call/test_structured_output.py"],
    "outlines": ["tests/call/test_other_libraries.py"],
    "datasets": ["tests/cli/test_questions.py"],
}  # fmt: skip


def newest(python: str, package: str) -> str | None:
    """The newest release of a package that an installer finds, or `None` where it finds none."""
    done = subprocess.run(
        [python, "-m", "pip", "index", "versions", package], capture_output=True, text=True, check=False
    )
    found = re.search(r"\(([^)]+)\)", done.stdout)
    return found[1] if found else None


def outcome(package: str, version: str, constraints: str) -> str:
    """What the tests of a package say with this release of it, in an environment of its own."""
    pins = re.sub(rf"(?m)^{package}==.*\n", "", constraints)
    with tempfile.TemporaryDirectory() as folder:
        pinned = Path(folder) / "constraints.txt"
        pinned.write_text(pins, encoding="utf-8")
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        # In two steps: the range of our own requirement would refuse a newer transformers.
        for packages in (["-e", ".[test]"], [f"{package}=={version}"]):
            command = [python, "-m", "pip", "install", "-q", "-c", str(pinned), *packages]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                return f"does not install: {done.stderr.strip().splitlines()[-1]}"
        command = [python, "-m", "pytest", "-q", "-n", "auto", "--cases", "40", "-p", "no:cacheprovider"]
        done = subprocess.run([*command, *TESTS[package]], cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]]
    broken = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return "\n    ".join([lines[-1], *broken[:20]])


def main(python: str, constraints_file: str) -> None:
    """Print a line per package, and below it the tests that a newer release breaks."""
    constraints = Path(constraints_file).read_text(encoding="utf-8")
    for package in TESTS:
        (pin,) = re.findall(rf"(?m)^{package}==(.*)$", constraints)
        version = newest(python, package)
        if version is None:
            print(f"{package}: {pin} is pinned; the newest release is not known")
        elif version == pin:
            print(f"{package}: {pin} is pinned and the newest")
        else:
            print(f"{package}: {pin} is pinned; with {version}: {outcome(package, version, constraints)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
