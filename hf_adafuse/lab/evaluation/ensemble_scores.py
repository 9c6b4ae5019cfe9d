"""The log-likelihood of a given text under an ensemble, by the rule of its method.

Each member scores the text in its own tokens. With members k of weights w (summing to 1), S_k the sum of the NLL of
member k's tokens of the text and L_k their number (with `nll_normalization="byte"`: the text's bytes):

| method | log-likelihood |
|---|---|
| `adafuse` | - L_1^a * sum_k w_k S_k / L_k^a, with a the `length_exponent` |
| `words` | sum over words of log sum_k w_k p_k(word), or of another `mean` |

Any other method is scored as `adafuse` is, and a warning says so: not every method gives a text a probability.

`adafuse` compares spans by a mean per token (equation 5). Here that mean is multiplied by the main model's number of
tokens. So it is a quantity of the whole text, as the harness compares and normalizes it, and with one member it is that
member's log-likelihood. It is a weighted geometric pool of the members, which is not normalized over all texts. `words`
with arithmetic means is a mixture of the members, word by word. The option `horizon` changes nothing, as there is only
one text.

Weights from the prompt follow from the context as the task gave it, as in `generate()`. lm-eval moves spaces from its
end to the continuation, but a newline there belongs to the cue for an answer. Settings that follow the text so far
(`online_rate`) or what others propose (`switch_margin`, `certainty_gate`) change nothing. The exception is an infinite
`switch_margin`, with which the main model is alone.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from ...config import AdaFuseConfig
from ...decoding.member_weights import MemberWeights
from ...decoding.scored_spans import ScoredSpan
from ...decoding.selector import by_word
from ...decoding.strategies.adafuse import AdaFuse
from ...decoding.strategies.adaptive_spans import AdaptiveSpans
from ...decoding.strategies.registry import has_adaptive_spans, make_strategy
from ...decoding.word_splitter import WordSplitter
from ...members.chat_ending import chat_endings, ending_of
from ...members.model_handle import ModelHandle
from ...members.prompt_content import PromptEvidence, content_bytes, content_divergence, ids_without_content
from ...members.prompt_nll import asks_for_examples, prompt_nll
from ...trees.model_call import ModelCall
from ...trees.next_token import next_token_logits
from .contexts import context_ids, continued_text, pair_ids, prefix_id, text_ids
from .text_readings import Reading, most_continued, read

# How many contexts have their weights kept.
_MOST_CONTEXTS = 4096
# The window for long texts, in tokens, of a model whose context has no end: as the harness cuts them.
_UNBOUNDED_WINDOW = 2048


class EnsembleScorer:
    """
    Scores given texts under an ensemble.

    Args:
        handles (`list[ModelHandle]`): the members, the main model first.
        config (`AdaFuseConfig`): the settings.
    """

    def __init__(self, handles: Sequence[ModelHandle], config: AdaFuseConfig) -> None:
        self._handles = list(handles[:1] if config.switch_margin == math.inf else handles)
        self._calls = [ModelCall(handle.model) for handle in self._handles]
        self._config = config
        self._follows_method = has_adaptive_spans(config.method)
        self._strategy: AdaptiveSpans = make_strategy(config) if self._follows_method else AdaFuse()
        self._strategy.config = config
        self._splitter = WordSplitter(config.max_word_tokens, config.word_boundary)
        weights = config.model_weights if len(self._handles) > 1 else None
        self._weighting = weights if isinstance(weights, str) else None
        self._context_evidence: dict[str, list[PromptEvidence]] = {}

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """
        For each context and continuation, the log-likelihood of the continuation (nats), and whether the ensemble would
        write it. The latter is `True` only where every member would write it greedily by itself. What the ensemble
        writes where members differ is known only by decoding.
        """
        self._tell_rule()
        by_member = []
        for handle, call in zip(self._handles, self._calls, strict=True):
            split = [pair_ids(context, continuation, handle.tokenizer) for context, continuation in pairs]
            by_member.append(read(handle, call, split))
        self._read_contexts([context for context, _ in pairs])
        results = []
        for (context, continuation), readings in zip(pairs, zip(*by_member, strict=True), strict=True):
            evidence = self._context_evidence.get(context)
            value = self._fused(continued_text(context, continuation), readings, evidence)
            results.append((value, all(reading.is_greedy for reading in readings)))
        return results

    def texts(self, texts: Sequence[str]) -> list[float]:
        """The log-likelihood of each text from its beginning on (nats). A text longer than a member's context is read
        in windows."""
        self._tell_rule()
        by_member = []
        for handle, call in zip(self._handles, self._calls, strict=True):
            windows = [_windows(text, handle) for text in texts]
            flat = read(handle, call, [window for of_text in windows for window in of_text], with_greedy=False)
            pieces = iter(flat)
            by_member.append([_joined([next(pieces) for _ in of_text]) for of_text in windows])
        return [self._fused(text, readings) for text, readings in zip(texts, zip(*by_member, strict=True), strict=True)]

    def _tell_rule(self) -> None:
        if not self._follows_method:
            warn_of_span_rule()

    def _read_contexts(self, contexts: Sequence[str]) -> None:
        """Have the members read contexts, where weights follow from that. A context is read once for all of its
        continuations, which may come in several batches."""
        if self._weighting is None:
            return
        if len(self._context_evidence) > _MOST_CONTEXTS:
            self._context_evidence.clear()
        new = [context for context in dict.fromkeys(contexts) if context not in self._context_evidence]
        if not new:
            return
        by_member = [
            context_evidence(handle, call, new, self._weighting)
            for handle, call in zip(self._handles, self._calls, strict=True)
        ]
        self._context_evidence |= {context: list(found) for context, *found in zip(new, *by_member, strict=True)}

    def _fused(
        self, text: str, readings: Sequence[Reading], prompt_evidence: list[PromptEvidence] | None = None
    ) -> float:
        """The log-likelihood of a text, from each member's reading of it."""
        words = self._strategy.units(self._splitter.split(text))
        if not words:
            return 0.0
        num_bytes = [len(word.encode("utf-8", "replace")) for word in words]
        log_probs = []
        for handle, reading in zip(self._handles, readings, strict=True):
            vocabulary = handle.vocabulary
            # Text and tokens end together. In front of the first word a tokenizer may put a space.
            start = sum(num_bytes) - sum(len(vocabulary.piece(token)) for token in reading.ids)
            of_words = by_word(words, reading.ids, reading.log_probs, vocabulary, start)
            log_probs.append(of_words if any(of_words) else [])
        config = self._config
        weights = MemberWeights(config, prompt_evidence, len(readings)).weights
        span = ScoredSpan(tuple(words), log_probs, num_bytes)
        (score,) = self._strategy.choose([span], weights[: len(readings)], None).scores
        if not isinstance(self._strategy, AdaFuse):
            return -score
        length = len(readings[0].ids) if config.nll_normalization == "token" else sum(num_bytes)
        return -score * math.pow(max(length, 1), self._strategy.length_exponent)


