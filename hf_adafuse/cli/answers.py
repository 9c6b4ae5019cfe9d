"""`AnswersFile`: keeps the answers of a batch job on disk, in input order, as they come. A killed job loses none.

The file `NAME` holds whole lines in input order. With several processes, a process that is ahead of the order appends
to a part of its own, like `NAME.part1`, and the main process moves the records over in order. `NAME.settings.json` has
the settings that the answers depend on. A job that is started again takes over what is in any of these files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .job_settings import check_settings, keep_settings, locked
from .questions import Question

Record = dict[str, Any]


class AnswersFile:
    """
    The answers of a job, as one of its processes writes them.

    Args:
        path (`Path`): the file `NAME`.
        questions (`list[Question]`): all questions of the input.
        process (`int`, *optional*, defaults to 0): this process's number. The main process has 0.
        num_processes (`int`, *optional*, defaults to 1): how many processes share the job.
        is_same (`Callable`, *optional*): `is_same(record, question)` says whether a record on disk answers a question.
            It is asked where the line and the prompt are the same.
    """

    def __init__(
        self,
        path: Path,
        questions: Sequence[Question],
        process: int = 0,
        num_processes: int = 1,
        is_same: Callable[[Record, Question], bool] = lambda record, question: True,
    ) -> None:
        self.path = path
        self._is_same = is_same
        self._is_main = process == 0
        self._is_alone = num_processes == 1
        self._lock: Any = None
        self._own = path.with_name(f"{path.name}.part{process}")
        self._questions = {question.line: question for question in questions}
        self._order = list(self._questions)
        self._rank = {line: rank for rank, line in enumerate(self._order)}
        self._position = 0  # how many records are in NAME
        self._pending: dict[int, Record] = {}  # the records in parts, by line
        self._read: dict[Path, int] = {}  # how many bytes of each part have been read

    def prepare(self, settings: dict[str, Any], overwrite: bool = False) -> None:
        """
        Check that an earlier run had the same settings, and mend files that a kill has torn. The main process calls
        this before any process calls `load`.

        Args:
            settings (`dict`): what the answers depend on, by flag.
            overwrite (`bool`, *optional*, defaults to `False`): whether what an earlier run has written is to be
                dropped, by [`AnswersFile.start_over`]. It may have other settings then.

        Raises:
            ValueError: an earlier run had other settings, or a file was not written by this command.
        """
        self._lock = locked(self.path)
        sidecar = self._sidecar
        files = [path for path in [self.path, *self._parts()] if path.stat().st_size]
        if files and not sidecar.exists():
            raise ValueError(
                f"`--output` must be a file of this command or a new one, but {str(files[0])!r} has no settings "
                "beside it. Choose another name, or delete it."
            )
        if overwrite:
            return
        if not files:
            keep_settings(sidecar, settings)
            return
        check_settings(sidecar, settings, self.path)
        for path in files:
            mend(path)

    def start_over(self, settings: dict[str, Any]) -> None:
        """Drop what an earlier run has written, and write the settings. The main process calls this after `prepare`,
        once the models are loaded: a misspelled name costs no answers."""
        os.truncate(self.path, 0)
        for path in self._parts():
            path.unlink()
        keep_settings(self._sidecar, settings)

    def close(self) -> None:
        """Let another run write."""
        if self._lock is not None:
            self._lock.close()

    @property
    def num_written(self) -> int:
        """How many records `NAME` holds."""
        return self._position

    def load(self) -> list[Question]:
        """Read what earlier runs have written. Returns the questions that are still to be answered, in order."""
        for record in read_records(self.path, 0)[0]:
            line = self._order[self._position] if self._position < len(self._order) else None
            if record["line"] != line:
                raise self._foreign(record)
            self._check(record)
            self._position += 1
        self._read_parts()
        done = {*self._order[: self._position], *self._pending}
        return [self._questions[line] for line in self._order if line not in done]

    def write(self, record: Record) -> list[Record]:
        """Write a record into `NAME`, or into a part where it is not its turn. Returns the records that have come into
        `NAME` by this, in order."""
        is_next = self._position < len(self._order) and record["line"] == self._order[self._position]
        if not (self._is_main and is_next):
            append(self._own, record)
            if self._is_main:
                self._pending[record["line"]] = record
            return self.collect()
        append(self.path, record)
        self._position += 1
        return [record, *([] if record.get("stopped") else self.collect())]

    def collect(self) -> list[Record]:
        """Move the records whose turn it is from the parts into `NAME`. Returns them. Only the main process
        moves any."""
        moved: list[Record] = []
        if not self._is_main:
            return moved
        if not self._is_alone:
            self._read_parts()
        while self._position < len(self._order):
            record = self._pending.get(self._order[self._position])
            if record is None or record.get("stopped"):
                break
            append(self.path, record)
            moved.append(self._pending.pop(record["line"]))
            self._position += 1
        return moved

    def finish(self) -> list[Record]:
        """Move the last records, and delete the parts. Called when every process is done; only the main process does
        anything."""
        moved = self.collect()
        if self._is_main and self._position == len(self._order):
            for path in self._parts():
                path.unlink()
        return moved

    @property
    def _sidecar(self) -> Path:
        return self.path.with_name(f"{self.path.name}.settings.json")

    def _parts(self) -> list[Path]:
        name = re.compile(re.escape(self.path.name) + r"\.part\d+")
        return sorted(path for path in self.path.parent.iterdir() if name.fullmatch(path.name))

    def _read_parts(self) -> None:
        for path in self._parts():
            records, self._read[path] = read_records(path, self._read.get(path, 0))
            for record in records:
                self._check(record)
                if self._rank[record["line"]] >= self._position:  # else it was moved before a kill
                    self._pending[record["line"]] = record

    def _check(self, record: Record) -> None:
        question = self._questions.get(record["line"])
        is_known = question is not None and ("prompt" not in record or record["prompt"] == question.prompt)
        if question is None or not is_known or not self._is_same(record, question):
            raise self._foreign(record)

    def _foreign(self, record: Record) -> ValueError:
        return ValueError(
            f"The questions must be those of the earlier run, but the answer to line {record['line']} in "
            f"{str(self.path)!r} is to another. Give the same input, another --output, or start over with --overwrite."
        )


def check_output(path: Path, *inputs: str | None) -> None:
    """
    Refuse an output that cannot hold answers before it is opened: reading a device might never end.

    Args:
        path (`Path`): the output.
        inputs (`str`, *optional*): what the command reads; those that are no files do no harm.

    Raises:
        ValueError: the path is `-`, names something other than a regular file, or is an input.
    """
    for name in inputs:
        if name is not None and path.exists() and Path(name).exists() and path.samefile(name):
            raise ValueError(
                f"`--output` must be another file than the command reads, but is {name!r}. Choose another name."
            )
    if str(path) == "-":
        raise ValueError("`--output` must be a file, as a job goes on from it, but is `-`. Name one.")
    if path.exists() and not path.is_file():
        is_device = path.is_char_device() or path.is_block_device()
        kind = "a folder" if path.is_dir() else "a device" if is_device else "a pipe or a socket"
        raise ValueError(f"`--output` must be a regular file, but {str(path)!r} is {kind}. Choose another name.")


def mend(path: Path) -> None:
    """Cut off a last line that a kill has torn, and the record of an error at which a run has stopped. Both are made
    again."""
    content = path.read_bytes()
    size = content.rfind(b"\n") + 1
    last = content.rfind(b"\n", 0, max(size - 1, 0)) + 1
    if size and _parse(path, content[last:size]).get("stopped"):
        size = last
    if size < len(content):
        os.truncate(path, size)


def read_records(path: Path, start: int) -> tuple[list[Record], int]:
    """The records in the whole lines of a file from byte `start` on, and the byte where the last of them ends."""
    if not path.exists():
        return [], start
    with path.open("rb") as file:
        file.seek(start)
        content = file.read()
    size = content.rfind(b"\n") + 1  # another process is still writing the rest
    return [_parse(path, line) for line in content[:size].splitlines()], start + size


def _parse(path: Path, line: bytes) -> Record:
    try:
        record = json.loads(line)
        if isinstance(record["line"], int):
            return dict(record)
    except (ValueError, TypeError, KeyError):
        pass
    raise ValueError(
        f"{str(path)!r} must hold answers of this command, but has the line {line[:80]!r}. Choose another --output, or "
        "start over with --overwrite."
    )


def append(path: Path, record: Record) -> None:
    """Append a record as one line. There is no buffer that a kill could leave half written."""
    try:
        rest = json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair in a field of the input
        rest = json.dumps(record).encode() + b"\n"
    with path.open("ab", buffering=0) as file:
        while rest:
            rest = rest[file.write(rest) :]
