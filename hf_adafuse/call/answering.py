"""Asks a batch of questions so that one that fails takes no other with it. Called by the command line's file jobs and
by [`AdaFusePredictor`].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..confidence.answer_text import cut_at
from ..decoding.progress import AdaFuseDecodingError
from ..outputs import AdaFuseRound
from ..rounds.round_lists import AdaFuseRounds
from ..servers.queries import is_absence

Q = TypeVar("Q")

# One call takes the questions of this many batches. In it the next question begins as soon as one has ended.
BATCHES_A_CALL = 32

# What `generate()` raises where a prompt, or a pass, is too much for a member. Anything else is a bug.
FAILURES: tuple[type[Exception], ...] = (AdaFuseDecodingError, ValueError)


@dataclass(frozen=True)
class Answer:
    """
    The outcome of one question: a text, or an error.

    Attributes:
        text (`str`): without the text that it stopped at; with an error, what was committed until there.
        num_words (`int`, defaults to 0): how many words were generated; 0 with an error.
        finish_reason (`str`, defaults to `"error"`): `"stop"` (the text came to its end, or to a text to stop at),
            `"length"` (the most tokens, or a member's context) or `"error"`.
        error (`Exception`, *optional*): why there is no answer.
        rounds (`list[AdaFuseRound]`): empty with an error.
        confidence (`float`, *optional*): how sure the members are of all that was generated, as of [`AdaFuseOutput`].
    """

    text: str
    num_words: int = 0
    finish_reason: str = "error"
    error: Exception | None = None
    rounds: Sequence[AdaFuseRound] = ()
    confidence: float | None = None

    @classmethod
    def of(cls, made: AdaFuseRounds | Exception, stops: Sequence[str] | None = None) -> Answer:
        """The answer in the rounds of a question, or in the error that was raised instead; see [`answer_each`].
        `stops`: the stop texts of the call."""
        if isinstance(made, Exception):
            is_begun = isinstance(made, AdaFuseDecodingError) and bool(made.texts)
            return cls(made.texts[0] if is_begun else "", error=made)  # type: ignore[attr-defined]
        num_words = sum(len(committed.words) for committed in made)
        return cls(cut_at(made.text, stops), num_words, made.finish_reason or "stop", None, made, made.confidence)

    @property
    def reason(self) -> str:
        """The error in words; empty where there is none."""
        return "" if self.error is None else reason_of(self.error)


class _TellError(Exception):
    """The callback that is told an answer has raised. The caller's error: the question is not asked again."""


def answer_each(
    questions: Sequence[Q],
    ask: Callable[[Sequence[Q], Callable[[int, Any], None]], Any],
    tell: Callable[[Q, Any], None],
    failures: tuple[type[Exception], ...] = FAILURES,
) -> Iterator[tuple[Q, Exception]]:
    """
    Ask questions together, and tell each answer as soon as it is there. Where that fails, the questions without an
    answer are asked in halves, down to one alone. Yields the questions that fail even alone, with their errors. Where a
    server has gone away, all fail at once.

    Args:
        questions (`list`): the questions, of any type.
        ask (`Callable`): `ask(some, on_answer)` answers some questions and calls `on_answer(row, answer)` for each.
        tell (`Callable`): `tell(question, answer)`.
        failures (`tuple[type]`, *optional*): what `ask` may raise.
    """
    done: set[int] = set()

    def on_answer(row: int, made: Any) -> None:
        try:
            tell(questions[row], made)
        except Exception as error:
            raise _TellError from error
        done.add(row)

    try:
        ask(questions, on_answer)
        return
    except _TellError as error:
        raise (error.__cause__ or error) from None
    except failures as error:
        if len(questions) == 1 or is_absence(error):
            rows = [row for row in range(len(questions)) if row not in done]
            yield from [(questions[row], _of_row(error, row, len(questions))) for row in rows]
            return
    # Not in the handler: the error holds on to what the pass that failed has allocated.
    left = [question for row, question in enumerate(questions) if row not in done]
    middle = (len(left) + 1) // 2
    for half in (left[:middle], left[middle:]):
        if half:
            yield from answer_each(half, ask, tell, failures)


def _of_row(error: Exception, row: int, num_rows: int) -> Exception:
    """The error as one of that question alone."""
    if not isinstance(error, AdaFuseDecodingError) or num_rows == 1:
        return error
    own = slice(row, row + 1) if len(error.texts) == num_rows else slice(0)  # else it is of a part of the questions
    alone = AdaFuseDecodingError(error.member, error.reason, error.round, error.texts[own], error.sequences[own])
    alone.__cause__ = error.__cause__
    return alone


def reason_of(error: Exception) -> str:
    """Why a question could not be answered."""
    if isinstance(error, AdaFuseDecodingError):
        return f"{error.member} failed in round {error.round}: {error.reason}"
    return str(error) or type(error).__name__
