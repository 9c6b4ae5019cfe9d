"""The probability that each of a question's candidate answers is right, fitted on a hundred questions or so.

A question has one candidate answer of each member, always in the order of the members: a candidate's place says which
member wrote it. Each candidate has features, numbers like the log-probability that a member gives it. The probability
is logistic in

- how each feature of the candidate differs from the question's mean of it,
- the question's mean of it: how easy the question looks,
- the place: how often the member is right,
- place x question's mean: on which questions the member is right. Where another member is the better one for each kind
  of prompt, features that are equal for all candidates (which prompt costs which member how much) say it here.

All features are standardised on the questions of the fit. The ridge penalties were chosen on the public ratings of
LLM-PeerReview (github.com/zeyuji/LLM-PeerReview): 33 sets of two to four models on TriviaQA, GSM8K and MATH, fitted on
100 questions of a random half and measured on the other half. Half or twice the penalties change the mean gain of the
chosen answers by less than 0.3 points.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .ridge import fit_ridge_logistic, sigmoid

# The inverse variance of a Gaussian prior on each coefficient, per standard deviation of its column. Products of place
# and prompt are as many as places times features: they are shrunk most.
FEATURE_PENALTY, PLACE_PENALTY, PRODUCT_PENALTY, _INTERCEPT_PENALTY = 10.0, 3.0, 30.0, 1e-6
# Standard deviations beyond which a feature counts no further: one outlier must not decide.
_MOST_DEVIATIONS = 5.0
# Values are clipped again and again, each time by the deviation that the last clipping has left. It ends where that
# deviation is steady, or where it vanishes: then all values but a few are alike.
_MOST_CLIPPINGS = 1000
_STEADY = 1 - 1e-6
_ALIKE = 1e-12
# A fit of fewer questions is noted as one that says little.
FEW_QUESTIONS = 30
# So is one with fewer right answers, or fewer wrong ones.
_FEW_ANSWERS = 10
# Squares of larger features would overflow.
_TOO_LARGE = 1e100
_VERSION = 1


@dataclass(frozen=True)
class Calibration:
    """
    Says how likely each candidate answer is to be right, given numbers about it. [`~Calibration.fit`] makes one from
    questions with known answers, and [`~Calibration.from_dict`] one that was kept.

    ```python
    >>> from hf_adafuse.confidence import Calibration

    >>> ratings = [[[5.0], [2.0]], [[4.0], [1.0]], [[2.0], [5.0]], [[1.0], [1.0]]]  # 4 questions, 2 candidates
    >>> calibration = Calibration.fit(ratings, [[1, 0], [1, 0], [0, 1], [0, 0]])
    >>> first, second = calibration.probabilities([[[5.0], [1.0]]])[0]
    >>> bool(first > 0.5 > second)
    True

    ```

    Attributes:
        num_candidates (`int`): the number of candidates of a question.
        num_features (`int`): the number of features of a candidate.
        centres (`tuple[float]`): per feature, the mean over the questions' means. In it and in the spreads an outlier
            counts as five deviations.
        prompt_spreads (`tuple[float]`): per feature, the standard deviation of the questions' means.
        own_spreads (`tuple[float]`): per feature, the standard deviation within a question.
        intercept (`float`): the constant of the logistic regression.
        own (`tuple[float]`): per feature, the coefficient of its difference from the question's mean.
        prompt (`tuple[float]`): per feature, the coefficient of the question's mean.
        places (`tuple[float]`): per candidate, the coefficient of being the candidate at that place.
        products (`tuple[tuple[float]]`): per candidate and feature, the coefficient of the place times the mean.
        note (`str`, *optional*): a warning about the fit. `None`: there is none.
    """

    num_candidates: int
    num_features: int
    centres: tuple[float, ...]
    prompt_spreads: tuple[float, ...]
    own_spreads: tuple[float, ...]
    intercept: float
    own: tuple[float, ...]
    prompt: tuple[float, ...]
    places: tuple[float, ...]
    products: tuple[tuple[float, ...], ...]
    note: str | None = None

    @classmethod
    def fit(cls, features: Any, is_right: Any, penalties: Sequence[float] | None = None) -> Calibration:
        """
        Fit on questions with known answers.

        Args:
            features (array of shape `(num_questions, num_candidates, num_features)`): the numbers about each candidate.
                They must be finite.
            is_right (array of shape `(num_questions, num_candidates)`): 1 or `True` where the candidate is right.
            penalties (`list[float]`, *optional*): per feature, the ridge penalty of its coefficients. They are
                positive. The larger a penalty, the less the feature counts. By default 10 for each.

        Returns:
            [`Calibration`]. Where all candidates are right, or all wrong, nothing tells them apart. Every probability
            is then (right + 1) / (questions + 2); a warning says so, and `note` too.

        Raises:
            ValueError: an array has another shape, or values that cannot be used.
        """
        values = _features(features)
        own_penalties = _penalties(penalties, values.shape[2])
        labels = _labels(is_right, values.shape[:2])
        num_questions, num_candidates, num_features = values.shape
        means = values.mean(1)
        sizes = np.abs(values).max((0, 1))
        centres, prompt_spreads = _centre_and_spread(means, sizes)
        _, own_spreads = _centre_and_spread((values - means[:, None]).reshape(-1, num_features), sizes)
        blank = cls(
            num_candidates,
            num_features,
            _numbers(centres),
            _numbers(prompt_spreads),
            _numbers(own_spreads),
            0.0,
            (0.0,) * num_features,
            (0.0,) * num_features,
            (0.0,) * num_candidates,
            ((0.0,) * num_features,) * num_candidates,
        )
        if labels.min() == labels.max():
            return blank._constant(num_questions, bool(labels.max()))
        columns = blank._columns(values)
        of_columns = blank._column_penalties(own_penalties)
        found = fit_ridge_logistic(columns.reshape(-1, columns.shape[2]), labels.reshape(-1), of_columns)
        note = None
        rarer, name = min((labels.sum(), "right"), ((1 - labels).sum(), "wrong"))
        if num_questions < FEW_QUESTIONS:
            note = f"fitted on {num_questions} questions only: its probabilities say little"
        elif rarer < _FEW_ANSWERS:
            note = f"fitted on {rarer:.0f} {name} answers only: its probabilities say little"
        return blank._with(found, note)

    def probabilities(self, features: Any) -> Any:
        """
        How likely each candidate is to be right.

        Args:
            features (array of shape `(num_questions, num_candidates, num_features)`): as of the fit.

        Returns:
            `numpy.ndarray` of shape `(num_questions, num_candidates)`: from 0 to 1. The rows do not sum to 1: several
            candidates may be right, or none.

        Raises:
            ValueError: another number of candidates or features, or values that are not finite.
        """
        values = _features(features)
        if values.shape[1:] != (self.num_candidates, self.num_features):
            raise ValueError(
                f"`features` must have the shape (questions, {self.num_candidates}, {self.num_features}) as those of "
                f"the fit, but have {values.shape}. Give each question the same candidates and features."
            )
        found = np.concatenate(
            [[self.intercept], self.own, self.prompt, self.places, np.asarray(self.products).reshape(-1)]
        )
        return sigmoid(self._columns(values) @ found)

    def to_dict(self) -> dict[str, Any]:
        """The calibration as plain JSON values."""
        return {
            "version": _VERSION,
            "num_candidates": self.num_candidates,
            "num_features": self.num_features,
            **{name: list(getattr(self, name)) for name in _PER_FEATURE},
            "places": list(self.places),
            "products": [list(row) for row in self.products],
            "intercept": self.intercept,
            "note": self.note,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Calibration:
        """
        The calibration that [`~Calibration.to_dict`] gave these values.

        Raises:
            ValueError: they are no such values.
        """
        try:
            if values["version"] != _VERSION:
                raise ValueError(f"version {values['version']!r}")
            num_candidates, num_features = (_count(values, name) for name in ("num_candidates", "num_features"))
            made = cls(
                num_candidates=num_candidates,
                num_features=num_features,
                **{name: _row(values, name, num_features) for name in _PER_FEATURE},
                intercept=_checked("intercept", [values["intercept"]], 1)[0],
                places=_row(values, "places", num_candidates),
                products=tuple(_checked("products", row, num_features) for row in values["products"]),
                note=values.get("note"),
            )
            if len(made.products) != num_candidates:
                raise ValueError(f"{len(made.products)} rows of products")
            if min(made.own_spreads + made.prompt_spreads) <= 0:
                raise ValueError("spreads must be positive")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(
                "`calibration` must be what `Calibration.to_dict()` gave, but is not: "
                f"{type(error).__name__}: {error}. Fit it again."
            ) from None
        return made

    def _columns(self, values: Any) -> Any:
        """What the probability is logistic in, of shape `(num_questions, num_candidates, num_columns)`."""
        num_questions, num_candidates, num_features = values.shape
        means = values.mean(1, keepdims=True)
        own = _clipped((values - means) / np.asarray(self.own_spreads))
        prompt = _clipped((means - np.asarray(self.centres)) / np.asarray(self.prompt_spreads))
        shape = (num_questions, num_candidates)
        places = np.broadcast_to(np.eye(num_candidates), (*shape, num_candidates))
        products = (places[..., None] * prompt[:, :, None, :]).reshape(*shape, num_candidates * num_features)
        return np.concatenate([np.ones((*shape, 1)), own, np.broadcast_to(prompt, own.shape), places, products], axis=2)

    def _column_penalties(self, of_features: Any) -> Any:
        places = np.full(self.num_candidates, PLACE_PENALTY)
        products = np.full(self.num_candidates * self.num_features, PRODUCT_PENALTY)
        return np.concatenate([[_INTERCEPT_PENALTY], of_features, of_features, places, products])

    def _with(self, found: Any, note: str | None) -> Calibration:
        """This calibration with other coefficients, in the order of the columns."""
        ends = np.cumsum([1, self.num_features, self.num_features, self.num_candidates])
        intercept, own, prompt, places, products = np.split(found, ends)
        return Calibration(
            self.num_candidates,
            self.num_features,
            self.centres,
            self.prompt_spreads,
            self.own_spreads,
            float(intercept[0]),
            _numbers(own),
            _numbers(prompt),
            _numbers(places),
            tuple(_numbers(row) for row in products.reshape(self.num_candidates, self.num_features)),
            note,
        )

    def _constant(self, num_questions: int, is_right: bool) -> Calibration:
        """One probability for all candidates, by the rule of succession; the note says why."""
        note = (
            f"all candidates of the {num_questions} questions were {'right' if is_right else 'wrong'}: nothing tells "
            "them apart, and every probability is the same"
        )
        warnings.warn(f"The calibration falls back: {note}. Fit it on more questions.", UserWarning, stacklevel=3)
        found = np.zeros(1 + 2 * self.num_features + self.num_candidates * (1 + self.num_features))
        found[0] = np.log(num_questions + 1) * (1 if is_right else -1)
        return self._with(found, note)


_PER_FEATURE = ("centres", "prompt_spreads", "own_spreads", "own", "prompt")


def _features(features: Any) -> Any:
    values = _array("features", features)
    if values.ndim != 3 or 0 in values.shape:
        raise ValueError(
            "`features` must have the shape (questions, candidates, features), each at least 1, but have "
            f"{values.shape}. Give every candidate of every question the same features."
        )
    usable = np.abs(values) < _TOO_LARGE
    if not usable.all():  # NaN is not usable either
        at = tuple(int(index) for index in np.argwhere(~usable)[0])
        raise ValueError(
            f"`features` must be finite numbers below {_TOO_LARGE:g}, but features{list(at)} is {values[at]}. Replace "
            "what is not known by the mean of the others."
        )
    return values


def _penalties(penalties: Sequence[float] | None, num_features: int) -> Any:
    if penalties is None:
        return np.full(num_features, FEATURE_PENALTY)
    values = _array("penalties", penalties)
    if values.shape != (num_features,) or not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(
            f"`penalties` must be {num_features} positive numbers, one per feature, but are {penalties!r}. Leave them "
            "out for the default."
        )
    return values


def _labels(is_right: Any, shape: tuple[int, ...]) -> Any:
    labels = _array("is_right", is_right)
    if labels.shape != tuple(shape):
        raise ValueError(
            f"`is_right` must have the shape {tuple(shape)} of the questions and candidates in `features`, but has "
            f"{labels.shape}. Give one value per candidate."
        )
    if not np.isin(labels, (0.0, 1.0)).all():
        wrong = labels[~np.isin(labels, (0.0, 1.0))][0]
        raise ValueError(f"`is_right` must be 0 or 1, but holds {wrong}. Decide which answers count as right.")
    return labels


def _array(name: str, values: Any) -> Any:
    try:
        if hasattr(values, "detach"):  # numpy has no bfloat16, and takes no tensor on a GPU or with a gradient
            values = values.detach().to("cpu").double()
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`{name}` must be an array of numbers, but is not: {error}. Pass a rectangular one."
        ) from None


def _centre_and_spread(values: Any, sizes: Any) -> tuple[Any, Any]:
    """
    The mean and the standard deviation of each column, in which a value counts as one of at most five deviations from
    the mean. Where all values but these are alike, all count as they are. The deviation is 1 where there is none but
    for the rounding of numbers of these sizes, so that it can be divided by.
    """
    of_all = values.mean(0), values.std(0)
    centre, spread = of_all
    for _ in range(_MOST_CLIPPINGS):
        values = centre + np.clip(values - centre, -_MOST_DEVIATIONS * spread, _MOST_DEVIATIONS * spread)
        centre, wider, spread = values.mean(0), spread, values.std(0)
        are_alike = spread <= _ALIKE * of_all[1]
        if ((spread >= _STEADY * wider) | are_alike).all():
            break
    centre, spread = np.where(are_alike, of_all[0], centre), np.where(are_alike, of_all[1], spread)
    return centre, np.where(spread > 1e-9 * sizes, spread, 1.0)


def _clipped(values: Any) -> Any:
    return np.clip(values, -_MOST_DEVIATIONS, _MOST_DEVIATIONS)


def _numbers(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _row(values: Mapping[str, Any], name: str, length: int) -> tuple[float, ...]:
    return _checked(name, values[name], length)


def _count(values: Mapping[str, Any], name: str) -> int:
    found = values[name]
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ValueError(f"{name} must be a whole number of at least 1")
    return found


def _checked(name: str, row: Sequence[Any], length: int) -> tuple[float, ...]:
    found = () if isinstance(row, str) else _numbers(row)
    if len(found) != length or not np.isfinite(found).all():
        raise ValueError(f"{name} must be {length} finite numbers")
    return found
