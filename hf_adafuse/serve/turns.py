"""`Turns`: lets another thread run the models between two passes of the engine.

In a turn a member thinks for a call, or another engine runs a pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol


class StoppedError(Exception):
    """The engine stops before the call has ended."""


class CancelledError(Exception):
    """Nobody waits for this call any more."""


class TurnGiver(Protocol):
    """The engine, as far as it gives turns."""

    def add_turns(self, turns: Turns) -> None: ...
    def remove_turns(self, turns: Turns) -> None: ...


class Turns:
    """
    The turns of one thread, in which members think for a call, or another engine runs its passes. The engine gives one
    turn between two passes, so that no two threads run the models at the same time. See
    [`~hf_adafuse.members.thoughts.Pace`].

    Args:
        engine (`Engine`): gives the turns.

    Attributes:
        thinkers (`set[int]`): the members that have had a first turn since `prepare`.
    """

    def __init__(self, engine: TurnGiver) -> None:
        self.prepare()
        self._engine = engine
        self._given = threading.Semaphore(0)
        self._is_over = threading.Semaphore(0)
        self._error: Exception | None = None

    def prepare(
        self,
        most_tokens: Sequence[int] = (),
        hold: Callable[[], None] = lambda: None,
        resume: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Prepare for another call.

        Args:
            most_tokens (`list[int]`): for each member, the most tokens of its prompt and its thoughts together; empty
                where they are not limited.
            hold, resume (`Callable`): called in the other thread when its turn ends, and when its next turn begins.
        """
        self._most_tokens = most_tokens
        self._hold = hold
        self._resume = resume
        self.thinkers: set[int] = set()

    def begin(self, num_tokens: int = 0, member_index: int = 0) -> int | None:
        """
        Wait for the first turn.

        Args:
            num_tokens (`int`): the length of the prompt.
            member_index (`int`): whose thoughts follow.

        Returns:
            `int`: the most tokens of these thoughts with the marks that close them; `None` where they are not limited.

        Raises:
            ValueError: the prompt is too long.
            CancelledError: `cancel` was called.
            StoppedError: the engine stops.
        """
        most = self._most_tokens[member_index] if self._most_tokens else None
        if most is not None and num_tokens > most:
            raise too_long("a member that thinks", num_tokens, most)
        self.thinkers.add(member_index)
        self._hold()
        try:
            self._engine.add_turns(self)
        except StoppedError:
            self._resume()
            raise
        self._wait()
        return None if most is None else most - num_tokens

    def next(self) -> None:
        """End this turn, and wait for the next one."""
        self._hold()
        self._is_over.release()
        self._wait()

    def end(self) -> None:
        """Give the turns back: no more are needed."""
        self._engine.remove_turns(self)
        self._is_over.release()

    def give(self) -> None:
        """Let the other thread run one turn to its end. Called in the engine's thread."""
        self._given.release()
        self._is_over.acquire()

    def cancel(self, error: Exception | None = None) -> None:
        """Make the next `begin` or `next` raise an error, by default a [`CancelledError`]."""
        self._error = error or CancelledError()

    def _wait(self) -> None:
        self._given.acquire()
        self._resume()
        if self._error is not None:
            raise self._error


def too_long(member: str, number: int, most: int) -> ValueError:
    """The error that says that a prompt is of too many tokens for a member."""
    return ValueError(f"The prompt of {member} must be at most {most} tokens, but is {number} tokens. Shorten it.")
