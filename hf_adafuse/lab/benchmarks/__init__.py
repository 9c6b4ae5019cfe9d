"""Helpers to measure speed honestly on small machines: larger models that compute the same, and `measure`."""

from .enlarge import enlarge
from .measuring import measure
from .results import Measurement

__all__ = ["Measurement", "enlarge", "measure"]
