"""Ridge logistic regression by Newton's method: a few hundred rows, a few dozen columns, float64."""

from __future__ import annotations

from typing import Any

import numpy as np

# Newton's method converges in about eight steps; the objective is convex, and every step is halved until it descends.
_MOST_STEPS = 50
_MOST_HALVINGS = 30
_SMALLEST_STEP = 1e-9


def fit_ridge_logistic(columns: Any, labels: Any, penalties: Any) -> Any:
    """
    The coefficients that minimise the negative log-likelihood plus half the sum of penalty x coefficient^2.

    Args:
        columns (`numpy.ndarray` of shape `(num_rows, num_columns)`)
        labels (`numpy.ndarray` of shape `(num_rows,)`): 0 or 1.
        penalties (`numpy.ndarray` of shape `(num_columns,)`): positive: so there is one minimum.

    Returns:
        `numpy.ndarray` of shape `(num_columns,)`.
    """
    found = np.zeros(columns.shape[1])
    value = _objective(found, columns, labels, penalties)
    for _ in range(_MOST_STEPS):
        probabilities = sigmoid(columns @ found)
        gradient = columns.T @ (probabilities - labels) + penalties * found
        curvature = (columns * (probabilities * (1 - probabilities))[:, None]).T @ columns + np.diag(penalties)
        step = np.linalg.solve(curvature, gradient)
        if np.abs(step).max() < _SMALLEST_STEP:
            break
        for _ in range(_MOST_HALVINGS):
            lower = _objective(found - step, columns, labels, penalties)
            if lower <= value:
                found, value = found - step, lower
                break
            step = step / 2
        else:
            break  # rounding: nothing descends any further
    return found


def sigmoid(values: Any) -> Any:
    """1 / (1 + exp(-x)), without overflow."""
    return np.exp(-np.logaddexp(0.0, -values))


def _objective(found: Any, columns: Any, labels: Any, penalties: Any) -> float:
    values = columns @ found
    return float(np.sum(np.logaddexp(0.0, values) - labels * values) + 0.5 * np.sum(penalties * found**2))