@functools.cache
def warn_of_span_rule() -> None:
    """Warn once per process. `warnings` itself may forget between two batches what it has shown."""
    warnings.warn(
        "Log-likelihoods (multiple choice, perplexity) under methods other than AdaFuse and words follow AdaFuse's "
        "span rule, not the method: with the same weights such methods have the same scores.",
        UserWarning,
        stacklevel=2,
    )


def context_evidence(
    handle: ModelHandle, call: ModelCall, contexts: Sequence[str], weighting: str
) -> list[PromptEvidence]:
    """
    What each context says about a member, as [`MemberWeights`] takes it.

    Args:
        handle (`ModelHandle`): the member.
        call (`ModelCall`): calls its model.
        contexts (`list[str]`): the contexts. One that is too long for the member loses its beginning.
        weighting (`str`): a name that `model_weights` may have.
    """
    limit = handle.trained_length or sys.maxsize
    rows = [context_ids(context, handle.tokenizer)[-limit:] for context in contexts]
    readings = read(handle, call, [(ids[:1], ids[1:]) for ids in rows], with_greedy=False)
    endings = chat_endings(handle.tokenizer, handle.vocabulary) if asks_for_examples(weighting) else []
    are_chats = [ending_of(ids, endings) is not None for ids in rows]
    nlls = [
        prompt_nll(handle.vocabulary, ids, reading.log_probs, weighting, is_known_chat) if ids else math.nan
        for ids, reading, is_known_chat in zip(rows, readings, are_chats, strict=True)
    ]
    if weighting != "examples_or_content" or not handle.is_local:
        return list(map(PromptEvidence, nlls))
    pairs: dict[int, tuple[list[int], list[int]]] = {}
    for row, (ids, nll) in enumerate(zip(rows, nlls, strict=True)):
        shortened = ids_without_content(handle.vocabulary, endings, ids) if ids and math.isnan(nll) else None
        if shortened is not None and len(shortened) <= (handle.max_length or sys.maxsize):
            pairs[row] = ids, shortened
    logits: dict[tuple[int, ...], torch.Tensor] = {}
    for read_ids, found in next_token_logits(call, handle.device, [ids for pair in pairs.values() for ids in pair]):
        logits |= dict(zip(read_ids, found, strict=True))
    of_content = [(math.nan, 0)] * len(rows)
    for row, pair in pairs.items():
        divergence = content_divergence(*(logits[tuple(ids)] for ids in pair))
        of_content[row] = divergence, content_bytes(handle.vocabulary, *pair)
    evidence = zip(nlls, of_content, are_chats, strict=True)
    return [PromptEvidence(nll, *of_prompt, is_chat) for nll, of_prompt, is_chat in evidence]


def _windows(text: str, handle: ModelHandle) -> list[tuple[list[int], list[int]]]:
    """A text's tokens in windows, each a context and its continuation. Every token is in exactly one continuation."""
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    windows: Any = get_rolling_token_windows(
        token_list=text_ids(text, handle.tokenizer),
        prefix_token=prefix_id(handle.tokenizer),
        max_seq_len=most_continued(handle) or _UNBOUNDED_WINDOW,
        context_len=1,
    )
    return [make_disjoint_window(window) for window in windows]


def _joined(readings: Sequence[Reading]) -> Reading:
    """The readings of a text's windows as one."""
    ids = [token for reading in readings for token in reading.ids]
    return Reading(ids, [value for reading in readings for value in reading.log_probs])
