"""Waits for what another thread does."""

from __future__ import annotations

import time


def until(condition, seconds=30):
    """Wait until a condition holds; it is an error where it does not within so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it would wait for ever"
        time.sleep(0.001)
