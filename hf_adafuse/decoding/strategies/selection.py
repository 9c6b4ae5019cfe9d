"""Selection by calibrated confidence: of the members' own answers the one that is most likely right."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...confidence.calibration import Calibration
from ...confidence.features import (
    AnswerFacts,
    PromptFacts,
    Row,
    answer_features,
    feature_names,
    filled,
)
from ...confidence.word_confidence import word_log_confidences
from ...members.rating_prompts import Rubric
from ...members.vocabulary import Vocabulary
from ..scored_spans import END, Choice, ScoredSpan
from .majority import WholeAnswers
from .strategy import check_switch, lowest


@dataclass
class Select(WholeAnswers):
    """
    Every member answers alone, greedily or sampled, and every member scores every answer. With a calibration the answer
    that is most likely right is taken, and `confidence` is that probability. Without one, the answer of the highest
    geometric mean over its words of the members' mean probability is taken: `confidence`, which falls with the number
    of words, would prefer short answers. An answer that came neither to its end nor to a text to stop at is taken only
    where no other did: members are sure of one that repeats itself.

    Args:
        calibration (`dict` or `str`, *optional*): the values of `Calibration.to_dict()`, or the name of an
            `adafuse.json` that holds them as `calibration`. It must have been fitted to as many members, in the same
            order.
        with_features (`bool`, *optional*, defaults to `False`): whether candidates in `rounds` have `features` without
            a calibration too. `hf_adafuse.confidence.features` describes them.
        with_ratings (`bool`, *optional*, defaults to `False`): whether the members rate the answers as with the method
            `peer-review`. Their ratings are then features too, and the calibration must have been fitted with them.
        rubric (`str`, *optional*), max_score (`int`, *optional*, defaults to 5): the options of `peer-review`.
    """

    request_options = ("rubric",)
    num_samples: int = field(default=1, init=False)
    highest_wins = True
    calibration: Mapping[str, Any] | str | None = None
    with_features: bool = False
    with_ratings: bool = False
    rubric: str | None = None
    max_score: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("with_features", "with_ratings"):
            check_switch(name, getattr(self, name))
        rubric = Rubric(self.rubric, self.max_score)
        if not self.with_ratings and rubric != Rubric():
            raise ValueError(
                "`with_ratings` must be True with `rubric` or `max_score`, but is False. Set it, or leave these out."
            )
        self.rated_by = rubric if self.with_ratings else None
        self._values = None if self.calibration is None else _read(self.calibration)
        self._calibration = None if self._values is None else Calibration.from_dict(self._values)
        self.needs_prompt_facts = self._calibration is not None or self.with_features

    @property
    def criterion(self) -> str:  # type: ignore[override]
        return "mean word confidence" if self._calibration is None else "probability of being right"

    def prepare(self, device: torch.device) -> None:
        if isinstance(self.config.model_weights, str):
            raise ValueError(
                f"`model_weights` must be numbers or left out with method 'select', but is "
                f"{self.config.model_weights!r}. What the prompt says of the members is among the features."
            )

    def check_members(self, vocabularies: Sequence[Vocabulary]) -> None:
        if self.rated_by is not None:
            self.rated_by.check_members(vocabularies)
        if self._calibration is None or self._values is None:
            return
        names = feature_names(len(vocabularies), self.with_ratings)
        fitted = self._values.get("features")
        if fitted is not None and not isinstance(fitted, list):
            raise ValueError(f"`features` of a calibration must be a list of names, but is {fitted!r}. Fit it again.")
        if self._calibration.num_candidates != len(vocabularies):
            raise ValueError(
                f"`calibration` must be of as many members as there are, {len(vocabularies)}, but is of "
                f"{self._calibration.num_candidates}. Fit it with these members, in this order."
            )
        others = feature_names(len(vocabularies), not self.with_ratings)
        if self._calibration.num_features == len(others):
            raise ValueError(
                f"`with_ratings` must be as in the fit of `calibration`, {not self.with_ratings}, but is "
                f"{self.with_ratings}: it is of {len(others)} features, and there are {len(names)}. Set it so, or fit "
                "again."
            )
        if self._calibration.num_features != len(names) or (fitted is not None and list(fitted) != names):
            raise ValueError(
                f"`calibration` must be of the {len(names)} features of this version, but is of "
                f"{self._calibration.num_features} others. Fit it again with `hf-adafuse fit`."
            )

    def portable_options(self) -> dict[str, Any]:
        """The calibration itself instead of the name of its file."""
        return {**self.config.method_options, **({} if self._values is None else {"calibration": self._values})}

    def choose(self, candidates: Sequence[ScoredSpan], weights: Sequence[float], main_index: int | None) -> Choice:
        nlls = self.nlls(candidates, len(weights))
        features = self._features(candidates, weights) if self.needs_prompt_facts else {}
        notes: dict[int, str] = {}
        if self._calibration is None:
            scores = [_score(candidate, weights) for candidate in candidates]
            confidences: dict[int, float] = {}
            are_whole = [self._is_whole(candidate) for candidate in candidates]
            if any(one.is_possible and is_whole for one, is_whole in zip(candidates, are_whole, strict=True)):
                notes = {index: "came to no end" for index, is_whole in enumerate(are_whole) if not is_whole}
        else:
            confidences = self._probabilities(self._calibration, candidates, features, len(weights))
            scores = [
                -math.log(max(confidences[index], sys.float_info.min)) if index in confidences else math.inf
                for index in range(len(nlls))
            ]
        choice = lowest(candidates, nlls, scores)
        shown = [[math.exp(-score)] for score in choice.scores]
        compared = [math.inf if index in notes else score for index, score in enumerate(scores)]
        winner = lowest(candidates, nlls, compared).winner
        return Choice(winner, nlls, choice.scores, shown, notes, features=features, confidences=confidences)

    def _is_whole(self, candidate: ScoredSpan) -> bool:
        """Whether an answer came to its end, or to a text to stop at."""
        return candidate.words[-1:] == (END,) or self.answer_in(candidate.text) != candidate.text

    def _features(self, candidates: Sequence[ScoredSpan], weights: Sequence[float]) -> dict[int, Row]:
        """Per candidate that is possible, by its index."""
        possible = [index for index, candidate in enumerate(candidates) if candidate.is_possible]
        texts: list[str | None] = [None] * len(weights)
        for index in possible:
            for k in candidates[index].proposers:
                texts[k] = self.answer_in(candidates[index].text)
        facts = [
            AnswerFacts(
                self.answer_in(one.text),
                one.log_probs,
                sum(one.num_bytes),
                tuple(sorted(set(one.proposers))),
                one.ratings,
                is_whole=self._is_whole(one),
            )
            for one in (candidates[index] for index in possible)
        ]
        prompt = self.prompt_facts or PromptFacts(*[[None] * len(weights)] * 3)
        return dict(zip(possible, answer_features(facts, texts, weights, prompt), strict=True))

    def _probabilities(
        self, calibration: Calibration, candidates: Sequence[ScoredSpan], features: Mapping[int, Row], num_members: int
    ) -> dict[int, float]:
        """Per candidate that is possible, by its index, how likely it is to be right. An answer that several members
        give has a place for each: the highest probability counts."""
        index_of = {k: index for index in features for k in candidates[index].proposers}
        if not index_of:
            return {}
        rows = [features[index_of[k]] if k in index_of else None for k in range(num_members)]
        (found,) = calibration.probabilities(filled([rows], calibration.centres))
        probabilities: dict[int, float] = {}
        for k, index in index_of.items():
            probabilities[index] = max(float(found[k]), probabilities.get(index, 0.0))
        return probabilities


def _score(candidate: ScoredSpan, weights: Sequence[float]) -> float:
    """Minus the logarithm of the geometric mean of the confidences of a candidate's words. Where it has no word, the
    end of the text counts as one."""
    levels = [level for level, word in enumerate(candidate.words) if word != END] or range(len(candidate.words))
    of_words = [[of_member[level] for level in levels] if of_member else [] for of_member in candidate.log_probs]
    known = [value for value in word_log_confidences(of_words, weights) if value is not None]
    return -math.fsum(known) / len(known) if known else math.inf


def _read(calibration: Any) -> dict[str, Any]:
    """The values of a calibration, given as such or by the name of a file."""
    if isinstance(calibration, Mapping):
        return dict(calibration)
    rule = "`calibration` must be what `Calibration.to_dict()` gave, or the name of an adafuse.json"
    if not isinstance(calibration, str):
        raise ValueError(f"{rule}, but is {calibration!r}. Fit one with `hf-adafuse fit`.")
    try:
        found = json.loads(Path(calibration).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{rule}, but {calibration!r} cannot be read ({error}). Check the name.") from None
    values: Any = found
    for place in (found, found.get("adafuse_config", {})) if isinstance(found, Mapping) else ():
        values = place.get("calibration", values) if isinstance(place, Mapping) else None
    if not isinstance(values, Mapping):
        raise ValueError(f"{rule}, but {calibration!r} holds none. Fit one with `hf-adafuse fit`.")
    return dict(values)
