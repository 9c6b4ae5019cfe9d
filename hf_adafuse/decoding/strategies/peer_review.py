"""LLM-PeerReview (arXiv 2512.23213): the members rate each other's whole answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from ...members.rating_prompts import Rubric
from ...members.vocabulary import Vocabulary
from ..scored_spans import Choice, ScoredSpan
from ..scoring import TIE_TOLERANCE, first_lowest, fused_score
from .majority import WholeAnswers


@dataclass
class PeerReview(WholeAnswers):
    """
    Every member answers alone, greedily or sampled; every member rates every answer, its own too, by a rubric, and the
    answer of the highest mean rating is taken. Of equal ratings (within 1e-6) the lower fused NLL wins.

    A rating by member k is the mean over the orders in which the answer is shown to it of

        sum_d d p_k(d) / sum_d p_k(d),    d = 1, ..., max_score,

    where p_k(d) is the probability that the member's reply to the rating prompt begins with the digit d, with or
    without a space before it. Up to three answers stand in a prompt, in the member's own chat template: with N > 3
    answers three neighbours on a ring from each place on, and the same triples turned round; with two both orders. The
    mean over members counts each by its weight. `ratings` of the candidates in `rounds` are each member's; a member
    into whose context a rating prompt does not fit gives none, and where nobody gives any, the lowest fused NLL wins.

    Source: the paper's LLM-PeerReview-Average with flipped triples, and the released code. The released code differs:

    - a rating is the digit that a member writes, and a reply without digits counts as the middle;
    - a member writes the three digits of a triple at once; here it is asked for each answer of a triple apart;
    - the ring is shuffled at random; here its order follows from the texts, so that neither chance nor the order of the
      members decides;
    - an answer that several members give is rated as often; here once;
    - ties are broken at random;
    - each task has a rubric of its own, of several hundred words, for the task's prompts;
    - a variant learns the weight of each rater from all questions of a data set; here `select` learns it from questions
      with known answers.

    Args:
        num_samples (`int`, *optional*, defaults to 1): how many answers each member draws, with `do_sample=True`.
        rubric (`str`, *optional*): what the raters read before the question. `None`: a rubric for questions of any
            kind, of 70 words.
        max_score (`int`, *optional*, defaults to 5): the best rating, from 2 to 9. A rubric of your own must name it.
    """

    request_options = ("rubric",)
    rubric: str | None = None
    max_score: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rated_by = Rubric(self.rubric, self.max_score)
        self._show(is_rated=True)

    def check_members(self, vocabularies: Sequence[Vocabulary]) -> None:
        assert self.rated_by is not None
        self.rated_by.check_members(vocabularies)

    def choose(self, candidates: Sequence[ScoredSpan], weights: Sequence[float], main_index: int | None) -> Choice:
        rated = [index for index, one in enumerate(candidates) if one.is_possible and _is_rated(one.ratings)]
        self._show(is_rated=bool(rated))
        if not rated:
            return super().choose(candidates, weights, main_index)
        nlls = self.nlls(candidates, len(weights))
        fused = [fused_score(nlls[index], weights) for index in rated]
        means = [mean_rating(candidates[index].ratings, weights) for index in rated]
        winner = rated[best_rated([candidates[index].ratings for index in rated], fused, weights)]
        scores = [math.inf] * len(candidates)
        for index, mean in zip(rated, means, strict=True):
            scores[index] = -mean
        notes = {
            index: "as high a rating, but a higher fused NLL"
            for index in rated
            if index != winner and scores[index] <= scores[winner] + TIE_TOLERANCE
        }
        shown = [[-score] if score < math.inf else [] for score in scores]
        return Choice(winner, nlls, scores, shown, notes)

    def _show(self, is_rated: bool) -> None:
        """By what the trace says that the winner was found."""
        self.criterion, self.highest_wins = ("mean rating", True) if is_rated else ("fused NLL", False)


def best_rated(
    ratings: Sequence[Sequence[float | None]],
    nlls: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
) -> int:
    """
    The index of the answer of the highest mean rating; of equals (within 1e-6) the one of the lowest NLL, then the
    first.

    Args:
        ratings (array of shape `(num_candidates, num_raters)`): `None` or NaN stands for a rater that gives none.
        nlls (`list[float]` of shape `(num_candidates,)`, *optional*): the answers' fused NLLs, which break ties.
        weights (`list[float]` of shape `(num_raters,)`, *optional*): how much each rater counts. By default all count
            alike.

    Raises:
        ValueError: there are no candidates, or one that nobody has rated.
    """
    rows = [list(row) for row in ratings]
    if not rows or not all(map(_is_rated, rows)):
        raise ValueError(
            f"`ratings` must be of at least one candidate, each rated by somebody, but are {ratings!r}. Leave out "
            "candidates that nobody has rated."
        )
    means = [mean_rating(row, weights if weights is not None else [1.0] * len(row)) for row in rows]
    best = [index for index, mean in enumerate(means) if mean >= max(means) - TIE_TOLERANCE]
    return best[0] if nlls is None else best[first_lowest([float(nlls[index]) for index in best])]


def mean_rating(ratings: Sequence[float | None], weights: Sequence[float]) -> float:
    """The weighted mean over the raters that have given one."""
    pairs = [(float(rating), weight) for rating, weight in zip(ratings, weights, strict=True) if _is_given(rating)]
    return math.fsum(rating * weight for rating, weight in pairs) / math.fsum(weight for _, weight in pairs)


def _is_given(rating: float | None) -> TypeGuard[float]:
    return rating is not None and not math.isnan(rating)


def _is_rated(ratings: Sequence[float | None]) -> bool:
    return any(map(_is_given, ratings))
