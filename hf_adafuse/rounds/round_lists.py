"""The rounds of a call as lists that show themselves: as text where they are printed, and as a table in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..confidence.word_confidence import text_confidence
from ..outputs import AdaFuseRound
from .trace_html import format_html, html_page
from .trace_text import format_trace, short_name


class AdaFuseRounds(list[AdaFuseRound]):
    """
    The rounds of one prompt.

    Args:
        rounds (`Iterable[AdaFuseRound]`): the rounds, in their order.
        names (`list[str]`, *optional*): the members' names for the trace, the main model's first.
        threshold (`float`, *optional*): the margin below which a word was uncertain. `None`: no word was.
        finish_reason (`str`, *optional*): why the text ends. `"stop"`: by an end-of-sequence token, a stop string or
            another criterion. `"length"`: by the most tokens or seconds of the call, or by a member's context.

    Attributes:
        thoughts (`list[str]`, *optional*): the text that each member thought before the answer. It is no part of
            `text`. `None` stands for a member that did not think; the whole is `None` where the call was no chat.
        num_thinking_tokens (`list[int]`): how many tokens of each member's prompt are its thoughts, with the marks
            around them; empty where the call was no chat.
        tool_calls (`list[ToolCall]`): the calls of tools that the text holds, where the call offered tools.
    """

    def __init__(
        self,
        rounds: Iterable[AdaFuseRound] = (),
        names: Sequence[str] | None = None,
        threshold: float | None = None,
        finish_reason: str | None = None,
    ) -> None:
        super().__init__(rounds)
        self.names = _names(names, [self])
        self.threshold = threshold
        self.finish_reason = finish_reason
        self.thoughts: list[str | None] | None = None
        self.num_thinking_tokens: list[int] = []
        self.tool_calls: list[Any] = []

    @property
    def text(self) -> str:
        """What was generated."""
        return "".join(committed.text for committed in self)

    @property
    def confidence(self) -> float | None:
        """How sure the members are of the text, from 0 to 1, as of [`AdaFuseOutput`]; `None` where there is none."""
        if self.is_calibrated:
            return self[-1].confidence
        return text_confidence([value for committed in self for value in committed.confidences])

    @property
    def is_calibrated(self) -> bool:
        """Whether the confidence is the probability that the answer is right; else it is a score."""
        return bool(self) and self[-1].confidence is not None

    def __str__(self) -> str:
        return format_trace(self, self.names)

    def to_html(self, title: str = "AdaFuse") -> str:
        """A page: the text, each span in the colours of who proposed it, and a table of the rounds."""
        return html_page(title, self._repr_html_())

    def _repr_html_(self) -> str:
        return format_html([self], self.names, self.threshold)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


class AdaFuseRoundsBatch(list[AdaFuseRounds]):
    """
    The rounds of all prompts of a call, `output.rounds`.

    Args:
        prompts (`Iterable[Iterable[AdaFuseRound]]`): per prompt, its rounds; of [`AdaFuseRounds`] the reason to finish
            is kept.
        names (`list[str]`, *optional*), threshold (`float`, *optional*): as for `AdaFuseRounds`.
    """

    def __init__(
        self,
        prompts: Iterable[Iterable[AdaFuseRound]] = (),
        names: Sequence[str] | None = None,
        threshold: float | None = None,
    ) -> None:
        rows = [rounds if isinstance(rounds, AdaFuseRounds) else AdaFuseRounds(rounds) for rounds in prompts]
        self.names = _names(names, rows)
        self.threshold = threshold
        super().__init__(AdaFuseRounds(rounds, self.names, threshold, rounds.finish_reason) for rounds in rows)

    def __str__(self) -> str:
        if len(self) == 1:
            return str(self[0])
        return "\n".join(f"Prompt {number}\n\n{rounds}" for number, rounds in enumerate(self, start=1))

    def to_html(self, title: str = "AdaFuse") -> str:
        """A page: per prompt, what [`AdaFuseRounds.to_html`] shows."""
        return html_page(title, self._repr_html_())

    def _repr_html_(self) -> str:
        return format_html(self, self.names, self.threshold)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def _names(names: Sequence[str] | None, prompts: Sequence[Sequence[AdaFuseRound]]) -> list[str]:
    if names is not None:
        return [short_name(name) for name in names]
    counts = [len(committed.margins) for rounds in prompts for committed in rounds if hasattr(committed, "margins")]
    return [f"member {k}" for k in range(max(counts, default=0))]
