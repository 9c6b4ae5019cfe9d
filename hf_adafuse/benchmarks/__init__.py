"""Helpers to measure speed honestly on small machines. Knows models, not AdaFuse."""

from .enlarge import enlarge

__all__ = ["enlarge"]
