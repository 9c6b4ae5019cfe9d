"""Progress of a job on standard error: a bar on a terminal, elsewhere a plain line every half minute."""

from __future__ import annotations

import sys
import time
from typing import Any

# Seconds between two lines where there is no bar.
LINE_INTERVAL = 30.0


class Progress:
    """
    Counts what a job has done.

    Args:
        total (`int`): how much there is to do.
        unit (`str`): what is counted, `"answers"`.
        done (`int`, *optional*, defaults to 0): what an earlier run has done; it is left out of the rate.
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
        self._start = self._last_line = time.monotonic()
        is_terminal = sys.stderr.isatty()
        self._has_lines = wanted is None and not is_terminal
        shows_bar = is_terminal if wanted is None else wanted
        self._bar: Any = tqdm(total=total, initial=done, unit=f" {unit}", disable=not shows_bar, file=sys.stderr)
        self._done = done
        self._total = total
        self._unit = unit
        self._note = ""

    def add(self, number: int, known: bool = False) -> None:
        """Count what has been done; what is known from an earlier run takes no time, and is not in the rate."""
        self._done += number
        if not known:
            self.num_new += number
            self._bar.update(number)
        elif not self._bar.disable:
            self._bar.initial += number
            self._bar.n += number
        self.tick()

    def tick(self) -> None:
        """Write a line where one is due."""
        now = time.monotonic()
        if self._has_lines and now - self._last_line >= LINE_INTERVAL:
            self._last_line = now
            note = f", {self._note}" if self._note else ""
            seconds = f"{now - self._start:.0f} s"
            sys.stderr.write(f"hf-adafuse: {self._done} of {self._total} {self._unit} after {seconds}{note}\n")
            sys.stderr.flush()

    def expect(self, number: int) -> None:
        """So much is still to be done."""
        self._total = self._done + number
        self._bar.total = self._total

    def note(self, text: str) -> None:
        """What stands behind the numbers."""
        self._note = text
        self._bar.set_postfix_str(text, refresh=False)

    def say(self, message: str) -> None:
        """A line of its own, above the bar."""
        self._bar.write(f"hf-adafuse: {message}", file=sys.stderr)

    def close(self) -> None:
        """The job is done."""
        self.seconds = time.monotonic() - self._start
        self._bar.close()
