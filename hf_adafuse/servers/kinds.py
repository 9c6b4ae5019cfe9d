"""The kinds of servers, and the names of models behind them: `kind:url` or `kind:url#model`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .addresses import checked_url
from .api import ServerApi
from .llamacpp import LlamaCppApi
from .sglang import SglangApi
from .vllm import VllmApi

# The kinds of servers, by the names that users write: the one place where a further kind is added.
APIS: dict[str, type[ServerApi]] = {"vllm": VllmApi, "sglang": SglangApi, "llamacpp": LlamaCppApi}


def is_served_name(name: Any) -> bool:
    """Whether a name is that of a model behind a server: `kind:url` or `kind:url#model`."""
    kind, _, rest = str(name).partition(":")
    return kind in APIS and rest.startswith(("http://", "https://"))


def check_member_name(name: Any) -> None:
    """
    Check a member's name before it is kept or shown: a Hub name, a folder, or the name of a model behind a server.

    Raises:
        ValueError: it is like that of a server, and is none, or its URL holds more than a host: that may be a key; or
            it is an absolute path at which there is nothing.
    """
    kind, colon, rest = str(name).partition(":")
    if is_served_name(name):
        checked_url(rest.partition("#")[0], allow_http=True)
    elif colon and (kind in APIS or "://" in rest or rest.startswith("//")):
        raise ValueError(
            "A member's name must be a Hub name, a folder, or of a server like vllm:http://localhost:8000#model, but "
            f"begins with {kind + ':'!r}. Give the kind of the server ({', '.join(APIS)}) and its URL."
        )
    elif Path(name).is_absolute() and not Path(name).exists():
        raise ValueError(f"A member's name must be a Hub name or a folder, but there is no {name!r}. Check the path.")
