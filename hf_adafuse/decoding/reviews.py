"""Members rate whole answers: each reads rating prompts beside the prompts that are decoded, and its reply is the mean
over the digits that it could write.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..confidence.answer_text import cut_at
from ..members.member import Member, Span
from ..members.node_logprobs import log_sum
from ..members.rating_prompts import RatingPrompts, orders_of
from .long_spans import long_log_probs
from .pool import Pool
from .progress import Prompt
from .requests import Requests, run_on_each_member


class Reviews:
    """
    Has answers rated.

    Args:
        raters (`list[Member]`): the members once more, the main model first, with trees of their own and no prompts
            yet. Those of the scheduler stand behind the members.
        rating_prompts (`list[RatingPrompts]`): per member, makes the prompts that it rates by.
    """

    def __init__(self, raters: Sequence[Member], rating_prompts: Sequence[RatingPrompts]) -> None:
        self.raters = list(raters)
        self._rating_prompts = rating_prompts
        self._prefixes: list[list[list[int]]] = [[] for _ in raters]

    def start(self, questions: Sequence[str]) -> None:
        """Give the raters the prompts of a call, by what these ask. None is read before the raters' `read_prompts`."""
        for rater, prompts in zip(self.raters, self._add_prefixes(questions), strict=True):
            rater.start(prompts, [], num_top=2)

    def add(self, question: str) -> None:
        """A further prompt, while others go on."""
        for rater, prompts in zip(self.raters, self._add_prefixes([question]), strict=True):
            rater.add_prompts(prompts, [])

    def rate(self, prompt: Prompt, pool: Pool, stop_texts: Sequence[str]) -> Requests[None]:
        """
        Give the candidates of a prompt that can be committed, and have been scored, their ratings. Equal texts, but for
        space around them, are rated once. They are shown in an order that follows from what they say, and not from who
        has proposed them.

        Args:
            prompt (`Prompt`): the prompt that the answers belong to.
            pool (`Pool`): what a member gives no probability is not rated.
            stop_texts (`list[str]`): the texts at which an answer ends. Raters do not see them.
        """
        candidates = {
            candidate: (prompt.text + cut_at(candidate.text, stop_texts)).strip()
            for candidate in pool.ranked()
            if candidate.dropped is None
            and all(-math.inf not in log_probs for log_probs in candidate.log_probs.values())
        }
        texts = sorted(set(candidates.values()))
        if not texts:
            return
        parts = [self._rate(k, prompt, texts) for k in range(len(self.raters))]
        found = yield from run_on_each_member(parts, [rater.device_key for rater in self.raters])
        for candidate, text in candidates.items():
            candidate.ratings = [of_rater[texts.index(text)] for of_rater in found]

    def _rate(self, k: int, prompt: Prompt, texts: Sequence[str]) -> Requests[list[float | None]]:
        """A member's rating of each text: the mean over the orders in which it is shown. `None` of all where one of the
        prompts does not fit into the member's context."""
        rater = self.raters[k]
        rating_prompts = self._rating_prompts[k]
        shown = [(order, place) for order in orders_of(len(texts)) for place in range(len(order))]
        suffixes = [rating_prompts.suffix([texts[at] for at in order], place) for order, place in shown]
        replies = [(score, ids) for score, of_score in enumerate(rating_prompts.replies, start=1) for ids in of_score]
        longest = max(map(len, suffixes)) + max(len(ids) for _, ids in replies)
        if not self._fits(k, len(self._prefixes[k][prompt.index]) + longest):
            return [None] * len(texts)
        spans = [Span([*suffix, *ids], False, len(suffix)) for suffix in suffixes for _, ids in replies]
        log_probs = yield from long_log_probs(len(self.raters) + k, rater, prompt.index, spans)
        ratings: list[list[float]] = [[] for _ in texts]
        for number, (order, place) in enumerate(shown):
            found = log_probs[number * len(replies) : (number + 1) * len(replies)]
            pairs = [(score, math.fsum(values)) for (score, _), values in zip(replies, found, strict=True)]
            ratings[order[place]].append(expected_score(pairs))
        return [math.fsum(of_text) / len(of_text) for of_text in ratings]

    def _add_prefixes(self, questions: Sequence[str]) -> list[list[list[int]]]:
        """Per member, the prefixes of its rating prompts to these questions, which it reads now: of one that outgrows
        its context a single token, below which nothing will be read."""
        added = [[of_member.prefix(question) for question in questions] for of_member in self._rating_prompts]
        for prefixes, new in zip(self._prefixes, added, strict=True):
            prefixes += new
        return [[ids if self._fits(k, len(ids)) else ids[:1] for ids in new] for k, new in enumerate(added)]

    def _fits(self, k: int, length: int) -> bool:
        max_length = self.raters[k].max_length
        return max_length is None or length <= max_length


def expected_score(log_probs: Sequence[tuple[int, float]]) -> float:
    """
    The mean of scores by their probabilities, which are normalised: `[(1, log 0.1), (5, log 0.3)]` gives 4.

    Args:
        log_probs (`list[tuple[int, float]]`): scores and log-probabilities (nats); a score may come several times.
    """
    total = log_sum([value for _, value in log_probs])
    return math.fsum(score * math.exp(value - total) for score, value in log_probs)
