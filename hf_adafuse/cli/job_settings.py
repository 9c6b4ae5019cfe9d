"""The settings of a job, kept in a file beside its answers: one that goes on must have the same. Knows no answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def begin_in_folder(sidecar: Path, answers: Sequence[Path], settings: dict[str, Any], overwrite: bool) -> None:
    """
    Begin a job in a folder, or go on with it.

    Args:
        sidecar (`Path`): where its settings are.
        answers (`list[Path]`): the files of answers that are there.
        settings (`dict`): by flag.
        overwrite (`bool`): whether to drop the answers.

    Raises:
        ValueError: answers that were asked for in another way, or nobody knows how.
    """
    folder = sidecar.parent
    if overwrite:
        for path in answers:
            path.unlink()
    elif answers and not sidecar.exists():
        raise ValueError(
            f"`--output` must hold {sidecar.name} beside its answers, but {str(folder)!r} does not: nobody knows whose "
            "they are. Pass --overwrite, or another folder."
        )
    elif answers:
        check_settings(sidecar, settings, folder)
    keep_settings(sidecar, settings)


def keep_settings(sidecar: Path, settings: dict[str, Any]) -> None:
    """Write them, all or nothing."""
    scratch = sidecar.with_name(f"{sidecar.name}.tmp")
    scratch.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    scratch.replace(sidecar)


def check_settings(sidecar: Path, settings: dict[str, Any], path: Path) -> None:
    """Refuse other settings than those of the earlier run that wrote `path`. Raises `ValueError`."""
    try:
        earlier = json.loads(sidecar.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{str(sidecar)!r} must hold the earlier run's settings, but is not JSON ({error}). Start over with "
            "--overwrite."
        ) from None
    for name in {**earlier, **settings}:
        before = earlier.get(name)
        now = settings.get(name)
        if before != now:
            raise ValueError(
                f"`--{name.replace('_', '-')}` must be {_shown(before)}, as in the earlier run that wrote "
                f"{str(path)!r}, but is {_shown(now)}. Use the same, another --output, or start over with --overwrite."
            )


def _shown(setting: Any) -> str:
    return "left out" if setting in (None, False, []) else json.dumps(setting)
