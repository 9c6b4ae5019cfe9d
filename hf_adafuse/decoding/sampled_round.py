"""Rounds in which words are sampled: one member's word is drawn, and refused where the main model may not say it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..confidence.word_confidence import word_confidences
from ..members.member import Span
from .member_weights import shares
from .pool import Candidate, Pool
from .proposer import Proposals, Proposer
from .requests import ForwardRequest, Requests
from .round import Round, WrittenText
from .samplers import WordSampler
from .scoring import span_nll

# Words that the main model may refuse in a row; the next one it draws itself.
_MOST_REFUSED = 8


@dataclass(eq=False)
class SampledRound(Round[WrittenText]):
    """
    Runs rounds in which a word is drawn, for one prompt.

    Args:
        members (`list[Member]`): the members, the main model first.
        proposers (`list[Proposer]`): one per member.
        sampler (`WordSampler`): draws the words of the prompt.
    """

    proposers: Sequence[Proposer]
    sampler: WordSampler

    def run(self, text: WrittenText) -> Requests[Pool]:
        """Draw until a word is accepted; one that does not fit into a context is `dropped`."""
        num_proposals = [0] * len(self.members)  # refused ones, too
        self._num_refused = 0
        while True:  # the main model's own words are accepted
            pool = yield from super().run(text)
            num_proposals = [a + b for a, b in zip(num_proposals, pool.num_proposals, strict=True)]
            if pool.winner is not None:
                pool.num_proposals = num_proposals
                del self._word  # its nodes and their logits live no longer than the round
                return pool
            self._num_refused += 1

    def propose(self, text: WrittenText, pool: Pool) -> Requests[None]:
        """The word that one member draws."""
        self._author, self._word = yield from self.sampler.sample(0 if self._num_refused == _MOST_REFUSED else None)
        pool.add(self._author, Proposals([self.proposers[self._author].proposal([self._word])], []))

    def score(self, text: WrittenText, pool: Pool) -> Requests[None]:
        """Give the word its log-probabilities under the member that drew it, and under the main model where its
        processors or the caller need them."""
        (candidate,) = pool.ranked()
        text.drop_unfit(pool)
        if self._outgrows_context(candidate):
            return
        index, author = text.prompt.index, self._author
        (of_author,) = self.members[author].log_probs(index, [Span(candidate.ids[author], candidate.ends)])
        candidate.log_probs[author] = of_author
        main = self.members[0]
        is_read = main.has_processors or text.prompt.keeps_logits or candidate.ends
        if author > 0 and is_read and candidate.reaches_caller and -math.inf not in of_author:
            span = text.span(0, pool, candidate)
            if needed := main.needed_to_score(index, [span]):
                yield ForwardRequest(0, needed)
            (candidate.log_probs[0],) = main.log_probs(index, [span])

    def choose(self, text: WrittenText, pool: Pool) -> Requests[Candidate | None]:
        """The word; `None` where it is refused."""
        yield from ()
        (candidate,) = pool.ranked()
        if self._outgrows_context(candidate):
            return candidate
        if self._author == 0:
            candidate.end_token = self._word.end_token
        elif not self._is_allowed(candidate):
            return None
        log_probs = candidate.log_probs[self._author]
        candidate.nlls[self._author] = span_nll(log_probs)
        if candidate.words:
            of_word = log_probs[: len(candidate.ids[self._author])]  # without the end after it
            candidate.confidences = word_confidences([[of_word]], [1.0])
        candidate.score = candidate.nlls[self._author] or 0.0
        candidate.decided_by = [candidate.score]
        candidate.dropped = None  # also a special token of the main model's own, which has no text
        pool.criterion = "NLL of the word, which was drawn"
        pool.weights = shares(self.sampler.weights)
        self.sampler.keep(self._author, self._word)
        return candidate

    def _outgrows_context(self, candidate: Candidate) -> bool:
        return candidate.dropped is not None and candidate.reaches_caller

    def _is_allowed(self, candidate: Candidate) -> bool:
        """Whether an assistant's word may be committed: no processors of the assistant or of the main model forbid it,
        and the main model has tokens for it."""
        return candidate.reaches_caller and all(-math.inf not in values for values in candidate.log_probs.values())
