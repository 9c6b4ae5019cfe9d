"""Chooses the backend of a model: the first one whose logits on a few made-up tokens equal those of plain forward
passes.

A list of architectures would be wrong for the next one. What a model does with a mask or a cache shows in its logits.
"""

from __future__ import annotations

import functools
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from ..transformers_compat import adapter_names, attention_of, hooks_of
from .backend import Backend, ForwardError
from .branch_rows_backend import BranchRowsBackend
from .model_call import ModelCall, trained_length
from .model_facts import cached_while_unchanged
from .recurrent_backend import RecurrentBackend
from .static_shapes import uncompiled
from .tree_attention_backend import TreeAttentionBackend
from .tree_mask import reason_against_branch_rows, reason_against_tree_attention
from .uncached_backend import UncachedBackend

logger = logging.get_logger(__name__)
# In the order in which they are tried, fastest first.
BACKENDS: dict[str, Callable[[Any, torch.device], Backend]] = {
    "tree-attention": TreeAttentionBackend,
    "branch-rows": BranchRowsBackend,
    "recurrent (several tokens)": RecurrentBackend,
    "recurrent": functools.partial(RecurrentBackend, max_tokens=1),
    "recurrent (one row)": functools.partial(RecurrentBackend, max_rows=1),
    "uncached": UncachedBackend,
}
# Where models' code is known to follow its masks and its config, and how long a text is on which others are tested.
_KNOWN_PACKAGES = frozenset({"transformers", "torch", "hf_adafuse", "peft", "accelerate"})
_LONG_TEXT, _LONG_BRANCH = 600, 32
# Two prompts of different lengths, each with two branches; all four texts are of one length. Numbers stand for tokens.
_PROMPTS = ([0, 1, 2, 3], [4, 5, 1])
_BRANCHES = (([6, 7], [8, 2]), ([9, 3, 5], [9, 0, 7]))
_NUM_TOKENS = 10
# A token whose logit is below the highest one by more than this is ruled out: by a mask, and not by what was learned.
_RULED_OUT = 1000.0
# In vocabularies of at least twice as many tokens, frequent ones begin at about this id.
_FIRST_FREQUENT = 500


def keeps_keys(name: str) -> bool:
    """Whether a backend keeps keys and values, and can start from those of a caller."""
    made: Any = BACKENDS.get(name)
    return bool(getattr(getattr(made, "func", made), "keeps_keys", False))  # some are partial


_Key = tuple[Any, ...]
_of_class: dict[_Key, str] = {}
_of_model: weakref.WeakKeyDictionary[Any, tuple[_Key, str]] = weakref.WeakKeyDictionary()


class SelfTestError(ValueError):
    """No backend gives what plain forward passes give; the text says how each one fails."""


@cached_while_unchanged
def choose_backend(model: Any, device: torch.device) -> str:
    """
    The name of the backend for a model. The self-test takes at most five forward passes where tree attention works, and
    twelve in half precision; three more where the model has code from outside transformers. Its result is remembered
    for all models of the same classes, config, dtype and attention.

    Raises:
        SelfTestError: no backend works.
    """
    own = _own_forwards_and_hooks(model)
    key = _key(model, device, own)
    if own:
        known = _of_model.get(model)
        if known is None or known[0] != key:
            known = _of_model[model] = key, _choose(model, device)
        return known[1]
    if key not in _of_class:
        _of_class[key] = _choose(model, device)
    return _of_class[key]


def reason_not_to_test(model: Any) -> str | None:
    """Why no backend can run a model, known without a self-test; else `None`."""
    if attention_of(model) == "flex_attention":
        return "its attention is 'flex_attention', which is compiled anew for each shape"
    return None


def _key(model: Any, device: torch.device, own: tuple[int, ...]) -> _Key:
    config = model.config
    return (
        tuple(getattr(type(module), "forward", type(module)) for module in model.modules()),  # a script has none
        own,
        config.to_json_string(use_diff=False),
        model.dtype,
        attention_of(model),
        adapter_names(model),
        device.type,
    )


def _own_forwards_and_hooks(model: Any) -> tuple[int, ...]:
    """The ids of what this model runs that others of its class do not: a `forward` of its own (wrappers), or hooks
    inside."""
    found: list[Any] = []
    for module in model.modules():
        if "forward" in vars(module):
            found.append(vars(module)["forward"])
        if module is not model:  # a hook on the whole model sees masks and caches only as they are
            found += hooks_of(module)
    return tuple(map(id, found))


