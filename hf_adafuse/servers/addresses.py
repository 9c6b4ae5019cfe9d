"""Checks a server's URL and the names of served models, keeps API keys out of messages, reads `Retry-After`."""

from __future__ import annotations

import ipaddress
import json
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# Of servers, by the names that users have for them.
KINDS = ("vllm", "sglang", "llamacpp")


def is_served_name(name: Any) -> bool:
    """Whether a name is that of a model behind a server: `kind:url` or `kind:url#model`."""
    kind, _, rest = str(name).partition(":")
    return kind in KINDS and rest.startswith(("http://", "https://"))


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
    elif colon and (kind in KINDS or "://" in rest or rest.startswith("//")):
        raise ValueError(
            "A member's name must be a Hub name, a folder, or of a server like vllm:http://localhost:8000#model, but "
            f"begins with {kind + ':'!r}. Give the kind of the server ({', '.join(KINDS)}) and its URL."
        )
    elif Path(name).is_absolute() and not Path(name).exists():
        raise ValueError(f"A member's name must be a Hub name or a folder, but there is no {name!r}. Check the path.")


def checked_url(url: Any, allow_http: bool) -> str:
    """
    The URL of a server, without a slash or `/v1` at its end.

    Raises:
        ValueError: it is none, it holds more than a host, or it is plain http to another host.
    """
    parts = urlsplit(url) if isinstance(url, str) else None
    has_key = parts is not None and ("@" in parts.netloc or bool(parts.query) or bool(parts.fragment))
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or has_key or not _has_port(parts):
        shown = f"one of {parts.hostname} with more than that" if parts is not None and has_key else repr(url)
        raise ValueError(
            f"`url` must be like http://localhost:8000 or https://host, but is {shown}. A key goes into an environment "
            "variable, `api_key_env`."
        )
    if parts.scheme == "http" and not allow_http and not _is_here(parts.hostname):
        raise ValueError(
            f"`url` must be https for another host than this one, but is {url!r}: prompts and keys would be sent in "
            "the clear. Pass allow_http=True (--allow-http) where the network may be trusted."
        )
    return str(url).rstrip("/").removesuffix("/v1")


def _has_port(parts: Any) -> bool:
    """Whether it is none, or a number that can be one."""
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def seconds_of(value: str | None) -> float:
    """The seconds that a `Retry-After` header asks for. It holds a number, or a date."""
    with suppress(TypeError, ValueError):
        return max(0.0, float(value or 0.0))
    with suppress(TypeError, ValueError):
        return max(0.0, parsedate_to_datetime(value or "").timestamp() - time.time())
    return 0.0


def without_key(key: str, text: str) -> str:
    """A text in which the API key is replaced by `***`, also in its JSON form."""
    for form in (key, json.dumps(key)[1:-1]) if key else ():
        text = text.replace(form, "***")
    return text
