"""What the documents say is run: the Python blocks and commands of the README and the pages in hf_adafuse/docs, and the
examples in docstrings.

Nothing is downloaded: where a document names a model that is not a local folder, the test loads a member of the demo.
"""

from __future__ import annotations

import doctest
import importlib
import json
import os
import re
import shlex
from pathlib import Path

import nbformat
import pytest
from make_reference import reference
from support.stand_in import StandIn, serving
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_adafuse.cli import main
from hf_adafuse.demo import NAMES

pytestmark = pytest.mark.every_case

ROOT = Path(__file__).parent.parent
MODELS = ROOT / "hf_adafuse/demo/models"
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "hf_adafuse/docs").glob("*.md"))
# The examples of the reference are those of the docstrings.
REFERENCE = "hf_adafuse/docs/reference.md"
DOCUMENTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", *PAGES) if name != REFERENCE}
ARCHITECTURE = DOCUMENTS["hf_adafuse/docs/architecture.md"]

# .ci/run runs the commands below these comments, in environments of their own.
RUN_BY_CI = ("<!-- run-command -->", "<!-- test-command -->")

# What takes minutes is run as written, but smaller: the last of several flags counts.
SMALL = ["--parameters", "2M", "--prompt-tokens", "12", "--batch", "1,2", "--new-tokens", "4", "--threads", "1"]

# Commands of other programs: the test that runs them, or why none does.
ELSEWHERE = {
    "hf upload": "it needs an account",
}


def blocks(text, language):
    """Yields the line number and text of each fenced block in a language, those that CI runs left out."""
    pattern = re.compile(rf"^(<!-- [\w-]+ -->\n+)?```{language}\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
    for found in pattern.finditer(text):
        if (found[1] or "").strip() not in RUN_BY_CI:
            yield text.count("\n", 0, found.start(2)) + 1, found[2]


def commands(program=""):
    """Returns the document and line of each command and its text, those joined by `&&` one by one."""
    found = []
    for name, text in DOCUMENTS.items():
        for start, block in blocks(text, "bash"):
            for number, line in enumerate(block.replace("\\\n", " ").splitlines(), start=start):
                parts = [part.strip() for part in line.split("&&") if part.strip()]
                found += [(f"{Path(name).stem} {number}", part) for part in parts if part.startswith(program)]
    return found


@pytest.fixture
def stand_ins(monkeypatch, tmp_path):
    """
    Names of models stand for the members of the demo, in the order in which they come up, with a chat template each;
    files go to `tmp_path`, where some questions lie.
    """
    folders = {}

    def resolve(name):
        if isinstance(name, os.PathLike) or os.path.isdir(name):
            return name
        return folders.setdefault(name, str(MODELS / NAMES[len(folders) % len(NAMES)]))

    for auto in (AutoConfig, AutoTokenizer, AutoModelForCausalLM):
        load = auto.from_pretrained
        monkeypatch.setattr(
            auto, "from_pretrained", lambda name, *args, _load=load, **kw: _load(resolve(name), *args, **kw)
        )
    load_tokenizer = AutoTokenizer.from_pretrained
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **kw: for_chats(load_tokenizer(*args, **kw)))
    questions = [json.dumps({"question": f"What is the capital of {country}?"}) for country in ("Peru", "Chile")]
    (tmp_path / "questions.jsonl").write_text("\n".join(questions) + "\n", encoding="utf-8")
    given = json.dumps({"question": "What is the capital of Peru?", "answers": [" Lima", " Oslo"]})
    (tmp_path / "given.jsonl").write_text(f"{given}\n", encoding="utf-8")
    (tmp_path / "my-questions").mkdir()
    for task in ("nq", "triviaqa"):
        lines = [json.dumps({"question": f"What is the capital of {name}?", "answer": name}) for name in "ABCDEFG"]
        (tmp_path / "my-questions" / f"{task}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return folders


def for_chats(tokenizer):
    tokenizer.chat_template = "{% for message in messages %}Question: {{ message['content'] }}\nAnswer:{% endfor %}"
    return tokenizer


@pytest.fixture
def server(monkeypatch):
    """At the address of the documents' server, one with the second member of the demo."""
    model, tokenizer = (kind.from_pretrained(MODELS / NAMES[1]) for kind in (AutoModelForCausalLM, AutoTokenizer))
    with serving(StandIn(model.eval(), tokenizer)) as url:
        monkeypatch.setattr(
            "hf_adafuse.servers.transport.checked_url", lambda asked, _: url if "8000" in asked else asked
        )
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, text in DOCUMENTS.items() if list(blocks(text, "python"))])
def test_python_blocks_run(name, stand_ins, server, capsys):
    namespace = {"__name__": "__main__"}  # of all blocks: a later one may go on from an earlier one
    for number, block in blocks(DOCUMENTS[name], "python"):
        exec(compile("\n" * (number - 1) + block, name, "exec"), namespace)
    assert capsys.readouterr().out.strip()


def test_commands_of_other_programs_are_known():
    ours = commands("hf-adafuse ")
    assert len(ours) >= 2
    others = [command for number, command in commands() if (number, command) not in ours]
    assert [command for command in others if not command.startswith(tuple(ELSEWHERE))] == []
    for program, place in ELSEWHERE.items():
        if place.endswith(".py"):
            words = [f'"{word}"' for word in program.split()[1:]]
            text = (ROOT / "tests" / place).read_text(encoding="utf-8")
            assert all(word in text for word in words), f"{place} does not run `{program}`"


