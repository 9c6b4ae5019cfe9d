"""`threads`: sets for a while on how many CPU threads torch computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Within this context torch computes on `number` CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
