"""Our own code with one of its ideas left out: patches of the core, for the benchmark alone, undone at the end. The
text stays the same; only the cost changes. Not for use in several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ...decoding.member_turns import MemberTurns
from ...members.model_handle import ModelHandle
from ...members.ngram_drafts import NgramDrafts
from ...trees import model_call
from ...trees.kv_cache_backend import KVCacheBackend
from .results import NO_KERNEL


def without_score_first() -> AbstractContextManager[None]:
    """A member proposes without first reading what the others put on the table."""

    return _patched(MemberTurns, "_spans_and_later_nodes", lambda own: lambda *args: ([], []))


def without_subtree() -> AbstractContextManager[None]:
    """What was computed below the committed path is dropped, not kept for the next round."""

    def make(commit: Callable[..., Any]) -> Callable[..., Any]:
        def drop_below(self: KVCacheBackend, prompt_index: int, *rest: Any) -> None:
            commit(self, prompt_index, *rest)
            self.trees[prompt_index].root.children.clear()
            self.slots.promote(prompt_index, [], self.trees[prompt_index].unsettled())

        return drop_below

    return _patched(KVCacheBackend, "commit", make)


def without_look_ahead() -> AbstractContextManager[None]:
    """The first member proposes the round at hand and no more."""

    def make(propose_ahead: Callable[..., Any]) -> Callable[..., Any]:
        def propose_nothing(*args: Any) -> Iterator[Any]:
            yield from ()
            return []  # type: ignore[return-value]  # a generator's result

        return propose_nothing

    return _patched(MemberTurns, "_propose_ahead", make)


def without_drafts() -> AbstractContextManager[None]:
    """Nothing is guessed by what has followed the last tokens before."""
    return _patched(NgramDrafts, "after", lambda after: lambda self, nodes: [])


def without_tree_attention() -> AbstractContextManager[None]:
    """Each branch is a row of the batch that reads a copy of its prefix's keys, whatever the self-tests say."""
    return _patched(ModelHandle, "choose_backend", lambda choose: lambda self: "branch-rows")


def without_kernel() -> AbstractContextManager[None]:
    """Linear layers over few tokens multiply as PyTorch has it, without the package's kernel."""
    return _patched(model_call, "with_small_batch_linears", lambda make: lambda model: model)


VARIANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "no-score-first": without_score_first,
    "no-subtree": without_subtree,
    "no-look-ahead": without_look_ahead,
    "no-drafts": without_drafts,
    "no-tree-attention": without_tree_attention,
    NO_KERNEL: without_kernel,
}


@contextmanager
def _patched(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    original = owner.__dict__[name]  # a KeyError here: the core has changed, and this module must follow
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
