"""LLM-Blender (ACL 2023): whole answers, ranked in pairs, the best ones fused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...members.answer_fuser import load_answer_fuser
from ..scored_spans import Choice, ScoredSpan
from .majority import WholeAnswers
from .strategy import check_number, lowest

NLL = "nll"


@dataclass
class Blender(WholeAnswers):
    """
    Every member answers alone, greedily. Answer i has the score mean_j (L[i, j] - L[j, i]) over the other members'
    answers j, where L[i, j] is the logit by which a PairRM prefers i to j, read in this order; the highest score wins.
    A fuser then writes one answer of the best `num_fused`, which is committed instead; where the main model's tokenizer
    or a logits processor rules it out, the winner is, and the trace says why. Members that give the same answer count
    as many (it is compared once), and for the fuser as one.

    Sources: the paper (arXiv 2306.02561) and the released code, which divides by the number of answers, i's own too:
    the order is the same. There every model's answer is sampled or found by beams, and the prompt may be in two parts.

    Args:
        num_samples (`int`, *optional*, defaults to 1): how many answers each member draws, with `do_sample=True`.
        ranker (`str`, *optional*, defaults to `"nll"`): `"nll"`: the answer of the lowest fused NLL wins, and no other
            model runs. Else the Hub name or a folder of a PairRM, which counts all members alike.
        fuser (`str`, *optional*): the Hub name or a folder of a sequence-to-sequence model that reads what GenFuser
            reads. As released it reads 128 of its tokens of each answer and writes 128 at most: a longer answer is cut.
            `None`: the winner is committed as it is.
        num_fused (`int`, *optional*, defaults to 3): how many answers the fuser reads, at most.
    """

    ranker: str = NLL
    fuser: str | None = None
    num_fused: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_name("ranker", self.ranker, '"nll", or the Hub name or a folder of a PairRM')
        if self.fuser is not None:
            _check_name("fuser", self.fuser, "None, or the Hub name or a folder of a sequence-to-sequence model")
        check_number("num_fused", self.num_fused, 1, 100, is_integer=True)  # T5 has as many marks for answers

    def prepare(self, device: torch.device) -> None:
        if self.ranker != NLL:
            if self.config.model_weights is not None:
                raise ValueError(
                    f"`model_weights` must be left out where a PairRM ranks, but is {self.config.model_weights!r}. It "
                    'counts all members alike; weights go with `ranker="nll"`.'
                )
            # Not before: its base class takes long to import.
            from ...members.pair_ranker import load_pair_ranker

            self._compare = load_pair_ranker(self.ranker, device)
        if self.fuser is not None:
            self._write = load_answer_fuser(self.fuser, device)

    def choose(self, candidates: Sequence[ScoredSpan], weights: Sequence[float], main_index: int | None) -> Choice:
        if self.ranker == NLL:
            return super().choose(candidates, weights, main_index)
        possible = [index for index, candidate in enumerate(candidates) if candidate.is_possible]
        texts = [self.answer_in(candidates[index].text).strip() for index in possible]
        table = self._compare(self.prompt_text, texts)
        counts = [len(candidates[index].proposers) for index in possible]
        scores = [math.inf] * len(candidates)
        for index, score in zip(possible, pair_scores(table, counts), strict=True):
            scores[index] = -score
        choice = lowest(candidates, self.nlls(candidates, len(weights)), scores)
        return replace(choice, decided_by=[[-score] for score in scores])

    @property
    def criterion(self) -> str:  # type: ignore[override]
        return "fused NLL" if self.ranker == NLL else "pairwise preference"

    @property
    def highest_wins(self) -> bool:  # type: ignore[override]
        return self.ranker != NLL

    def fuse(self, texts: Sequence[str]) -> str | None:
        if self.fuser is None:
            return None
        best = list(dict.fromkeys(text.strip() for text in texts))[: self.num_fused]
        written = self._write(self.prompt_text, best).strip()
        # It goes on from the prompt as the best answer does.
        return texts[0][: len(texts[0]) - len(texts[0].lstrip())] + written if written else ""


def pair_scores(logits: Sequence[Sequence[float]], counts: Sequence[int]) -> list[float]:
    """
    Per answer, the mean over all other answers of its logit against them less theirs against it.

    Args:
        logits (`list[list[float]]` of shape `(N, N)`): per pair of different answers, the ranker's logit that the first
            is better than the second.
        counts (`list[int]` of shape `(N,)`): how often each was given.
    """
    others = max(sum(counts) - 1, 1)
    return [
        math.fsum(count * (logits[i][j] - logits[j][i]) for j, count in enumerate(counts)) / others
        for i in range(len(counts))
    ]


def _check_name(name: str, value: Any, rule: str) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"`{name}` must be {rule}, but is {value!r}. Give a name as a string.")
