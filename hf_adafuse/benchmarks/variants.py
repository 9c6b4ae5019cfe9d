"""Our own code with one of its ideas left out: patches of the core, for the benchmark alone, undone at the end. The
text stays the same; only the cost changes. Not for use in several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ..decoding import Decoder
from ..member import Member
from ..token_tree import TokenTree


def without_score_first() -> AbstractContextManager[None]:
    """A member proposes without first reading what the others put on the table."""

    def make(take_turn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, row, spans, drafts: take_turn(self, row, [], [])

    return _patched(Member, "take_turn", make)


def without_subtree() -> AbstractContextManager[None]:
    """What was computed below the committed path is dropped, not kept for the next round."""

    def make(commit: Callable[..., Any]) -> Callable[..., Any]:
        def drop_below(self: TokenTree, index: int, *rest: Any) -> None:
            commit(self, index, *rest)
            self.rows[index].root.children.clear()

        return drop_below

    return _patched(TokenTree, "commit", make)


def without_look_ahead() -> AbstractContextManager[None]:
    """The first member proposes the round at hand and no more."""

    def make(propose_ahead: Callable[..., Any]) -> Callable[..., Any]:
        def propose_nothing(*args: Any) -> Iterator[Any]:
            yield from ()
            return []  # type: ignore[return-value]  # a generator's result

        return propose_nothing

    return _patched(Decoder, "_propose_ahead", make)


def without_packed() -> AbstractContextManager[None]:
    """A forward pass holds one line of tokens per prompt, never a tree: branches and candidates run one by one."""

    def make(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_lines(self: TokenTree, wanted: Any, *rest: Any) -> list[Any]:
            missing = {id(above): above for node in wanted for above in node.lineage() if not above.is_run}
            ran: list[Any] = []
            while missing:
                lines: dict[int, list[Any]] = {}
                for node in list(missing.values()):  # parents come first
                    line = lines.setdefault(node.row, [])
                    if not line or node.parent is line[-1]:
                        line.append(missing.pop(id(node)))
                ran += run(self, [node for line in lines.values() for node in line], *rest)
            return ran

        return run_lines

    return _patched(TokenTree, "run", make)


def force_backend(name: str) -> AbstractContextManager[None]:
    """
    Every model runs its trees through the backend `name`. To be connected where backends are chosen.

    Raises:
        ValueError: there are no backends to choose from.
    """
    raise ValueError(f"`--against` must not hold {name!r}: this version runs every tree packed. Leave it out.")


ROWS = "rows"  # the contender that `force_backend` makes
VARIANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "no-score-first": without_score_first,
    "no-subtree": without_subtree,
    "no-look-ahead": without_look_ahead,
    "no-packed": without_packed,
}


@contextmanager
def _patched(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    original = owner.__dict__[name]  # a KeyError here: the core has changed, and this module must follow
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
