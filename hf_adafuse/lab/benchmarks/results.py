"""`Measurement`: the raw samples of a benchmark, and the figures that follow from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

OURS = "ours"
NAIVE = "naive"
NO_KERNEL = "no-kernel"
_FIGURES = (
    *("alone_ratio", "ratio", "greedy_seconds", "passes_per_own_token", "overhead", "kv_ratio"),
    *("agreement", "words_per_round", "naive_ratio", "bound_seconds"),
)


@dataclass(frozen=True)
class TimedRun:
    """
    One run of one contender on one batch of prompts.

    Attributes:
        contender (`str`): `"ours"`, the name of a variant or of a method, `"greedy 1"` for the main model alone,
            `"greedy 2"` for the next member, or `"naive"`.
        text (`int`): the index of the batch of prompts.
        repeat (`int`): the number of the repeat, from 0.
        seconds (`float`): the time of the whole call, prefill included.
        model_seconds (`list[float]`): for each member, the time in its forward passes.
        forwards (`list[int]`), tokens (`list[int]`): for each member, its passes and the tokens that they read, padding
            included.
        kv_peak_bytes (`int`): the most bytes that the members' caches held together.
        memory_peak_bytes (`int`, *optional*): the most bytes that the process had in use, or on CUDA torch.
        num_words (`int`, *optional*): how many words another method wrote. `None` where the text is ours.
    """

    contender: str
    text: int
    repeat: int
    seconds: float
    model_seconds: list[float]
    forwards: list[int]
    tokens: list[int]
    kv_peak_bytes: int
    memory_peak_bytes: int | None
    num_words: int | None = None


@dataclass(frozen=True)
class TextResult:
    """
    What the ensemble wrote after one batch of prompts.

    Attributes:
        texts (`list[str]`): the text after each prompt.
        num_words (`int`): the number of words in all texts.
        own_tokens (`list[int]`): for each member, the length of the longest text in its own tokens. Alone it writes as
            many.
        own_kv_bytes (`int`): the bytes that the members' own caches hold together at that length, for all prompts.
        num_rounds (`int`), num_agreed (`int`): the number of committed spans, and how many of them every member had
            proposed.
        num_ended (`int`): how many texts ended before they had all new tokens.
    """

    texts: list[str]
    num_words: int
    own_tokens: list[int]
    own_kv_bytes: int
    num_rounds: int
    num_agreed: int
    num_ended: int


@dataclass
class Measurement:
    """
    One combination of sizes and settings, measured.

    Attributes:
        parameters (`list[int]`): for each member, the number of its parameters.
        prompt_tokens (`int`), new_tokens (`int`): the length of a prompt and of a text, in tokens of the main model.
        batch (`int`): how many prompts are decoded at a time.
        branches (`int`): the number of branches B.
        weight_bytes (`list[int]`): for each member, the bytes of weights that one forward pass reads.
        bandwidth (`float`): how many bytes per second a large copy on the main model's device reads and writes.
        texts (`list[TextResult]`): what the ensemble wrote, for each batch of prompts.
        samples (`list[TimedRun]`): all runs, in the order in which they were taken.
        same_text (`dict[str, bool]`): for each variant and the naive implementation, whether it wrote what ours wrote.
    """

    parameters: list[int]
    prompt_tokens: int
    batch: int
    branches: int
    new_tokens: int
    weight_bytes: list[int]
    bandwidth: float
    texts: list[TextResult] = field(default_factory=list)
    samples: list[TimedRun] = field(default_factory=list)
    same_text: dict[str, bool] = field(default_factory=dict)

    @property
    def contenders(self) -> list[str]:
        """The names of all contenders, in the order in which they were run."""
        return list(dict.fromkeys(sample.contender for sample in self.samples))

    def of(self, contender: str, text: int | None = None) -> list[TimedRun]:
        """The runs of a contender, on one batch of prompts or on all."""
        return [s for s in self.samples if s.contender == contender and text in (None, s.text)]

    def texts_of(self, contender: str) -> list[int]:
        """The indices of the batches of prompts that a contender was run on."""
        return sorted({sample.text for sample in self.of(contender)})

    def seconds(self, contender: str, texts: list[int] | None = None) -> float:
        """A contender's time: the median over the repeats, summed over the batches `texts`, by default all that it was
        run on."""
        texts = self.texts_of(contender) if texts is None else texts
        return sum(median(sample.seconds for sample in self.of(contender, text)) for text in texts)

    def spread(self, contender: str) -> float:
        """How far a contender's repeats lie apart, as a share of their median, on the batch where this is most."""
        times = [[sample.seconds for sample in self.of(contender, text)] for text in self.texts_of(contender)]
        return max((max(values) - min(values)) / median(values) for values in times)

    def forwards(self, contender: str) -> list[int]:
        """For each member, the passes of the first repeat over all batches. In later repeats other nodes may share a
        pass, by the times measured so far."""
        return self._summed(contender, "forwards")

    def tokens(self, contender: str) -> list[int]:
        """For each member, the tokens that the passes of the first repeat read over all batches."""
        return self._summed(contender, "tokens")

    def words_per_second(self, contender: str) -> float:
        """The words that a contender wrote, over its time. A member alone writes as many tokens as our text has."""
        words = 0
        for text in self.texts_of(contender):
            own = self.of(contender, text)[0].num_words
            words += self.texts[text].num_words if own is None else own
        return words / self.seconds(contender)

    @property
    def greedy(self) -> list[str]:
        """The contenders that are members alone: `["greedy 1", "greedy 2"]`."""
        return [name for name in self.contenders if name.startswith("greedy ")]

    @property
    def greedy_seconds(self) -> float | None:
        """The members' own greedy times, one after another; `None` where they were not measured."""
        return sum(map(self.seconds, self.greedy)) if self.greedy else None

    @property
    def slowest(self) -> str | None:
        """The member that takes longest alone, like `"greedy 2"`: what most users would run otherwise. `None` where
        members alone were not measured."""
        return max(self.greedy, key=self.seconds, default=None)

    @property
    def alone_ratio(self) -> float | None:
        """Ours over the own greedy time of the slowest member alone."""
        return self.over_alone(OURS)

    @property
    def ratio(self) -> float | None:
        """Ours over the sum of the members' own greedy times."""
        return self.over_sum(OURS)

    def over_alone(self, contender: str) -> float | None:
        """A contender's time over the own greedy time of the slowest member alone."""
        return None if self.slowest is None else self.seconds(contender) / self.seconds(self.slowest)

    def over_sum(self, contender: str) -> float | None:
        """A contender's time over the sum of the members' own greedy times."""
        return None if self.greedy_seconds is None else self.seconds(contender) / self.greedy_seconds

    @property
    def passes_per_own_token(self) -> float:
        """Our passes of all members, over the passes that they would take alone: one for each own token."""
        own = sum(sum(text.own_tokens) for text in self.texts)
        return sum(self.forwards(OURS)) / own

    @property
    def overhead(self) -> float:
        """The share of our time outside of forward passes: the median over all runs."""
        return median(1 - sum(sample.model_seconds) / sample.seconds for sample in self.of(OURS))

    @property
    def kv_ratio(self) -> float:
        """Our most bytes of keys and values over those that the members' own caches hold at the end, on the batch where
        this is most. 0 where the members keep none."""
        held = [(sample.kv_peak_bytes, self.texts[sample.text].own_kv_bytes) for sample in self.of(OURS)]
        return max(ours / own if own else 0.0 for ours, own in held)

    @property
    def agreement(self) -> float:
        """The share of committed spans that every member had proposed."""
        return sum(text.num_agreed for text in self.texts) / max(1, sum(text.num_rounds for text in self.texts))

    @property
    def words_per_round(self) -> float:
        """The mean number of words in a committed span."""
        return sum(text.num_words for text in self.texts) / max(1, sum(text.num_rounds for text in self.texts))

    @property
    def naive_ratio(self) -> float | None:
        """The naive implementation's time over ours, on the batches that it was run on; `None` where it was not run."""
        texts = self.texts_of(NAIVE)
        return self.seconds(NAIVE) / self.seconds(OURS, texts) if texts else None

    @property
    def bound_seconds(self) -> float:
        """The seconds that our forward passes take at least, if each reads its model's weights once at the bandwidth of
        a copy."""
        passes = zip(self.forwards(OURS), self.weight_bytes, strict=True)
        return sum(count * size for count, size in passes) / self.bandwidth

    def memory_peak_bytes(self, contender: str) -> int | None:
        peaks = [s.memory_peak_bytes for s in self.of(contender) if s.memory_peak_bytes is not None]
        return max(peaks) if peaks else None

    def kv_peak_bytes(self, contender: str) -> int:
        return max(sample.kv_peak_bytes for sample in self.of(contender))

    def contender_figures(self, contender: str) -> dict[str, Any]:
        """The figures of one contender, as plain JSON values."""
        return {
            "seconds": self.seconds(contender),
            "spread": self.spread(contender),
            "words_per_second": self.words_per_second(contender),
            "forwards": self.forwards(contender),
            "tokens": self.tokens(contender),
            "kv_peak_bytes": self.kv_peak_bytes(contender),
            "memory_peak_bytes": self.memory_peak_bytes(contender),
            "same_text": self.same_text.get(contender),
        }

    def figures(self) -> dict[str, Any]:
        """Everything that follows from the samples, as plain JSON values."""
        return {name: getattr(self, name) for name in _FIGURES} | {
            "contenders": {contender: self.contender_figures(contender) for contender in self.contenders}
        }

    def to_dict(self) -> dict[str, Any]:
        """The measurement as plain JSON values: settings, raw samples and figures."""
        return asdict(self) | {"figures": self.figures()}

    def _summed(self, contender: str, counts: str) -> list[int]:
        firsts = [self.of(contender, text)[0] for text in self.texts_of(contender)]
        return [sum(values) for values in zip(*(getattr(sample, counts) for sample in firsts), strict=True)]
