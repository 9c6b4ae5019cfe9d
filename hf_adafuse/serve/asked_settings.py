"""Which settings of AdaFuse a request may name. Whoever asks is not known: a request must not load models, run a
regular expression of its own, or ask for more work than many usual requests are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The server's settings alone: names of models to load, a regular expression, whose search may take for ever, a file.
_OF_THE_SERVER = ("ranker", "fuser", "pattern", "calibration")
# The largest whole numbers: several times what is of use.
_MOST = {
    "num_branches": 16,
    "max_words": 64,
    "max_word_tokens": 256,
    "num_words": 256,
    "num_tokens": 256,
    "num_samples": 8,
    "num_fused": 8,
    "top_k": 1000,
    "num_steps": 20,
    "num_anchors": 10_000,
}
# Of what methods of the server's own have.
_MOST_OF_OTHERS = 1000


def check_asked(settings: Mapping[str, Any]) -> None:
    """
    Check the settings that a request names.

    Raises:
        ValueError: one is not for requests, or too large.
    """
    options = settings.get("method_options")
    if isinstance(options, Mapping):
        check_asked(options)
    for name, value in settings.items():
        if name in _OF_THE_SERVER:
            raise ValueError(
                f"`{name}` must be left out of requests, but is given. Set it where the server is started."
            )
        most = _MOST.get(name, _MOST_OF_OTHERS)
        if isinstance(value, int) and value > most:
            raise ValueError(f"`{name}` must be at most {most} in a request, but is {value}. Ask for less.")
        if isinstance(value, (list, dict)) and len(value) > _MOST_OF_OTHERS:
            raise ValueError(f"`{name}` must have at most {_MOST_OF_OTHERS} parts, but has {len(value)}. Shorten it.")
