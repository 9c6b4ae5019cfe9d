"""The package's shape: rooms, imports that go one way, a docstring on every module."""

import ast
import re
from itertools import groupby
from pathlib import Path

import pytest

pytestmark = pytest.mark.every_case

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hf_adafuse"

# The house, from the ground up. A module imports only what stands before it: in its own line, or in a line above.
# The room "" is the package's own folder: what a user imports, and what everything may know.
HOUSE = (
    ("settings", "config_checks"),
    ("", "config outputs host_internals"),
    ("confidence", "ridge calibration word_confidence answer_score features"),
    ("rounds", "trace_text trace_html round_lists"),
    ("servers", "daemons queries turnstile addresses patience connection api vllm sglang llamacpp served_model"),
    ("trees", "adapters kv_cache nodes backend race pass_costs"),
    ("trees", "columns tree_cache tree_mask skinny_product skinny_linear model_call"),
    ("trees", "pass_policy snapshots shared_prefix static_shapes"),
    ("trees", "column_backend packed_backend rows_backend snapshot_backend reencode_backend served_backend"),
    ("trees", "self_test"),
    ("members", "templates mistral_tokenizers vocabulary examples json_patterns schema_keywords structured"),
    ("members", "prompt_inputs chat tools thinking thoughts"),
    ("members", "forks histories processors processor_request"),
    (
        "members",
        "readings reader sparse_readings loading served_checks participants prompts prompt_nll passes drafts member",
    ),
    ("members", "distributions relative_space pair_ranker answer_fuser"),
    ("decoding", "words scoring requests progress answer_stops proposer draft_sampler word_parts fusion pool trust"),
    (
        "decoding.strategies",
        "strategy drafting adafuse sweetspan cool_fusion specfuse text_spans majority blender anchor selection",
    ),
    ("decoding.strategies", "token_strategy unite gac deepen registry"),
    ("decoding", "judge foresight look_ahead turns fused_answers fused_drafts scheduler places committer"),
    ("decoding", "word_sampler sampled_rounds token_rounds decoder"),
    (
        "call",
        "answering batch_columns sampling served_limits images arguments new_ids inputs continuation stopping plan "
        "output run running_batch score",
    ),
    ("", "logits_process stopping_criteria generation"),
    ("hub", "flatten exported repository generate modeling_adafuse"),
    ("hub", "model_card export"),
    ("", "plots pipelines ensemble batch __init__"),
)
# What is built around the house: may import all of it, is imported by none of it.
AROUND = ("__main__", "cli", "serve", "demo", "evaluation", "benchmarks")
MOST_AT_THE_TOP = 12
# Rooms of which a user imports names: their `__init__` imports these, and has no other code.
PUBLIC_ROOMS = ("confidence",)

ORDER = [f"{room}.{name}".lstrip(".") for room, names in HOUSE for name in names.split()]
ROOMS = list(dict.fromkeys(room for room, _ in HOUSE if room))
ARCHITECTURE = (PACKAGE / "docs/architecture.md").read_text(encoding="utf-8")
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
HOUSE_SOURCES = {
    name: source for path, source in SOURCES.items() if (name := path.removesuffix(".py").replace("/", ".")) in ORDER
}


def package_imports(name, source):
    """Yields each import of the package's own modules: the module, or `None` where the form is not allowed.

    A Hub repository holds flat files: the export makes `from ..room.x import y` to `from .x import y`, no other form.
    """
    room = name.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (None for alias in node.names if alias.name.split(".")[0] == "hf_adafuse")
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            if node.module.split(".")[0] == "hf_adafuse":
                yield None
        elif isinstance(node, ast.ImportFrom):
            rooms = room.split(".") if room else []
            own = ".".join(rooms[: len(rooms) - node.level + 1])
            is_allowed = node.module is not None and node.level <= len(rooms) + 1
            yield f"{own}.{node.module}".lstrip(".") if is_allowed else None


def import_problems(name, source):
    """Lists what is wrong with the imports of a module of the house."""
    allowed = ORDER[: ORDER.index(name)]
    for module in package_imports(name, source):
        if module is None:
            yield f"{name}: write an import of the package's own modules as `from .x import y`"
        elif module not in allowed:
            yield f"{name} must not import {module}"


