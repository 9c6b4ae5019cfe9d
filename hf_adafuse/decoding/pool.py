"""The candidates of one prompt in one round: pooled by text, scored by all, one chosen."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from ..members.vocabulary import Vocabulary
from ..outputs import AdaFuseCandidate
from .proposer import Proposals
from .scored_spans import Choice


@dataclass(eq=False)
class Candidate:
    """
    A candidate of a round, and what each member makes of it.

    Args:
        text (`str`): the text of the span.
        words (`tuple[str]`): its words. Joined, they give `text`.
        ends (`bool`): whether the text ends after it.
        ids (`dict[int, list[int]]`): by the index of a member, the span in that member's tokens.
        order (`tuple[int, int]`): breaks ties: the index of its first proposer, then the number of the branch.
        proposers (`list[int]`): the members that proposed it. Empty where the method wrote it itself.
        lossy (`list[int]`): the members whose tokenizer cannot represent it.
        times (`Counter`): by the index of a member, how often that member proposed it.
        log_probs (`dict[int, list[float]]`): by member, the log-probability (nats) of each of its ids, and of the end
            of the text where `ends`. A member that has not scored it is missing.
        nlls (`dict[int, float]`): by member, its mean NLL. `None` where there was nothing to score.
        score (`float`): the method's score; the lowest wins.
        logits (`list[list[float]]`): per member, the logits of its ids, where the method needs them.
        dropped (`str`, *optional*): why it left the pool.
        decided_by (`list[float]`), note (`str`, *optional*): as of [`AdaFuseCandidate`].
        end_token (`int`, *optional*): the main model's end-of-sequence id after it, where that has been drawn.
        confidences (`list[float]`), confidence (`float`, *optional*): what [`AdaFuseRound`] says if it is committed.
        features (`list[float]`), ratings (`list[float]`): as of [`AdaFuseCandidate`].
    """

    text: str
    words: tuple[str, ...]
    ends: bool
    ids: dict[int, list[int]]
    order: tuple[int, int]
    proposers: list[int] = field(default_factory=list)
    lossy: list[int] = field(default_factory=list)
    times: Counter[int] = field(default_factory=Counter)
    log_probs: dict[int, list[float]] = field(default_factory=dict)
    nlls: dict[int, float | None] = field(default_factory=dict)
    score: float = math.inf
    logits: list[list[float]] = field(default_factory=list)
    dropped: str | None = None
    decided_by: list[float] = field(default_factory=list)
    note: str | None = None
    end_token: int | None = None
    confidences: list[float | None] = field(default_factory=list)
    confidence: float | None = None
    features: list[float | None] = field(default_factory=list)
    ratings: list[float | None] = field(default_factory=list)

    @property
    def reaches_caller(self) -> bool:
        """Whether the main model's ids can carry the text to the caller; special tokens alone carry none."""
        return 0 not in self.lossy and bool(self.text or self.ends)


