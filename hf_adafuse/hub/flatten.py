"""Copies code of this package as flat files: from a repository transformers loads only modules that lie side by side.

A module is copied with all that it imports of this package. `from ..package.x import y` becomes `from .x import y`.
What has been flattened can be flattened again: that is how a repository saves itself.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

# The beginning of an import, which a backslash may break.
_HEAD = re.compile(rb"from.*?\bimport\b", re.DOTALL)


def write_code(folder: str | os.PathLike[str], entry: Path) -> None:
    """
    Copies a module of this code, and all it imports of this code, into a flat folder.

    Raises:
        ValueError: two modules of different packages have one name, or an import has a form that transformers
            overlooks.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    sources: dict[str, Path] = {}
    waiting = [entry.resolve()]
    while waiting:
        path = waiting.pop()
        if sources.setdefault(path.name, path) != path:
            raise ValueError(
                f"Modules must have names of their own, but {path} and {sources[path.name]} share one. Rename one."
            )
        code, needed = flattened(path)
        (target / path.name).write_text(code, encoding="utf-8")
        waiting += [module for module in needed if module.name not in sources or sources[module.name] != module]


def flattened(path: Path) -> tuple[str, list[Path]]:
    """A module's source with its relative imports made flat, and the modules that they name."""
    source = path.read_text(encoding="utf-8")
    code = source.encode()  # `ast` counts columns in bytes, and lines by newlines alone
    lines = [0, *(newline.end() for newline in re.finditer(b"\n", code))]
    needed = []
    changes = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        if node.module is None:
            raise ValueError(
                f"Imports of {path} must have the form `from .x import y`, but line {node.lineno} has not. Change it."
            )
        *folders, module = node.module.split(".")
        folder = path.parents[node.level - 1].joinpath(*folders)
        needed.append(folder / f"{module}.py")
        changes.append((lines[node.lineno - 1] + node.col_offset, module))
    for start, module in sorted(changes, reverse=True):  # from the end: what is before keeps its place
        code = code[:start] + _HEAD.sub(f"from .{module} import".encode(), code[start:], count=1)
    return code.decode(), needed