def test_every_module_has_a_place():
    found = {path.removesuffix(".py").replace("/", ".") for path in SOURCES}
    rooms = {f"{room}.__init__" for room in ROOMS}
    around = {name for name in found if name.split(".")[0] in AROUND}
    assert sorted(found - around - rooms) == sorted(ORDER), "add the module to HOUSE, or the folder to AROUND"


def test_names_are_unique_across_rooms():
    """The export puts the modules of all rooms into one folder."""
    names = [name.rpartition(".")[2] for name in ORDER]
    assert len(names) == len(set(names))


def picture():
    """The first column of the picture of the house, whose top is what stands around it: what each line names."""
    (block,) = re.findall(r"^## The house\n.*?^```\n(.*?)^```$", ARCHITECTURE, flags=re.DOTALL | re.MULTILINE)
    return [re.split(" {2,}", line)[0] for line in block.splitlines()]


def test_the_picture_shows_the_house():
    floors = []
    for room, group in groupby(reversed(HOUSE), key=lambda line: line[0].partition(".")[0]):
        names = [name for _, names in reversed(list(group)) for name in names.split() if name != "__init__"]
        floors.append(f"{room}/" if room else ", ".join(names))
    around, *shown = picture()
    assert shown == floors
    assert sorted(around.split(", ")) == sorted(name for name in AROUND if (PACKAGE / name).is_dir())


def test_the_picture_says_where_to_start_reading():
    (path,) = re.findall(r"start reading at (\S+)$", ARCHITECTURE, flags=re.MULTILINE)
    assert path.removeprefix("hf_adafuse/") in SOURCES


def test_few_modules_stand_at_the_top():
    top = [path for path in SOURCES if "/" not in path]
    assert len(top) <= MOST_AT_THE_TOP


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_lives_there_and_what_it_must_not_know(room):
    source = SOURCES[f"{room.replace('.', '/')}/__init__.py"]
    doc = ast.get_docstring(ast.parse(source))
    assert "must not know" in " ".join(doc.split()) and 3 <= len(doc.splitlines()) <= 10
    body = ast.parse(source).body[1:]
    if room in PUBLIC_ROOMS:
        imports, (names,) = body[:-1], body[-1].targets
        assert names.id == "__all__" and all(isinstance(node, ast.ImportFrom) and node.level == 1 for node in imports)
    else:
        assert not body


@pytest.mark.parametrize("name", ORDER)
def test_imports_go_one_way(name):
    assert list(import_problems(name, HOUSE_SOURCES[name])) == []


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_modules_are_documented(name):
    assert ast.get_docstring(ast.parse(SOURCES[name]))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("config", "from .outputs import AdaFuseRound"),  # the first imports nothing
        ("members.member", "from ..decoding.decoder import Decoder"),  # upwards, to another room
        ("members.prompts", "from .member import Member"),  # upwards, in the room
        ("members.member", "from .member import Member"),  # itself
        ("members.member", "from ..cli import main"),  # out of the house
        ("members.member", "from . import vocabulary"),
        ("members.member", "from ..trees import nodes"),
        ("members.member", "def late():\n    from ..decoding.decoder import Decoder"),
        ("members.member", "from ...words import WordRule"),
        ("decoding.strategies.strategy", "from ..decoder import Decoder"),  # a room in a room
        ("decoding.strategies.strategy", "from ....config import AdaFuseConfig"),
        ("decoding.words", "from .strategies.strategy import SpanStrategy"),
        ("members.member", "from hf_adafuse.decoding.words import WordRule"),
        ("members.member", "import hf_adafuse.trees.nodes as nodes"),
        ("generation", "from .hub.export import export_adafuse"),
    ],
)
def test_a_wrong_import_is_found(name, source):
    assert len(list(import_problems(name, source))) == 1


def test_right_imports_pass():
    source = "import torch\nfrom torch import nn\nfrom ..trees.nodes import (\n    Node,\n)\nfrom .vocabulary import x"
    assert list(import_problems("members.member", source)) == []
    source = "from ...config import x\nfrom ..words import y\nfrom .strategy import z"
    assert list(import_problems("decoding.strategies.drafting", source)) == []
