"""Rounds in which words are sampled: one member's word is drawn, and refused where the main model may not say it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from ..confidence.word_confidence import word_confidences
from ..members.member import Member, Span
from .pool import Candidate, Pool
from .progress import Prompt
from .proposer import Proposals, Proposer
from .requests import ForwardRequest, Requests
from .scoring import span_nll
from .word_sampler import WordSampler

# Words that the main model may refuse in a row; the next one it draws itself.
_MOST_REFUSED = 8


class SampledRounds:
    """
    Draws the candidate of each round.

    Args:
        members (`list[Member]`), proposers (`list[Proposer]`): the main model first.
        sampler (`WordSampler`)
        drop_unfit (`Callable`): `drop_unfit(prompt, pool)` marks candidates that cannot be committed.
    """

    def __init__(
        self,
        members: Sequence[Member],
        proposers: Sequence[Proposer],
        sampler: WordSampler,
        drop_unfit: Callable[[Prompt, Pool], None],
    ) -> None:
        self._members = members
        self._proposers = proposers
        self._sampler = sampler
        self._drop_unfit = drop_unfit

    def draw(self, prompt: Prompt) -> Requests[tuple[Pool, Candidate]]:
        """A candidate, alone in its pool; `dropped` where it does not fit into a context."""
        for num_refused in itertools.count():
            member_index, word = yield from self._sampler.sample(0 if num_refused == _MOST_REFUSED else None)
            proposal = self._proposers[member_index].proposal([word])
            pool = Pool([member.vocabulary for member in self._members])
            pool.add(member_index, Proposals([proposal], []))
            (candidate,) = pool.ranked()
            self._drop_unfit(prompt, pool)
            member = self._members[member_index]
            member.num_proposals += 1
            if candidate.dropped is not None and candidate.reaches_caller:
                return pool, candidate
            (log_probs,) = member.log_probs(prompt.index, [Span(candidate.ids[member_index], candidate.ends)])
            if member_index == 0:
                candidate.end_token = word.end_token
            if member_index == 0 or (yield from self._is_accepted(prompt, pool, candidate, log_probs)):
                candidate.nlls[member_index] = span_nll(log_probs)
                if candidate.words:
                    of_word = log_probs[: len(candidate.ids[member_index])]  # without the end after it
                    candidate.confidences = word_confidences([[of_word]], [1.0])
                candidate.score = candidate.nlls[member_index] or 0.0
                candidate.decided_by = [candidate.score]
                pool.criterion = "NLL of the word, which was drawn"
                candidate.dropped = None  # also a special token of the main model's own, which has no text
                self._sampler.keep(member_index, word)
                return pool, candidate
        raise AssertionError("unreachable: the main model's own words are accepted")

    def _is_accepted(self, prompt: Prompt, pool: Pool, candidate: Candidate, log_probs: list[float]) -> Requests[bool]:
        """
        Whether an assistant may say the word (it may not, where nothing was left to it), and whether the main model
        can write it and may say it; it reads the word where that is to be known.
        """
        main = self._members[0]
        if not candidate.reaches_caller or -math.inf in log_probs:
            return False
        if not (main.has_processors or prompt.keeps_logits or candidate.ends):
            return True
        span = Span(pool.encode_for(0, candidate), candidate.ends)
        if needed := main.needed_to_score(prompt.index, [span]):
            yield ForwardRequest(0, needed)
        return -math.inf not in main.log_probs(prompt.index, [span])[0]
