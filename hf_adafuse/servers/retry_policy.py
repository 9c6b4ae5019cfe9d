"""What is borne of a server that does not answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RetryPolicy:
    """
    How long a server is waited for.

    Args:
        timeout (`float`): seconds without a byte after which an attempt is given up.
        deadline (`float`): seconds for a request with all its attempts. A server that is away or busy is asked again
            until then, but for the first question that it is asked.
        retries (`int`): attempts after answers that cannot be right, and after a first question without an answer.
    """

    timeout: float = 60.0
    deadline: float = 300.0
    retries: int = 5

    def __post_init__(self) -> None:
        for name in ("timeout", "deadline"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"`{name}` must be a number of seconds above 0, but is {value!r}. Leave it out.")
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise ValueError(f"`retries` must be a whole number of at least 0, but is {self.retries!r}. Leave it out.")


# As long as is waited where nothing else is said.
PATIENCE = RetryPolicy()
