"""Runs our own code without one of its ideas: context managers that patch the core, for the benchmark alone.

The text stays the same, only its cost changes. A patch is undone at the end of its context. It holds for all threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ...decoding.member_turns import MemberTurns
from ...members.model_handle import ModelHandle
from ...members.ngram_drafts import NgramDrafts
from ...trees import model_call, pass_costs
from ...trees.kv_cache_backend import KVCacheBackend
from .results import NO_KERNEL


def without_score_first() -> AbstractContextManager[None]:
    """Members propose without first scoring the candidates that are in the pool."""
    return _patched(MemberTurns, "_spans_and_later_nodes", lambda own: lambda *args: ([], []))


def without_subtree() -> AbstractContextManager[None]:
    """The nodes below the committed path are dropped, not kept for the next round."""

    def make(commit: Callable[..., Any]) -> Callable[..., Any]:
        def drop_below(self: KVCacheBackend, prompt_index: int, *rest: Any) -> None:
            commit(self, prompt_index, *rest)
            self.trees[prompt_index].root.children.clear()
            self.slots.promote(prompt_index, [], self.trees[prompt_index].unsettled())

        return drop_below

    return _patched(KVCacheBackend, "commit", make)


def without_look_ahead() -> AbstractContextManager[None]:
    """The member that goes first proposes one round at a time."""

    def make(propose_ahead: Callable[..., Any]) -> Callable[..., Any]:
        def propose_nothing(*args: Any) -> Iterator[Any]:
            yield from ()
            return []  # type: ignore[return-value]  # a generator's result

        return propose_nothing

    return _patched(MemberTurns, "_propose_ahead", make)


def without_drafts() -> AbstractContextManager[None]:
    """No n-gram drafts are proposed."""
    return _patched(NgramDrafts, "after", lambda after: lambda self, nodes: [])


def without_tree_attention() -> AbstractContextManager[None]:
    """Each branch is a row of the batch with a copy of its prefix's keys, even where the self-tests choose a tree
    mask."""
    return _patched(ModelHandle, "tested_backend", lambda choose: lambda self: "branch-rows")


def without_kernel() -> AbstractContextManager[None]:
    """Linear layers over few tokens multiply as in PyTorch, without the package's kernel."""
    return _patched(model_call, "with_small_batch_linears", lambda make: lambda model: model)


VARIANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "no-score-first": without_score_first,
    "no-subtree": without_subtree,
    "no-look-ahead": without_look_ahead,
    "no-drafts": without_drafts,
    "no-tree-attention": without_tree_attention,
    NO_KERNEL: without_kernel,
}


def with_costs(known: Any) -> AbstractContextManager[None]:
    """The times of passes go into `known`, a `weakref.WeakKeyDictionary`, and plan further passes. Without it a
    variant's slower passes would plan those of others."""
    return _patched(pass_costs, "_KNOWN", lambda _: known)


@contextmanager
def _patched(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    original = owner.__dict__[name]  # a KeyError here: the core has changed, and this module must follow
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