@pytest.mark.slow
@pytest.mark.parametrize("command", [pytest.param(command, id=place) for place, command in commands("hf-adafuse ")])
def test_commands_run(command, stand_ins, tmp_path, capsys):
    if "scores/ensemble" in command:
        pytest.skip("it reads what the command above it writes")
    before = set(tmp_path.iterdir())
    arguments = shlex.split(command, comments=True)[1:]
    small = SMALL if arguments[0] == "bench" else []
    assert main([*arguments, *small]) == 0
    assert capsys.readouterr().out.strip() or set(tmp_path.iterdir()) > before


def texts_of_notebooks():
    """The Markdown of each notebook, by its path."""
    return {
        f"notebooks/{path.name}": "\n\n".join(
            cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"
        )
        for path in (ROOT / "notebooks").glob("*.ipynb")
    }


def test_links_lead_somewhere():
    """Each link to a file, and each heading that it names."""
    reference = {REFERENCE: (ROOT / REFERENCE).read_text("utf-8")}
    for name, text in {**DOCUMENTS, **reference, **texts_of_notebooks()}.items():
        prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            if "://" in target:
                continue
            path, _, heading = target.partition("#")
            found = ((ROOT / name).parent / path).resolve() if path else ROOT / name
            assert found.exists(), f"{name} links to {target}"
            if heading:
                titles = re.findall(r"^#+ (.*)$", found.read_text("utf-8"), flags=re.MULTILINE)
                anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
                assert heading in anchors, f"{name} links to {target}"


def test_every_page_is_linked_from_the_readme():
    assert [page for page in PAGES if f"({page})" not in DOCUMENTS["README.md"]] == []


def test_every_page_says_what_it_answers():
    for page in PAGES:
        title, opening = (ROOT / page).read_text("utf-8").split("\n\n", 2)[:2]
        assert title.startswith("# ") and opening.startswith("This page answers: "), page


def test_the_architecture_names_what_there_is():
    """Every `name` (`file.py`) of the life of a call is a function or class in that file, and every file exists."""
    package = ROOT / "hf_adafuse"
    for path in re.findall(r"`([a-z_/]+\.py)`", ARCHITECTURE):
        assert (package / path).is_file() or (ROOT / path).is_file(), path
    pairs = re.findall(r"`([A-Za-z_.]+)`\s+\(`([a-z_/]+\.py)`\)", ARCHITECTURE)
    pairs += re.findall(r"`([A-Za-z_.]+)` in\s+`([a-z_/]+\.py)`", ARCHITECTURE)
    assert len(pairs) >= 15
    for name, path in pairs:
        module = importlib.import_module(f"hf_adafuse.{path.removesuffix('.py').replace('/', '.')}")
        thing = module
        for part in name.split("."):
            thing = getattr(thing, part)


def test_the_reference_is_that_of_the_docstrings():
    assert (ROOT / REFERENCE).read_text("utf-8") == reference(), "run python tests/make_reference.py"


class FencedParser(doctest.DocTestParser):
    """Reads examples inside Markdown fences, whose closing line would be taken for expected output."""

    def parse(self, string, name="<string>"):
        return super().parse(re.sub(r"^ *```(python)?$", "", string, flags=re.MULTILINE), name)


def docstring_examples():
    """Returns the examples of every module that has some."""
    finder = doctest.DocTestFinder(parser=FencedParser(), exclude_empty=True)
    found = []
    for path in sorted((ROOT / "hf_adafuse").rglob("*.py")):
        if ">>> " in path.read_text(encoding="utf-8"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found += [test for test in finder.find(importlib.import_module(name)) if test.examples]
    return found


def test_every_example_is_found():
    lines = [line for path in (ROOT / "hf_adafuse").rglob("*.py") for line in path.read_text("utf-8").splitlines()]
    written = sum(line.strip().startswith(">>> ") and not line.strip().startswith(">>> #") for line in lines)
    found = [example for test in docstring_examples() for example in test.examples]
    assert sum(not example.source.startswith("#") for example in found) == written > 0


# PEFT still asks transformers for an attribute under its old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("example", docstring_examples(), ids=lambda test: test.name)
def test_docstring_examples_run(example, stand_ins):
    report = []
    doctest.DocTestRunner().run(example, out=report.append)
    assert not report, "".join(report)


def test_a_wrong_example_is_found():
    text = "Examples:\n\n    ```python\n    >>> 1 + 1\n    3\n    ```\n"
    report = []
    example = FencedParser().get_doctest(text, {}, "wrong", None, None)
    doctest.DocTestRunner().run(example, out=report.append)
    assert "Expected:\n    3\nGot:\n    2\n" in "".join(report)


def test_blocks_are_found():
    text = "a\n```python\nx = 1\n```\n<!-- run-command -->\n```bash\npip\n```\n\n```bash\nhf-adafuse\n```\n"
    assert list(blocks(text, "python")) == [(3, "x = 1\n")]
    assert list(blocks(text, "bash")) == [(11, "hf-adafuse\n")]
