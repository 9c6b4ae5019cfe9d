"""Values as JSON can hold them."""

from __future__ import annotations

import math
from typing import Any


def with_nulls(value: Any) -> Any:
    """JSON has no infinity: `null` instead, as of the score of a candidate that was dropped."""
    if isinstance(value, dict):
        return {key: with_nulls(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_nulls(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
