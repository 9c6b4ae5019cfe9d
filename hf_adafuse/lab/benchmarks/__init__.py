"""Measures what an ensemble costs, also on small machines: `measure`, and `enlarge` for larger models of equal output.

`hf-adafuse bench` runs it.
"""

from .enlarge import enlarge
from .measuring import measure
from .results import Measurement

__all__ = ["Measurement", "enlarge", "measure"]
