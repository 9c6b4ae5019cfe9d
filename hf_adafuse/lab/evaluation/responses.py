"""`Responses`: keeps what an evaluation has answered so far on disk. Started again, it asks only what is missing.

The file has one JSON value per line, and each line is written whole as soon as it comes. lm-eval's own cache
(`use_cache`) keeps only texts; this one keeps the rounds, too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Responses:
    """
    Responses by request.

    Args:
        path (`Path`, *optional*): the file that keeps them. By default they are kept in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        if path is not None and path.exists():
            self._read(path)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, kind: str, arguments: Sequence[Any]) -> Any:
        """The response to a request, or `None`."""
        return self._known.get(_key(kind, arguments))

    def add(self, kind: str, arguments: Sequence[Any], response: Any) -> None:
        """Keep a response, made of plain JSON values."""
        key = _key(kind, arguments)
        self._known[key] = response
        if self._path is not None:
            line = json.dumps([key, response]).encode() + b"\n"
            with self._path.open("ab", buffering=0) as file:
                while line:
                    line = line[file.write(line) :]

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        size = content.rfind(b"\n") + 1
        if size < len(content):
            os.truncate(path, size)  # the last line is what a kill has torn
        for row, line in enumerate(content[:size].splitlines(), start=1):
            try:
                key, response = json.loads(line)
            except (ValueError, TypeError):
                raise ValueError(
                    f"{str(path)!r} must hold responses of this command, but row {row} is none. Choose another "
                    "--output, or start over with --overwrite."
                ) from None
            self._known[key] = response


def _key(kind: str, arguments: Sequence[Any]) -> str:
    from lm_eval.api.model import hash_args

    return str(hash_args(kind, arguments))
