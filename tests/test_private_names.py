"""What is private of transformers, accelerate, PEFT and torch is used in `transformers_compat` alone.

Two rules: the names that `transformers_compat` wraps, each of which has a test, are used nowhere else, and no other
name with an underscore is used that this package does not define itself.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from hf_adafuse.transformers_compat import GENERATION_HOOKS

pytestmark = [pytest.mark.every_case, pytest.mark.fast]

PACKAGE = Path(__file__).parent.parent / "hf_adafuse"
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
THE_ONE = "transformers_compat.py"

# What `transformers_compat` wraps and has no underscore: attributes, and modules that are imported from.
WITHOUT_UNDERSCORE = {
    "adapter_layer_names", "cache_utils", "get_base_model", "has_previous_state", "hf_device_map", "peft_config",
    "pytorch_utils",
}  # fmt: skip
PYTHONS = {"_getframe"}
# Methods of the host that are overridden or switched off.
ALLOWED = {
    "generation.py": set(GENERATION_HOOKS),
    "pipelines.py": {"_registered_impl"},
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != "" and name.isidentifier()


def names_used(source):
    """Yields the names by which a module reaches into objects and modules, with their lines: attributes, with `self.`
    before those of its own objects, whole strings (of `getattr` and the like), named arguments, parts of imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            yield ("self." if ast.unparse(node.value) == "self" else "") + node.attr, node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node.lineno
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg, node.value.lineno
        elif isinstance(node, ast.Import | ast.ImportFrom):
            parts = [part for alias in node.names for part in alias.name.split(".")]
            parts += (getattr(node, "module", None) or "").split(".")
            yield from ((part, node.lineno) for part in parts)


def names_defined(source):
    """Yields the names that a module defines: functions, classes, arguments, variables, attributes of `self`, slots."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


@functools.cache
def ours():
    """The names that this package defines."""
    return {name for path, source in SOURCES.items() if path != THE_ONE for name in names_defined(source)}


@functools.cache
def listed():
    """The names that `transformers_compat` wraps."""
    return {name for name, _ in names_used(SOURCES[THE_ONE]) if is_private(name)} | WITHOUT_UNDERSCORE


def offences(path, source):
    """Lists what a module uses of the host that it should ask `transformers_compat` for."""
    allowed, own = ALLOWED.get(path, set()) | PYTHONS, set(names_defined(source))
    for name, line in names_used(source):
        # `_adafuse` is how everything is called that this package puts on a caller's objects.
        if name in allowed or name.startswith("_adafuse") or (name.startswith("self.") and name[5:] in own):
            continue
        name = name.removeprefix("self.")
        if name in listed():
            yield f"{path}:{line} uses {name}: ask transformers_compat, which has it"
        elif is_private(name) and name not in ours():
            yield f"{path}:{line} uses {name}, which is not of this package: let transformers_compat have it"


@pytest.mark.parametrize("path", sorted(set(SOURCES) - {THE_ONE}))
def test_what_is_private_of_the_host_is_left_to_transformers_compat(path):
    assert list(offences(path, SOURCES[path])) == []


def test_the_list_has_what_transformers_compat_wraps():
    assert {*GENERATION_HOOKS, "_hf_hook", "_eos_token_tensor", "_attn_implementation", "_active_adapter"} <= listed()
    used = {name for name, _ in names_used(SOURCES[THE_ONE])}
    assert sorted(WITHOUT_UNDERSCORE - used) == []


@pytest.mark.parametrize("path", ALLOWED)
def test_what_is_allowed_is_used(path):
    assert ALLOWED[path] <= {name for name, _ in names_used(SOURCES[path])} | set(names_defined(SOURCES[path]))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("module._forward_hooks.clear()", "_forward_hooks"),
        ("layer._active_adapter = ['law']", "_active_adapter"),
        ("getattr(config, '_attn_implementation', None)", "_attn_implementation"),
        ("vars(module).get('_hf_hook')", "_hf_hook"),
        ("hasattr(model, 'hf_device_map')", "hf_device_map"),
        ("Config(_attn_implementation='eager')", "_attn_implementation"),
        ("from transformers.cache_utils import DynamicLayer", "cache_utils"),
        ("import transformers.pytorch_utils", "pytorch_utils"),
        ("transformers.cache_utils.DynamicLayer", "cache_utils"),
        ("super()._sample()", "_sample"),
        ("self._sample()", "_sample"),
        ("module._buffers", "_buffers"),  # of nobody here
        ("self._supports_sdpa", "_supports_sdpa"),
        ("torch._dynamo.reset()", "_dynamo"),
        ("from torch._dynamo import reset", "_dynamo"),
        ("from torch import _C", "_C"),
    ],
)
def test_an_offence_is_found(source, name):
    (found,) = offences("members/member.py", "\n" + source)
    assert found.startswith(f"members/member.py:2 uses {name}")


@pytest.mark.parametrize(
    "source",
    [
        "self._call(x)",  # defined in this package
        "class A:\n    def _sample(self):\n        self._sample()",  # its own method, though called like a hook
        "model._adafuse_bound = None",
        "from __future__ import annotations",
        "for _ in x:\n    pass",
        "x.__dict__['a'] = '_'",
        "'''Knows `_hf_hook` and cache_utils by name.'''",
    ],
)
def test_what_is_ours_is_no_offence(source):
    assert list(offences("members/member.py", source)) == []


def test_a_hook_is_allowed_where_it_is_overridden_alone():
    source = "super()._sample()"
    assert list(offences("generation.py", source)) == [] and len(list(offences("pipelines.py", source))) == 1
