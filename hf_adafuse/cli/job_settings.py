"""What the commands that answer many questions share: flags, a lock, and a file with the settings of the answers.

The lock lets one run at a time write. A run that goes on with the answers of an earlier one must have its settings.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .. import __version__
from .flag_types import count

T = TypeVar("T")

# The name of the package's version among the settings of answers.
_VERSION = "hf_adafuse"
# Settings that jobs did not note before 29 November 2026.
_LATER = ("trust_remote_code", "served_tokenizer", "served_option")


def add_job_arguments(parser: argparse.ArgumentParser, asked: str = "prompts", kept: str = "answers") -> None:
    """Add the flags for the batch size, for starting over, and for a bar. `asked` and `kept`: what the help calls the
    questions and the answers."""
    parser.add_argument("--batch-size", type=count, default=8, metavar="N", help=f"{asked} at a time (default: 8)")
    parser.add_argument("--overwrite", action="store_true", help=f"start over: drop an earlier run's {kept}")
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="a bar on standard error, or silence (default: a bar on a terminal, elsewhere a line every 30 s)",
    )


def locked_folder(output: Path) -> Any:
    """
    Make the folder of a job where there is none, and lock it. Returns the lock, as [`locked`] does.

    Raises:
        ValueError: a file has that name, or another run writes in that folder.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"`--output` must be a folder or a new name, but {str(output)!r} is a file. Choose another.")
    output.mkdir(parents=True, exist_ok=True)
    return locked(output / "lock")


def begin_in_folder(
    sidecar: Path, files: Sequence[Path], settings: dict[str, Any], overwrite: bool, load: Callable[[], T]
) -> T:
    """
    Begin a job in a folder, or go on with it. Files are dropped only when the members are loaded: a misspelled name
    costs no answers.

    Args:
        sidecar (`Path`): the file with the settings of the answers.
        files (`list[Path]`): what earlier runs have written into the folder.
        settings (`dict`): what answers depend on beside the version of this package, by flag.
        overwrite (`bool`): whether to drop these files.
        load (`Callable`): loads the members.

    Returns:
        what `load` returns.

    Raises:
        ValueError: the files there have other settings, or no file says which settings they have.
    """
    folder = sidecar.parent
    settings = {_VERSION: __version__, **settings}
    if files and not overwrite:
        if not sidecar.exists():
            raise ValueError(
                f"`--output` must hold {sidecar.name} beside its answers, but {str(folder)!r} does not: nobody knows "
                "whose they are. Pass --overwrite, or another folder."
            )
        check_settings(sidecar, settings, folder)
    loaded = load()
    if overwrite:
        for path in files:
            path.unlink()
    keep_settings(sidecar, settings)
    return loaded


def keep_settings(sidecar: Path, settings: dict[str, Any]) -> None:
    """Write settings into a file."""
    write_whole(sidecar, json.dumps(settings, indent=1) + "\n")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file. A kill leaves the old file or the new one, never a part."""
    scratch = path.with_name(f"{path.name}.tmp")
    scratch.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", errors="replace"))
    scratch.replace(path)


def check_settings(sidecar: Path, settings: dict[str, Any], path: Path) -> None:
    """Raises `ValueError` where settings differ from those in `sidecar`, of the earlier run that wrote `path`."""
    try:
        earlier = json.loads(sidecar.read_text(encoding="utf-8"))
        if not isinstance(earlier, dict):
            raise ValueError(f"of type {type(earlier).__name__}")
    except ValueError as error:
        raise ValueError(
            f"{str(sidecar)!r} must hold the earlier run's settings, but is no JSON object ({error}). Start over with "
            "--overwrite."
        ) from None
    for name in {**earlier, **settings}:
        before = earlier.get(name)
        now = settings.get(name)
        if name == _VERSION and before != now:
            whose = f"are of {before}" if before else "do not say of which"
            raise ValueError(
                f"The answers in {str(path)!r} must be of this version of hf_adafuse, {now}, but {whose}. Use another "
                "--output, or start over with --overwrite."
            )
        is_told = name in earlier or name not in _LATER
        if is_told and before != now and not (_is_left_out(before) and _is_left_out(now)):
            raise ValueError(
                f"`--{name.replace('_', '-')}` must be {_shown(before)}, as in the earlier run that wrote "
                f"{str(path)!r}, but is {_shown(now)}. Use the same, another --output, or start over with --overwrite."
            )


def _shown(setting: Any) -> str:
    return "left out" if _is_left_out(setting) else json.dumps(setting)


def _is_left_out(setting: Any) -> bool:
    return setting is None or setting is False or setting == []  # 0 is a setting, and equal to False


def locked(path: Path) -> Any:
    """The file, open and locked. It is locked until it is closed, or until the process ends in any way."""
    file = path.open("ab")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(
            f"`--output` must be written by one run at a time, but another is writing {str(path)!r}. Wait for it, or "
            "choose another name."
        ) from None
    except (ImportError, OSError):  # no locks on this system, or on its file system
        pass
    return file


def file_name(text: str) -> str:
    """A text with `-` in place of characters that some system does not allow in a file name, or that a shell would want
    quoted: `"word 3:1"` becomes `"word-3-1"`."""
    return re.sub(r"[^\w.]+", "-", text)