class Pool:
    """
    The candidates of one prompt in one round. Two proposals are one candidate where their texts are equal and both end
    the text, or neither does.

    Args:
        vocabularies (`list[Vocabulary]`): one per member, the main model's first.

    Attributes:
        asked (`list[int]`): the indices of the members that propose and score.
        first (`int`): the index of the member that proposed first.
        margins (`list[list[float]]`): per member, the margins at the starts of the words that it proposed.
        num_proposals (`list[int]`): per member, how many texts it proposed.
        winner (`Candidate`, *optional*): the candidate that the round has chosen.
        weights (`list[float]`), criterion (`str`), highest_wins (`bool`): how it was chosen, as of [`AdaFuseRound`].
    """

    def __init__(self, vocabularies: Sequence[Vocabulary]) -> None:
        self.vocabularies = vocabularies
        self.margins: list[list[float]] = [[] for _ in vocabularies]
        self.asked = list(range(len(vocabularies)))
        self.first = 0
        self.num_proposals = [0] * len(vocabularies)
        self.winner: Candidate | None = None
        self.weights: list[float] = []
        self.criterion = "fused NLL"
        self.highest_wins = False
        self._candidates: dict[Hashable, Candidate] = {}
        self._best: dict[int, Candidate] = {}

    def add(self, member_index: int, proposals: Proposals) -> None:
        """Add a member's proposals; its own ids of a text are kept for its own score."""
        self.margins[member_index] = proposals.margins
        self.num_proposals[member_index] += len(proposals.spans)
        for branch, proposal in enumerate(proposals.spans):
            order = (member_index, branch)
            candidate = self._candidates.get((proposal.text, proposal.ends))
            if candidate is None:
                candidate = Candidate(proposal.text, proposal.words, proposal.ends, {}, order)
                self._candidates[proposal.text, proposal.ends] = candidate
            candidate.times[member_index] += 1
            if branch == 0:
                self._best[member_index] = candidate
            if member_index not in candidate.proposers:
                candidate.proposers.append(member_index)
                candidate.ids[member_index] = list(proposal.ids)
                if member_index in candidate.lossy:
                    candidate.lossy.remove(member_index)
            if order < candidate.order:
                candidate.order = order
                candidate.words = proposal.words
            self.encode_for(0, candidate)

    def add_text(
        self, text: str, words: tuple[str, ...], ends: bool, ids: dict[int, list[int]] | None = None
    ) -> Candidate:
        """Add a text that no member has proposed, behind all others; where one has, return that candidate. `ids` are
        the members' own ids of it, where they are known."""
        order = (len(self.vocabularies), 0)
        candidate = self._candidates.setdefault((text, ends), Candidate(text, words, ends, ids or {}, order))
        self.encode_for(0, candidate)
        return candidate

    @property
    def asks_one(self) -> bool:
        """Whether one member of several is asked alone."""
        return len(self.asked) == 1 < len(self.vocabularies)

    def clear(self) -> None:
        """Take out all candidates."""
        self._candidates.clear()
        self._best.clear()
        self.num_proposals = [0] * len(self.vocabularies)

    def fill(self, candidates: Sequence[Candidate]) -> None:
        """These candidates alone are in the pool, in this order, and none of them is another's equal: tokens, of which
        some have no text."""
        for rank, candidate in enumerate(candidates):
            candidate.order = (rank, 0)
        self._candidates = dict(enumerate(candidates))

    def ranked(self) -> list[Candidate]:
        """All candidates, in the order in which ties are broken."""
        return sorted(self._candidates.values(), key=lambda candidate: candidate.order)

    def encode_for(self, member_index: int, candidate: Candidate) -> list[int]:
        """A candidate in a member's tokens: its own, or its tokenization of the text as a continuation."""
        if member_index not in candidate.ids:
            encoding = self.vocabularies[member_index].encode(candidate.text)
            candidate.ids[member_index] = encoding.ids
            if not encoding.exact:
                candidate.lossy.append(member_index)
        return candidate.ids[member_index]

    def best_of(self, member_index: int) -> Candidate | None:
        """A member's best branch; `None` where it has not been asked."""
        return self._best.get(member_index)

    def members_whose_best_is(self, candidate: Candidate) -> tuple[int, ...]:
        """The members whose best branch a candidate is."""
        return tuple(member_index for member_index, best in self._best.items() if best is candidate)

    def record_scores(self, candidates: list[Candidate], choice: Choice) -> Candidate | None:
        """Note how these candidates were judged; returns the winner, or `None` when every one is forbidden."""
        for candidate, nlls, score in zip(candidates, choice.nlls, choice.scores, strict=True):
            candidate.nlls = dict(enumerate(nlls))
            candidate.score = score
        for index, candidate in enumerate(candidates):
            candidate.decided_by = choice.decided_by[index] if choice.decided_by else [candidate.score]
            candidate.note = choice.notes.get(index)
            candidate.confidence = choice.confidences.get(index)
            candidate.features = list(choice.features.get(index, ()))
        return None if choice.winner is None else candidates[choice.winner]

    def trace(self) -> list[AdaFuseCandidate]:
        """The candidates as the caller sees them."""
        return [
            AdaFuseCandidate(
                text=candidate.text,
                words=list(candidate.words),
                ends=candidate.ends,
                proposers=sorted(candidate.proposers),
                nlls=[candidate.nlls.get(member_index) for member_index in range(len(self.vocabularies))],
                score=candidate.score,
                lossy=sorted(candidate.lossy),
                dropped=candidate.dropped,
                decided_by=candidate.decided_by,
                note=candidate.note,
                features=candidate.features,
                ratings=candidate.ratings,
            )
            for candidate in self.ranked()
        ]
