"""Counts what a server does, and writes the counts in Prometheus' text format for `/metrics`."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable

# The upper bounds of a histogram's buckets, in seconds.
_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Histogram:
    """Counts durations by bucket, and adds them up."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(_BOUNDS, value)] += 1
        self._total += value

    def lines(self, name: str) -> Iterable[str]:
        """The lines of a histogram of this name."""
        count = 0
        for bound, number in zip((*_BOUNDS, "+Inf"), self._counts, strict=True):
            count += number
            yield f'{name}_bucket{{le="{bound}"}} {count}'
        yield f"{name}_sum {self._total}"
        yield f"{name}_count {count}"


class Metrics:
    """
    Counts and durations since the start.

    Attributes:
        requests (`Counter`): the number of requests by path, model and HTTP status.
        prompt_tokens (`int`), tokens (`int`): the tokens of prompts and of answers, counted in main models' tokens.
        words (`int`): the words of answers.
        disconnects (`int`): how many clients left before the end of their answer.
        first_token (`Histogram`), duration (`Histogram`): the seconds from a request to its first text and to its end.
    """

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.prompt_tokens = 0
        self.tokens = 0
        self.words = 0
        self.disconnects = 0
        self.first_token = Histogram()
        self.duration = Histogram()

    def text(self, gauges: dict[str, int]) -> str:
        """
        All metrics in Prometheus' text format.

        Args:
            gauges (`dict`): further numbers by name. A name that ends with `_total` is that of a counter.
        """
        lines = ["# TYPE adafuse_requests_total counter"]
        for (path, model, status), count in sorted(self.requests.items()):
            name = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            lines.append(f'adafuse_requests_total{{path="{path}",model="{name}",status="{status}"}} {count}')
        counts = {
            "prompt_tokens_total": self.prompt_tokens,
            "completion_tokens_total": self.tokens,
            "words_total": self.words,
            "disconnects_total": self.disconnects,
            **gauges,
        }
        for name, value in counts.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# TYPE adafuse_{name} {kind}", f"adafuse_{name} {value}"]
        for name, histogram in [("time_to_first_token_seconds", self.first_token), ("request_seconds", self.duration)]:
            lines += [f"# TYPE adafuse_{name} histogram", *histogram.lines(f"adafuse_{name}")]
        return "\n".join(lines) + "\n"
