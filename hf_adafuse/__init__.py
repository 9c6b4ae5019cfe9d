"""AdaFuse: adaptive word-level ensemble decoding of several language models inside transformers' `generate()`."""

from .config import AdaFuseConfig
from .decoding import AdaFuseDecodingError
from .generation import AdaFuseGenerationMixin, disable_adafuse, enable_adafuse
from .outputs import AdaFuseCandidate, AdaFuseOutput, AdaFuseRound

__version__ = "0.1.0"

__all__ = [
    "AdaFuseCandidate",
    "AdaFuseConfig",
    "AdaFuseDecodingError",
    "AdaFuseGenerationMixin",
    "AdaFuseOutput",
    "AdaFuseRound",
    "disable_adafuse",
    "enable_adafuse",
]
