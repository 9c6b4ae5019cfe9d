"""The candidates of one prompt in one round: pooled by text, scored by all, one chosen. Knows no tensor or tree."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .config import AdaFuseConfig
from .outputs import AdaFuseCandidate
from .proposals import Proposals
from .scoring import first_lowest, fused_score, span_nll
from .vocabulary import Vocabulary


@dataclass
class Candidate:
    """A candidate under all members: `ids[k]` is the span in member k's tokens."""

    text: str
    words: tuple[str, ...]
    ends: bool
    ids: dict[int, list[int]]
    order: tuple[int, int]  # of ties: the first proposer, then its branch
    proposers: list[int] = field(default_factory=list)
    lossy: list[int] = field(default_factory=list)
    nlls: dict[int, float | None] = field(default_factory=dict)
    score: float = math.inf
    dropped: str | None = None


class Pool:
    """
    The candidates of one prompt. Equal texts that end or do not end alike are one.

    Args:
        vocabularies (`list[Vocabulary]`): the members', the main model's first.
    """

    def __init__(self, vocabularies: list[Vocabulary]) -> None:
        self.vocabularies = vocabularies
        self.margins: list[list[float]] = [[] for _ in vocabularies]
        self._candidates: dict[tuple[str, bool], Candidate] = {}

    def add(self, member: int, proposals: Proposals) -> None:
        """Put a member's proposals on the table; its own ids of a text are kept for its own score."""
        self.margins[member] = proposals.margins
        for branch, proposal in enumerate(proposals.spans):
            key = (proposal.text, proposal.ends)
            candidate = self._candidates.get(key)
            if candidate is None:
                candidate = Candidate(proposal.text, proposal.words, proposal.ends, {}, (member, branch))
                self._candidates[key] = candidate
            if member not in candidate.proposers:
                candidate.proposers.append(member)
                candidate.ids[member] = list(proposal.ids)
                if member in candidate.lossy:
                    candidate.lossy.remove(member)
            if (member, branch) < candidate.order:
                candidate.order, candidate.words = (member, branch), proposal.words

    def ranked(self) -> list[Candidate]:
        """All candidates, in the order in which ties are broken."""
        return sorted(self._candidates.values(), key=lambda candidate: candidate.order)

    def ids(self, member: int, candidate: Candidate) -> list[int]:
        """A candidate in a member's tokens: its own, or its tokenization of the text as a continuation."""
        if member not in candidate.ids:
            encoding = self.vocabularies[member].encode(candidate.text)
            candidate.ids[member] = encoding.ids
            if not encoding.exact:
                candidate.lossy.append(member)
        return candidate.ids[member]

    def encode(self, member: int, text: str) -> list[int]:
        """A text that is no candidate in a member's tokens."""
        return self.vocabularies[member].encode(text).ids

    def can_commit(self, candidate: Candidate) -> bool:
        """Whether the main model's ids can carry the text to the caller; special tokens alone carry none."""
        self.ids(0, candidate)
        return 0 not in candidate.lossy and bool(candidate.text or candidate.ends)

    def settle(self, config: AdaFuseConfig, log_probs: list[dict[int, list[float]]]) -> Candidate | None:
        """
        Score the candidates and choose the lowest (equation 5).

        Args:
            log_probs (`list`): per member, the log-probabilities of each candidate it scored, by the candidate's rank.

        Returns:
            the winner, or `None` when every candidate is forbidden or dropped.
        """
        ranked = self.ranked()
        weights = config.model_weights or [1.0] * len(self.vocabularies)
        for rank, candidate in enumerate(ranked):
            num_bytes = len(candidate.text.encode("utf-8", "replace")) + candidate.ends
            per_byte = num_bytes if config.nll_normalization == "byte" else None
            for member, scored in enumerate(log_probs):
                candidate.nlls[member] = span_nll(scored[rank], per_byte) if rank in scored else None
            if candidate.dropped is None:
                candidate.score = fused_score(list(candidate.nlls.values()), weights)
        open_candidates = [candidate for candidate in ranked if candidate.score < math.inf]
        if not open_candidates:
            return None
        return open_candidates[first_lowest([candidate.score for candidate in open_candidates])]

    def trace(self) -> list[AdaFuseCandidate]:
        return [
            AdaFuseCandidate(
                text=candidate.text,
                words=list(candidate.words),
                ends=candidate.ends,
                proposers=sorted(candidate.proposers),
                nlls=[candidate.nlls.get(member) for member in range(len(self.vocabularies))],
                score=candidate.score,
                lossy=sorted(candidate.lossy),
                dropped=candidate.dropped,
            )
            for candidate in self.ranked()
        ]
