"""A member whose model is behind a server: its log-probabilities are known as far as they were asked for."""

from __future__ import annotations

from typing import Any

from .member import Member
from .processors import PromptProcessors
from .served_backend import ServedBackend
from .sparse_logprobs import SparseReader, SparseReading


class ServedMember(Member):
    """A [`Member`] whose model is behind a server. Its passes are requests, which other members do not wait for."""

    runs_elsewhere = True
    backend: ServedBackend

    @property
    def device_key(self) -> ServedBackend:
        return self.backend

    def _count_parameters(self) -> int:
        return int(self.model.num_parameters())

    def _make_reader(self, processors: list[PromptProcessors], num_top: int) -> Any:
        self.backend.num_top = num_top
        self.backend.make_reading = SparseReading
        return SparseReader(self.eos_ids, self.backend.wanted)
