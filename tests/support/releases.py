"""The names of the installed transformers release: how a cache is passed to a call and read from what it returned."""

from __future__ import annotations

from typing import Any

from hf_adafuse.transformers_compat import CACHE_NAME

# The argument that takes Mamba's state: it had a name of its own before transformers 5.24.
STATE_NAME = "cache" if CACHE_NAME == "cache" else "cache_params"


def with_cache(cache: Any) -> dict[str, Any]:
    """The argument of `generate()` or of a model's `forward` that passes a cache."""
    return {CACHE_NAME: cache}


def cache_of(output: Any) -> Any:
    """The cache in what `generate()` or a model returned; `None` where there is none."""
    return getattr(output, CACHE_NAME)
