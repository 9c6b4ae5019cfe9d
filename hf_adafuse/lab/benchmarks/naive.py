"""A straightforward implementation of the same algorithm, in the manner of the paper's released scripts: each word is a
`generate()` of its own that reads the whole text again, branches one after another, and every member scores every
candidate in a full forward pass. No cache outlives a call, no batch, no tree. Gives the text that ours gives.
"""

from __future__ import annotations

from typing import Any

import torch

from ...config import AdaFuseConfig
from ...decoding.scoring import first_lowest, fused_score, margin, span_nll
from ...decoding.word_splitter import WordSplitter
from ...members.model_handle import ModelHandle
from ...members.node_logprobs import best_tokens
from ...transformers_compat import CACHE_NAME

Span = tuple[list[list[int]], bool]  # the ids of each word, and whether the text ends after them


class NaiveMember:
    """A model and its tokenizer, without memory."""

    def __init__(self, handle: ModelHandle, eos_ids: list[int], config: AdaFuseConfig) -> None:
        self.model = handle.model
        self.device = handle.device
        self.vocabulary = handle.vocabulary
        self.eos_ids = sorted(eos_ids)
        self.config = config
        self.splitter = WordSplitter(config.max_word_tokens, config.word_boundary)

    def propose(self, prefix: list[int]) -> list[Span]:
        """Its candidates, best branch first."""
        words: list[list[int]] = []
        ids = list(prefix)
        while len(words) < self.config.max_words:
            top, log_probs, word, ends = self._generate_word(ids)
            if margin(log_probs) < self.config.margin_threshold:
                firsts = top[: self.config.num_branches]
                tails = [self._generate_word(ids, first)[2:] for first in firsts]
                return [([*words, tail] if tail else words, tail_ends) for tail, tail_ends in tails]
            if word:
                words = [*words, word]
            if ends:
                return [(words, True)]
            ids = ids + word
        return [(words, False)]

    def score(self, prefix: list[int], ids: list[int], ends: bool) -> list[float]:
        """The log-probability of each of `ids` after `prefix`, and of the end of the text, in one full pass."""
        logits = self.model(torch.tensor([prefix + ids], device=self.device), use_cache=False).logits[0]
        log_probs = logits[len(prefix) - 1 :].float().log_softmax(-1)
        values = [log_probs[at, token].item() for at, token in enumerate(ids)]
        return [*values, log_probs[-1, self.eos_ids].logsumexp(0).item()] if ends else values

    def best_eos(self, ids: list[int]) -> int:
        logits = self.model(torch.tensor([ids], device=self.device), use_cache=False).logits[0, -1]
        return self.eos_ids[int(logits[self.eos_ids].argmax())]

    def _generate_word(
        self, ids: list[int], first: int | None = None
    ) -> tuple[list[int], list[float], list[int], bool]:
        """The best first tokens and their log-probabilities, the greedy word (from `first`), whether the text ends."""
        if first in self.eos_ids:
            return [], [], [], True
        output = self.model(torch.tensor([ids if first is None else [*ids, first]], device=self.device), use_cache=True)
        top, log_probs = self._best(output)
        token = top[0] if first is None else first
        if token in self.eos_ids:
            return top, log_probs, [], True
        if first is None:
            output = self._step(token, output)
        word = [token]
        data = self.vocabulary.piece(token)
        while not self.splitter.is_closed(data, len(word)):
            following = self._best(output)[0][0]
            if self.splitter.is_complete(data, None if following in self.eos_ids else self.vocabulary.piece(following)):
                break
            word.append(following)
            data += self.vocabulary.piece(following)
            output = self._step(following, output)
        return top, log_probs, word, False

    def _step(self, token: int, output: Any) -> Any:
        ids = torch.tensor([[token]], device=self.device)
        return self.model(ids, use_cache=True, **{CACHE_NAME: output[CACHE_NAME]})

    def _best(self, output: Any) -> tuple[list[int], list[float]]:
        logits = output.logits[:, -1].float()
        scores, ids = best_tokens(logits.log_softmax(-1), max(2, self.config.num_branches))
        return ids[0].tolist(), scores[0].tolist()


@torch.no_grad()
def naive_decode(
    members: list[NaiveMember], prompts: list[list[int]], config: AdaFuseConfig, max_new_tokens: int
) -> list[int]:
    """
    One prompt's new ids, of the main model.

    Args:
        members (`list[NaiveMember]`): the main model first.
        prompts (`list[list[int]]`): each member's own ids of the prompt.
        config (`AdaFuseConfig`): of "diverse" exploration and "adaptive" commitment, with scores per token.
        max_new_tokens (`int`): how many at most.
    """
    prefixes = [list(ids) for ids in prompts]
    new: list[int] = []
    while len(new) < max_new_tokens:
        ids, ends = _round(members, prefixes, config)
        prefixes = [prefix + own for prefix, own in zip(prefixes, ids, strict=True)]
        new += ids[0]
        if ends:
            if len(new) < max_new_tokens:
                new.append(members[0].best_eos(prefixes[0]))
            break
    return new[:max_new_tokens]


def _round(
    members: list[NaiveMember], prefixes: list[list[int]], config: AdaFuseConfig
) -> tuple[list[list[int]], bool]:
    """What one round commits: each member's own ids of it, and whether the text ends."""
    pool: dict[tuple[str, bool], dict[int, list[int]]] = {}
    for k, (member, prefix) in enumerate(zip(members, prefixes, strict=True)):
        for words, ends in member.propose(prefix):
            text = "".join(member.vocabulary.text(word) for word in words)
            pool.setdefault((text, ends), {}).setdefault(k, [token for word in words for token in word])
    spans: list[tuple[list[list[int]], bool]] = []
    for (text, ends), own in pool.items():
        if (text or ends) and (0 in own or members[0].vocabulary.encode(text).exact):
            spans.append(([own.get(k) or m.vocabulary.encode(text).ids for k, m in enumerate(members)], ends))
    weights = config.model_weights if isinstance(config.model_weights, tuple) else [1.0] * len(members)
    scores = []
    for encoded, ends in spans:
        scored = [m.score(p, ids, ends) for m, p, ids in zip(members, prefixes, encoded, strict=True)]
        scores.append(fused_score([span_nll(log_probs) for log_probs in scored], weights))
    return spans[first_lowest(scores)]
