"""`Progress`: shows on standard error how far a job is, as a bar on a terminal and elsewhere as a line every 30 s."""

from __future__ import annotations

import sys
import time
from typing import Any

# The time between two lines where there is no bar, in seconds.
LINE_INTERVAL = 30.0


class Progress:
    """
    Counts what a job has done, and shows it.

    Args:
        total (`int`): how much there is to do.
        unit (`str`): what is counted, like `"answers"`.
        done (`int`, *optional*, defaults to 0): how much an earlier run has done. It is left out of the rate.
        wanted (`bool`, *optional*): `True` for a bar, `False` for silence. By default there is a bar on a terminal, and
            elsewhere a line every 30 seconds: `hf-adafuse: 40 of 500 answers after 30 s, 5.1 words/s`.

    Attributes:
        num_new (`int`): how much this run has done.
        seconds (`float`): how long it took, once closed.
    """

    def __init__(self, total: int, unit: str, done: int = 0, wanted: bool | None = None) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped]

        self.num_new = 0
        self.seconds = 0.0
        self._start = time.monotonic()
        self._last_line = self._start
        is_terminal = sys.stderr.isatty()
        self._has_lines = wanted is None and not is_terminal
        shows_bar = is_terminal if wanted is None else wanted
        self._bar: Any = tqdm(total=total, initial=done, unit=f" {unit}", disable=not shows_bar, file=sys.stderr)
        self._done = done
        self._total = total
        self._unit = unit
        self._note = ""

    def add(self, number: int, known: bool = False) -> None:
        """Count `number` more as done. `known`: an earlier run has done them, so they are left out of the rate."""
        self._done += number
        if not known:
            self.num_new += number
            self._bar.update(number)
        elif not self._bar.disable:
            self._bar.initial += number
            self._bar.n += number
        self.tick()

    def tick(self) -> None:
        """Write a line if the last one was written 30 s ago or more."""
        now = time.monotonic()
        if self._has_lines and now - self._last_line >= LINE_INTERVAL:
            self._last_line = now
            note = f", {self._note}" if self._note else ""
            state = " were there, no new one" if self._done and not self.num_new else ""
            after = f"{state} after {now - self._start:.0f} s"
            sys.stderr.write(f"hf-adafuse: {self._done} of {self._total} {self._unit}{after}{note}\n")
            sys.stderr.flush()

    def expect(self, number: int) -> None:
        """Say how much is still to be done. The total follows from it."""
        self._total = self._done + number
        self._bar.total = self._total

    def note(self, text: str) -> None:
        """Set the text that stands behind the numbers."""
        self._note = text
        self._bar.set_postfix_str(text, refresh=False)

    def say(self, message: str) -> None:
        """Write a line of its own, above the bar."""
        self._bar.write(f"hf-adafuse: {message}", file=sys.stderr)

    def close(self) -> None:
        """End the bar, and set `seconds`."""
        self.seconds = time.monotonic() - self._start
        self._bar.close()