@torch.no_grad()
def _choose(model: Any, device: torch.device) -> str:
    if (reason := reason_not_to_test(model)) is not None:
        raise SelfTestError(reason)
    # A compiled model uncompiled: the shapes of these passes come once, and each would be compiled for itself.
    with warnings.catch_warnings(), _in_eval_mode(model), uncompiled:
        warnings.simplefilter("ignore")  # of attempts that fail
        ids = _ids(model)
        expected, tolerance = _plain_logits(model, device, ids)
        long = _long_text(model, device, ids)
        reasons: list[str] = []
        for name, make in BACKENDS.items():
            reason = (
                _reason_not_to_try(name, model)
                or _difference(make, model, device, ids, expected, tolerance)
                or _long_difference(make, model, device, long, tolerance)
            )
            if reason is None:
                logger.info("; ".join([f"{type(model).__name__} in {model.dtype} runs by {name}", *reasons]))
                return name
            reasons.append(f"{name}: {reason}")
    raise SelfTestError("; ".join(reasons))


@contextmanager
def _in_eval_mode(model: Any) -> Iterator[None]:
    """The model without dropout within: with it no two passes are alike, and none says how the model works."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _ids(model: Any) -> list[int]:
    """
    Made-up ids, ordinary ones where the vocabulary is large enough. The first few hundred ids of a large vocabulary are
    bytes, tags and tokens that training never saw, and frequent tokens follow. In bfloat16, passes of Gemma 3 270M that
    differ by rounding alone are 0.69 of the logits' spread apart on the first ids, and 0.04 on these.
    """
    config = model.config.get_text_config()
    size = getattr(config, "vocab_size", None) or 2
    special = set()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        special |= set(value) if isinstance(value, (list, tuple)) else {value}
    first = _FIRST_FREQUENT if size >= 2 * _FIRST_FREQUENT else 0
    ordinary = [token for token in range(first, min(size, 2 * _FIRST_FREQUENT)) if token not in special] or [0]
    return [ordinary[(7 + 13 * index) % len(ordinary)] for index in range(_NUM_TOKENS)]


def _plain_logits(model: Any, device: torch.device, ids: list[int]) -> tuple[torch.Tensor, float]:
    """
    The logits of the four texts, of shape `(4, length, vocab_size)`, by one plain forward pass; and how far others may
    be from them, by passes that differ by rounding alone: one over their beginnings, and in half precision, where that
    shows little of it, one with other products, and those of ordinary decoding, token by token.
    """
    texts = [prompt + tail for prompt, tails in zip(_PROMPTS, _BRANCHES, strict=True) for tail in tails]
    batch = torch.tensor([[ids[index] for index in text] for text in texts], device=device)
    call = ModelCall(model)
    eps = _eps(model)
    try:
        # The first pass of a call is the model's own, the others multiply in a quicker way: not in two ways among them.
        own = call(batch, use_memory=False)[0] if eps > 1e-6 else None
        whole, _ = call(batch, use_memory=False)
        part, _ = call(batch[:1, :-1], use_memory=False)
    except ForwardError as error:
        raise SelfTestError(
            f"a plain forward pass raises {error} (attention {attention_of(model)!r})"
        ) from error.__cause__
    if not all(_can_be_logits(logits) for logits in (whole, part, own) if logits is not None):
        raise SelfTestError("a plain forward pass gives logits that are NaN or infinite")
    noise = _distance(part[0], whole[0, :-1])
    if noise > 0.3:
        raise SelfTestError("two plain forward passes over one text differ: it is not causal, or it is random")
    more = 0.0
    if own is not None:
        more = _distance(own, whole)
        if more > 1.0:  # nothing is left of the model's own logits
            raise SelfTestError("passes that differ by rounding alone give other logits: it needs more precision")
        more = max(more, _noise_of_steps(call, batch, whole))
    return whole.float(), min(0.3, max(1e-4, 8 * eps, 8 * noise, 1.5 * more))


def _eps(model: Any) -> float:
    """How much is rounded off where it is most, in what precision some of the layers are."""
    halves = {parameter.dtype for parameter in model.parameters()} & {torch.bfloat16, torch.float16}
    return max(torch.finfo(dtype).eps for dtype in halves or {model.dtype})


def _can_be_logits(logits: torch.Tensor) -> bool:
    """Whether there is a number for each token, or minus infinity, which rules it out, but not for all."""
    highest = logits.amax(-1)  # NaN where one is
    return bool(highest.isfinite().all())


def _noise_of_steps(call: ModelCall, batch: torch.Tensor, whole: torch.Tensor) -> float:
    """How far the logits of ordinary decoding are from those of one pass; 0 where the model has no memory."""
    if call.cache_argument is None:
        return 0.0
    memory = None
    steps = []
    try:
        for position in range(batch.shape[1]):
            ids = batch[:1, position : position + 1]
            logits, memory = call(ids, torch.full_like(ids, position), memory=memory)
            steps.append(logits[0, -1])
    except ForwardError:
        return 0.0  # the backends will say what is wrong
    return _distance(torch.stack(steps), whole[0])


def _distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over positions, as a share of the spread of the expected logits. Tokens that both rule out
    do not count: beside their logits, all differences would be small."""
    logits, expected = logits.float(), expected.float()
    floor = logits.amax(-1, keepdim=True) - _RULED_OUT
    expected_floor = expected.amax(-1, keepdim=True) - _RULED_OUT
    counts = (logits > floor) | (expected > expected_floor)
    # What only one of the two rules out differs by as much as can be.
    logits, expected = logits.maximum(floor).where(counts, 0.0), expected.maximum(expected_floor).where(counts, 0.0)
    numbers = counts.sum(-1, keepdim=True)
    centred = (expected - expected.sum(-1, keepdim=True) / numbers).where(counts, 0.0)
    spread = (centred.square().sum() / counts.sum()).sqrt().clamp(min=1e-12)
    return float(((logits - expected).square().sum(-1, keepdim=True) / numbers).sqrt().max() / spread)


def _reason_not_to_try(name: str, model: Any) -> str | None:
    if name == "tree-attention":
        return reason_against_tree_attention(model) or reason_against_branch_rows(model)
    if name == "branch-rows":
        return reason_against_branch_rows(model)
    return None


def _difference(
    make: Callable[[Any, torch.device], Backend],
    model: Any,
    device: torch.device,
    ids: list[int],
    expected: torch.Tensor,
    tolerance: float,
) -> str | None:
    """How a backend goes wrong on the four texts, or `None` where it does not."""
    try:
        backend = make(model, device)
        roots = backend.prefill([[ids[index] for index in prompt] for prompt in _PROMPTS], can_share=False)
        paths = [
            [root, *root.add_path(ids[index] for index in tail)]
            for root, tails in zip(roots, _BRANCHES, strict=True)
            for tail in tails
        ]
        if isinstance(backend, TreeAttentionBackend):
            # Both prompts in one row of the cache; then, as with long texts, a row for each.
            backend.run([path[1] for path in paths])
            backend.most_shared_columns = 0
        else:
            # The second prompt alone, two sequences by several tokens: keys that hold their columns show, and states
            # that a step of several tokens forgets. Then two sequences by one token: a state that mixes them shows.
            backend.run([path[-1] for path in paths[2:]])
            backend.run([path[1] for path in paths[:2]])
        backend.run([path[-1] for path in paths])
        found = [torch.stack([node.logits for node in path if node.logits is not None]) for path in paths]
        for tree in backend.trees:
            tree.close()
    except Exception as error:
        if isinstance(error.__cause__, torch.OutOfMemoryError):
            raise SelfTestError(str(error)) from error
        return f"{type(error).__name__}: {error}".splitlines()[0]
    for path, of_path, logits in zip(paths, found, expected, strict=True):
        distance = _distance(of_path.to(logits.device), logits[path[0].position :])
        if not distance <= tolerance:
            return f"its logits are off by {distance:.2g} of their spread"
    return None


@dataclass(frozen=True)
class _LongText:
    """A long text, its two branches, and the logits behind them by a plain forward pass, of shape `(2, vocab_size)`."""

    ids: list[int]
    tails: list[list[int]]
    logits: torch.Tensor


def _long_text(model: Any, device: torch.device, ids: list[int]) -> _LongText | None:
    """What backends are tested on where a model has code from outside transformers, which may look at less of a long
    text than masks and its config say. `None` for other models, and where this one reads no such text."""
    if not _has_code_of_others(model):
        return None
    config = model.config.get_text_config()
    trained = trained_length(config)
    limits = [getattr(config, name, None) for name in ("n_positions", "n_ctx", "block_size", "seq_length")]
    length = min([_LONG_TEXT, *filter(None, (trained, *limits))])
    if device.type != "cpu" and length == _LONG_TEXT and trained is None:
        return None  # a table of positions that ends before would be an assertion on the device
    size = min(_LONG_BRANCH, length // 2)
    numbers = random.Random(0)
    text, *tails = (numbers.choices(ids, k=number) for number in (length - size, size, size))
    try:
        logits, _ = ModelCall(model)(torch.tensor([text + tail for tail in tails], device=device))
    except ForwardError:
        return None
    return _LongText(text, tails, logits[:, -1])


def _long_difference(
    make: Callable[[Any, torch.device], Backend],
    model: Any,
    device: torch.device,
    long: _LongText | None,
    tolerance: float,
) -> str | None:
    """How a backend goes wrong behind a long text, or `None` where it does not. Rounding adds up over a long text, so
    that more of a difference is allowed."""
    if long is None:
        return None
    try:
        backend = make(model, device)
        (root,) = backend.prefill([long.ids], can_share=False)
        leaves = [root.add_path(tail)[-1] for tail in long.tails]
        backend.run(leaves)
        found = [leaf.logits for leaf in leaves if leaf.logits is not None]
        for tree in backend.trees:
            tree.close()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    distance = _distance(torch.stack(found).to(long.logits.device), long.logits)
    if distance <= min(0.3, 4 * tolerance):
        return None
    return f"its logits behind {len(long.ids)} tokens are off by {distance:.2g} of their spread"


def _has_code_of_others(model: Any) -> bool:
    """Whether classes of the model's modules are defined outside the libraries whose masks are known."""
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()}
    return not packages <= _KNOWN_PACKAGES
